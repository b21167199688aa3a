"""How per-token terms become one loss: a weight per token, fixed for the whole mini-batch before anything is split.

With the weights fixed, a micro-batch's loss is ``(terms * weight).sum()`` and the sum over micro-batches and ranks is the
mini-batch's loss, whatever the split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engines.training.batch.packed import PackedBatch

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass(frozen=True)
class LossTotals:
    """Counts of one mini-batch over all data-parallel ranks."""

    tokens: float
    """Loss tokens."""
    sequences: int
    """Sequences with at least one loss token."""


def loss_totals(batch: PackedBatch, group: dist.ProcessGroup | None = None) -> LossTotals:
    """Count loss tokens and sequences with any, summed over ``group`` (this batch alone when None). Collective.

    Raises:
        ValueError: on all ranks, when a sequence's first token, which nothing predicts, is a loss token.
    """
    per_sequence = _mask_per_sequence(batch)
    starts = batch.cu_seqlens[:-1][batch.lengths > 0]
    unpredicted = batch.tokens["loss_mask"][starts.to(batch.tokens["loss_mask"].device)].cpu()
    counts = torch.stack(
        [field.sum().double() for field in (per_sequence, per_sequence > 0, unpredicted != 0)]
    )
    if group is not None:
        dist.all_reduce(counts, group=group)
    tokens, sequences, wrong = counts.tolist()
    if wrong:
        raise ValueError(
            f"loss_mask is not 0 at the first token of {wrong:.0f} sequences; nothing predicts that token"
        )
    return LossTotals(tokens, round(sequences))


def loss_weights(
    batch: PackedBatch, aggregation: str, totals: LossTotals, max_length: int | None = None
) -> Tensor:
    """The weight of each token's term, with m the loss mask, N the sequences with any loss token, |s| loss tokens of one:

    token-mean m/sum(m); token-sum m; seq-mean-token-sum m/N; seq-mean-token-mean m/(|s| N);
    seq-mean-token-sum-norm m/(L N) with L = ``max_length`` (Liu et al., Understanding R1-Zero-Like Training, section 3.2).
    A mini-batch without loss tokens has weights 0.

    Returns:
        (total_tokens,) float32, on the device of the loss mask.

    Raises:
        ValueError: an unknown aggregation, or a max_length that is missing or not positive where it is needed.
    """
    mask = batch.tokens["loss_mask"]
    tokens, sequences = max(totals.tokens, 1), max(totals.sequences, 1)
    if aggregation == "token-mean":
        return mask / tokens
    if aggregation == "token-sum":
        return mask.clone()
    if aggregation == "seq-mean-token-sum":
        return mask / sequences
    if aggregation == "seq-mean-token-mean":
        own = torch.repeat_interleave(_mask_per_sequence(batch).clamp(min=1), batch.lengths)
        return mask / (own * sequences).to(mask)
    if aggregation == "seq-mean-token-sum-norm":
        if max_length is None or max_length <= 0:
            raise ValueError(f"aggregation={aggregation!r} needs a positive max_length, not {max_length!r}")
        return mask / (max_length * sequences)
    raise ValueError(f"aggregation={aggregation!r} is unknown; known: {', '.join(AGGREGATIONS)}")


def _mask_per_sequence(batch: PackedBatch) -> Tensor:
    """(num_sequences,) float64 on cpu: loss tokens of each sequence."""
    total = torch.cat(
        [torch.zeros(1, dtype=torch.float64), batch.tokens["loss_mask"].cpu().double().cumsum(0)]
    )
    return total[batch.cu_seqlens].diff()
