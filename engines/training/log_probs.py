"""Log-probs and entropy of tokens from hidden states, without keeping logits: they are made a few rows at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 22
"""Logits that exist at once (16 MiB in float32)."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``labels`` under ``softmax(hidden @ weight.T / temperature)``, and the entropy of that distribution.

    Args:
        hidden: (rows, hidden_size).
        weight: (vocabulary, hidden_size), the output embedding.
        labels: (rows,) int64.
        group: the ranks that share the vocabulary, each with the same number of its entries, in order; hidden and labels
            are the same on all of them. The gradient of ``hidden`` is then this rank's part of a sum.

    Returns:
        log_probs (rows,) float32, entropy (rows,) float32 or None. Both are differentiable.
    """
    log_probs, entropies = _TokenLogProbs.apply(hidden, weight, labels, temperature, entropy, group)
    return log_probs, entropies if entropy else None


def _log_softmax(
    hidden: Tensor, weight: Tensor, temperature: float, group: dist.ProcessGroup | None
) -> Tensor:
    """(rows, this rank's part of the vocabulary) float32"""
    logits = (hidden @ weight.T).float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    if group is None:
        return torch.log_softmax(logits, dim=-1)
    largest = logits.amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    logits = logits.sub_(largest)
    total = _sum_over(group, logits.exp().sum(-1, keepdim=True))
    return logits.sub_(total.log_())


def _sum_over(group: dist.ProcessGroup | None, partial: Tensor) -> Tensor:
    if group is not None:
        dist.all_reduce(partial, group=group)
    return partial


def _own_labels(labels: Tensor, vocabulary: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """(rows, 1): each label's place in this rank's part of the vocabulary, and whether it is there at all (float32)."""
    if group is None:
        return labels[:, None], torch.ones(labels.shape[0], 1, device=labels.device)
    place = labels[:, None] - dist.get_rank(group) * vocabulary
    there = (place >= 0) & (place < vocabulary)
    return place.where(there, torch.zeros_like(place)), there.float()


class _TokenLogProbs(torch.autograd.Function):
    """One chunk keeps its log-softmax for the backward pass; of several, each is made again there.

    With p the softmax, z the logits (after the temperature) and H the entropy:
    d log p[label] / dz = onehot(label) - p, and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        entropy: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        rows = labels.shape[0]
        log_probs = torch.zeros(rows, dtype=torch.float32, device=hidden.device)
        entropies = torch.zeros(rows if entropy else 0, dtype=torch.float32, device=hidden.device)
        chunk = max(1, _CHUNK_ELEMENTS // weight.shape[0])
        kept = None
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            scores = _log_softmax(hidden[part], weight, temperature, group)
            place, there = _own_labels(labels[part], weight.shape[0], group)
            log_probs[part] = _sum_over(group, (scores.gather(1, place) * there)[:, 0])
            if entropy:
                entropies[part] = -_sum_over(group, (scores.exp() * scores).sum(-1))
            kept = scores if rows <= chunk else None
        ctx.save_for_backward(hidden, weight, labels, entropies, kept)
        ctx.temperature, ctx.chunk, ctx.group = temperature, chunk, group
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, entropies, kept = ctx.saved_tensors
        if not entropies.numel():
            grad_entropies = None
        several = labels.shape[0] > ctx.chunk
        grad_hidden = torch.zeros_like(hidden)
        # Parts are added in float32: in half precision a sum of hundreds of them grows no further.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32 if several else weight.dtype)
        for start in range(0, labels.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            scores = kept
            if kept is None:
                scores = _log_softmax(hidden[part], weight, ctx.temperature, ctx.group)
            gradient = scores.exp()
            factor = torch.zeros_like(labels[part], dtype=torch.float32)[:, None]
            if grad_log_probs is not None:
                factor = factor - grad_log_probs[part, None]
            if grad_entropies is not None:
                factor = factor - grad_entropies[part, None] * (scores + entropies[part, None])
            gradient *= factor
            if grad_log_probs is not None:
                place, there = _own_labels(labels[part], weight.shape[0], ctx.group)
                gradient.scatter_add_(1, place, grad_log_probs[part, None] * there)
            gradient = gradient.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = gradient @ weight
            if grad_weight.dtype == hidden.dtype:
                grad_weight.addmm_(gradient.T, hidden[part])
            else:
                grad_weight += gradient.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None
