"""Cutting a rank's share of a mini-batch into micro-batches, and balancing sequences over bins."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engines.config import EngineConfig
from engines.training.batch.packed import PackedBatch

LINEAR_COST = 16_384
"""Tokens at which a sequence's attention (quadratic) costs as much as its matrices (linear): 12 x hidden, about 1,400 wide."""


class SequenceTooLongError(ValueError):
    """A sequence that fits in no micro-batch, because it is longer than the token budget."""


@dataclass(frozen=True)
class Alignment:
    """To what a backend pads micro-batches, and how many ranks share one. Padding counts against the budget."""

    sequence: int = 1
    """Each sequence is padded to a multiple of this."""
    total: int = 1
    """So are all of them together."""
    ranks: int = 1
    """Ranks that share each sequence; the budget is one rank's."""

    def rows(self, lengths: Sequence[int]) -> int:
        """Rows of a micro-batch of sequences of these lengths, on all ranks together."""
        return -(-sum(self.padded(lengths)) // self.total) * self.total

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """Rows of each sequence."""
        return [-(-length // self.sequence) * self.sequence for length in lengths]


NO_PADDING = Alignment()


@dataclass(frozen=True)
class MicroBatch:
    """A part of a rank's batch that is executed at once."""

    batch: PackedBatch
    indices: list[int]
    """Positions of its sequences in the batch that was split; [-1] for a filler."""

    @property
    def is_filler(self) -> bool:
        """One token of weight 0, there only so that all ranks run equally many micro-batches."""
        return self.indices == [-1]


def sequence_costs(lengths: Sequence[int]) -> list[int]:
    """Cost of each sequence in arbitrary units: linear part (matrices) plus quadratic part (attention)."""
    return [LINEAR_COST * length + length * length for length in lengths]


def balanced_partitions(costs: Sequence[int], parts: int, equal_size: bool = False) -> list[list[int]]:
    """Divide items into ``parts`` lists of nearly equal total cost; each list is ascending, ties are broken by index.

    The largest differencing method of Karmarkar and Karp (The Differencing Method of Set Partitioning, 1982), extended to
    several parts. With ``equal_size`` the lists differ by at most one item in length.

    Raises:
        ValueError: ``parts`` is not positive.
    """
    if parts < 1:
        raise ValueError(f"parts={parts}: must be at least 1")
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    chunk = parts if equal_size else 1
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(order), chunk):
        bins = [(costs[item], [item]) for item in order[start : start + chunk]]
        bins += [(0, [])] * (parts - len(bins))
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], start, bins))
    age = len(order)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # The largest bin of one state takes the smallest of the other.
        merged = [(a + b, [*x, *y]) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda entry: (-entry[0], entry[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], age, merged))
        age += 1
    bins = heap[0][2] if heap else [(0, [])] * parts
    return [sorted(items) for _, items in bins]


def split_micro_batches(
    batch: PackedBatch,
    config: EngineConfig,
    forward_only: bool,
    group: dist.ProcessGroup | None = None,
    multiple: int = 1,
    alignment: Alignment = NO_PADDING,
) -> list[MicroBatch]:
    """Cut ``batch`` into micro-batches, equally many on every rank of ``group``. Collective.

    The number is the largest that any rank needs, rounded up to ``multiple``; ranks with fewer sequences than that add
    fillers. With dynamic micro-batches no micro-batch exceeds the token budget, padding included.

    Raises:
        SequenceTooLongError: on all ranks, when any rank has a sequence above the token budget.
    """
    lengths = alignment.padded(batch.lengths.tolist())
    key = "token_budget"
    if forward_only and config.inference_token_budget is not None:
        key = "inference_token_budget"
    budget = getattr(config, key) * alignment.ranks // alignment.total * alignment.total
    bins = _bins_in_budget(lengths, budget) if config.dynamic_micro_batches else _chunks(len(batch), config)
    longest = int(batch.lengths.max()) if len(batch) else 0
    count, longest = _largest(len(bins), longest, group)
    if config.dynamic_micro_batches and alignment.rows([longest]) > budget:
        shared = f", shared by {alignment.ranks} ranks" if alignment.ranks > 1 else ""
        raise SequenceTooLongError(
            f"a sequence of {longest} tokens does not fit the budget of a micro-batch{shared}: raise engine.{key} "
            f"({getattr(config, key)}) or drop the sequence"
        )
    count = max(1, -(-count // multiple)) * multiple
    if len(bins) < count:
        bins = _spread(bins, lengths, count, budget if config.dynamic_micro_batches else None)
    micro_batches = [MicroBatch(batch.select(indices), indices) for indices in bins]
    return micro_batches + [_filler(batch)] * (count - len(bins))


def pipeline_order(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Cheap ones at both ends, the cheapest last, costly ones in the middle.

    A pipeline's stages idle while its first micro-batch comes in and, for twice as long, while its last one leaves.
    """
    costs = [sum(sequence_costs(m.batch.lengths.tolist())) for m in micro_batches]
    order = sorted(range(len(costs)), key=lambda i: costs[i])
    return [micro_batches[i] for i in (*order[1::2], *reversed(order[::2]))]


def _chunks(num_sequences: int, config: EngineConfig) -> list[list[int]]:
    size = config.micro_batch_size
    return [list(range(start, min(start + size, num_sequences))) for start in range(0, num_sequences, size)]


def _bins_in_budget(lengths: list[int], budget: int) -> list[list[int]]:
    """The fewest balanced bins that all fit ``budget``; costly ones first. A single sequence always has its bin."""
    costs = sequence_costs(lengths)
    parts = -(-sum(lengths) // max(1, budget))
    while True:
        bins = balanced_partitions(costs, parts) if lengths else []
        if parts >= len(lengths) or _fits(bins, lengths, budget):
            return _by_cost(bins, costs)
        parts += 1


def _spread(bins: list[list[int]], lengths: list[int], count: int, budget: int | None) -> list[list[int]]:
    """Cut ``bins`` further, towards ``count`` bins, because another rank or the schedule needs more."""
    costs = sequence_costs(lengths)
    if budget is not None:
        anew = balanced_partitions(costs, count)
        if _fits(anew, lengths, budget):
            return _by_cost(anew, costs)
    while len(bins) < count and any(len(indices) > 1 for indices in bins):
        widest = max((b for b in bins if len(b) > 1), key=lambda b: sum(costs[i] for i in b))
        halves = balanced_partitions([costs[i] for i in widest], 2)
        bins = [b for b in bins if b is not widest] + [[widest[i] for i in half] for half in halves]
    return _by_cost(bins, costs)


def _fits(bins: list[list[int]], lengths: list[int], budget: int) -> bool:
    return all(sum(lengths[i] for i in indices) <= budget for indices in bins)


def _by_cost(bins: list[list[int]], costs: list[int]) -> list[list[int]]:
    """Non-empty bins, costly ones first: ranks then meet at collectives with bins of like cost. (A pipeline reorders them.)"""
    return sorted((b for b in bins if b), key=lambda b: (-sum(costs[i] for i in b), b))


def _largest(count: int, longest: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    if group is None:
        return count, longest
    values = torch.tensor([count, longest])
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return int(values[0]), int(values[1])


def _filler(batch: PackedBatch) -> MicroBatch:
    """One sequence of one token; all fields are 0, so is its weight."""
    return MicroBatch(
        PackedBatch(
            {name: field.new_zeros(1, *field.shape[1:]) for name, field in batch.tokens.items()},
            {name: field.new_zeros(1, *field.shape[1:]) for name, field in batch.sequences.items()},
            torch.tensor([0, 1]),
        ),
        [-1],
    )
