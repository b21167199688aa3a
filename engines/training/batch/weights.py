"""How per-token terms become one loss: a weight per token, fixed for the whole mini-batch before anything is split.

With the weights fixed, a micro-batch's loss is ``(terms * weight).sum()`` and the sum over micro-batches and ranks is the
mini-batch's loss, whatever the split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engines.training.batch.packed import PackedBatch


@dataclass(frozen=True)
class LossTotals:
    """Counts of one mini-batch over all data-parallel ranks."""

    tokens: float
    """Loss tokens; 1 where there is none, as it is divided by."""
    sequences: int
    """Sequences with at least one loss token; 1 where there is none."""


Aggregation = Callable[[Tensor, Tensor, LossTotals, int | None], Tensor]
"""(mask, own, totals, max_length) -> the weight of each token's term.

``mask``, ``own``, the result: (total_tokens,) float32. ``own`` is the number of loss tokens in a token's sequence, at least 1.
A weight may depend on nothing else and not on other tokens, which may be on another rank. Where the mask is 0 it counts as 0.
"""


def token_mean(mask: Tensor, own: Tensor, totals: LossTotals, max_length: int | None) -> Tensor:
    """m / sum(m), over the whole mini-batch (Yu et al., DAPO, equation 12)."""
    return mask / totals.tokens


def token_sum(mask: Tensor, own: Tensor, totals: LossTotals, max_length: int | None) -> Tensor:
    """m."""
    return mask.clone()


def seq_mean_token_sum(mask: Tensor, own: Tensor, totals: LossTotals, max_length: int | None) -> Tensor:
    """m / N, with N the sequences that have a loss token."""
    return mask / totals.sequences


def seq_mean_token_mean(mask: Tensor, own: Tensor, totals: LossTotals, max_length: int | None) -> Tensor:
    """m / (|s| N), with |s| the loss tokens of the token's sequence (Shao et al., DeepSeekMath, equation 3)."""
    return mask / (own * totals.sequences)


def seq_mean_token_sum_norm(mask: Tensor, own: Tensor, totals: LossTotals, max_length: int | None) -> Tensor:
    """m / (L N), with L = ``max_length`` (Liu et al., Understanding R1-Zero-Like Training, section 3.2).

    Raises:
        ValueError: ``max_length`` is missing or not positive.
    """
    if max_length is None or max_length <= 0:
        raise ValueError(
            f"aggregation='seq-mean-token-sum-norm' needs a positive max_length, not {max_length!r}"
        )
    return mask / (max_length * totals.sequences)


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}


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
    return LossTotals(max(tokens, 1), max(round(sequences), 1))


def loss_weights(
    batch: PackedBatch,
    aggregation: str | Aggregation,
    totals: LossTotals,
    max_length: int | None = None,
) -> Tensor:
    """The weight of each token's term: of the aggregation of that name, or of the function. A mini-batch without loss tokens has weights 0.

    Returns:
        (total_tokens,) float32, on the device of the loss mask.

    Raises:
        ValueError: an unknown aggregation, or one that needs a max_length without one.
    """
    if isinstance(aggregation, str):
        if aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation={aggregation!r} is unknown; known: {', '.join(AGGREGATIONS)}")
        aggregation = AGGREGATIONS[aggregation]
    mask = batch.tokens["loss_mask"]
    own = torch.repeat_interleave(_mask_per_sequence(batch).clamp(min=1), batch.lengths).to(mask)
    return aggregation(mask, own, totals, max_length).masked_fill(mask == 0, 0.0)


def _mask_per_sequence(batch: PackedBatch) -> Tensor:
    """(num_sequences,) float64 on cpu: loss tokens of each sequence."""
    total = torch.cat(
        [torch.zeros(1, dtype=torch.float64), batch.tokens["loss_mask"].cpu().double().cumsum(0)]
    )
    return total[batch.cu_seqlens].diff()
