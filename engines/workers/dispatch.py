"""Who gets which sequences, and how results come back in order. Pure functions of global indices.

Mini-batches are cut here, on the controller, so no layout can change what an optimizer step sees; only then is each
spread over the data-parallel ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from engines.streams import stream_key
from engines.training.batch import PackedBatch
from engines.training.batch.split import balanced_partitions, sequence_costs

Item = TypeVar("Item")


class MiniBatchError(ValueError):
    """A batch that cannot be cut into mini-batches of the size asked for."""


def plan_mini_batches(
    num_sequences: int, mini_batch_size: int, epochs: int, shuffle_key: int | None
) -> list[list[int]]:
    """The sequences of every optimizer step, in the order of the steps.

    Args:
        num_sequences: sequences of the batch; each is in one mini-batch of every epoch.
        shuffle_key: each epoch's order is a permutation that this key and the epoch's number name; None keeps the
            batch's order.

    Raises:
        MiniBatchError: the batch is empty, or the size does not divide it.
    """
    if num_sequences == 0 or mini_batch_size < 1 or num_sequences % mini_batch_size:
        raise MiniBatchError(
            f"{num_sequences} sequences cannot be cut into mini-batches of mini_batch_size={mini_batch_size}"
        )
    if epochs < 1:
        raise MiniBatchError(f"epochs={epochs}: must be at least 1")
    steps = []
    for epoch in range(epochs):
        order = list(range(num_sequences))
        if shuffle_key is not None:
            order.sort(key=lambda index: stream_key(shuffle_key, epoch, index))
        steps += [
            order[start : start + mini_batch_size] for start in range(0, num_sequences, mini_batch_size)
        ]
    return steps


def spread(indices: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide the sequences ``indices`` over ``ranks``: like cost (Karmarkar-Karp), numbers that differ by at most one.

    A rank gets an empty share when there are fewer sequences than ranks; its engine then runs fillers of weight 0.

    Args:
        lengths: of all sequences of the batch, in tokens.
    """
    costs = sequence_costs([lengths[index] for index in indices])
    shares = balanced_partitions(costs, ranks, equal_size=True)
    return [[indices[position] for position in share] for share in shares]


def spread_requests(prompts: Sequence[Sequence[int]], replicas: int) -> list[list[int]]:
    """Divide requests over rollout replicas, by index: samples of one prompt stay together when that balances.

    Lengths of responses are not known, so numbers are balanced: requests sorted by prompt, in ``replicas`` runs that
    differ by at most one. So a replica reads few distinct prompts.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), prompts[i], i))
    size, extra = divmod(len(order), replicas)
    bounds = [0]
    for replica in range(replicas):
        bounds.append(bounds[-1] + size + (replica < extra))
    return [order[start:end] for start, end in itertools.pairwise(bounds)]


def restore_order(results: Sequence[Sequence[Item]], shares: Sequence[Sequence[int]]) -> list[Item]:
    """Put ``results[part][i]`` at position ``shares[part][i]``."""
    placed = {
        index: item
        for share, part in zip(shares, results, strict=True)
        for index, item in zip(share, part, strict=True)
    }
    return [placed[index] for index in range(len(placed))]


def collect(
    results: Sequence[dict[str, Tensor]], shares: Sequence[Sequence[int]], lengths: Tensor
) -> PackedBatch:
    """One batch in the original order, from each rank's per-token outputs.

    Args:
        results: by data-parallel rank, each field (tokens of the share,).
        shares: the sequences that each rank got.
        lengths: (sequences,) int64, of all sequences.
    """
    order = torch.tensor([index for share in shares for index in share])
    fields = {name: torch.cat([result[name] for result in results]) for name in results[0]}
    bounds = torch.cat([lengths.new_zeros(1), lengths[order].cumsum(0)])
    return PackedBatch(fields, {}, bounds).select(order.argsort().tolist())
