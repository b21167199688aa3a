"""Log-probs and entropy of tokens from hidden states, without keeping logits: they are made a few rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 22
"""Logits that exist at once (16 MiB in float32)."""


def token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``labels`` under ``softmax(hidden @ weight.T / temperature)``, and the entropy of that distribution.

    Args:
        hidden: (rows, hidden_size).
        weight: (vocabulary, hidden_size), the output embedding.
        labels: (rows,) int64.

    Returns:
        log_probs (rows,) float32, entropy (rows,) float32 or None. Both are differentiable.
    """
    log_probs, entropies = _TokenLogProbs.apply(hidden, weight, labels, temperature, entropy)
    return log_probs, entropies if entropy else None


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.T).float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    return torch.log_softmax(logits, dim=-1)


class _TokenLogProbs(torch.autograd.Function):
    """One chunk keeps its log-softmax for the backward pass; of several, each is made again there.

    With p the softmax, z the logits (after the temperature) and H the entropy:
    d log p[label] / dz = onehot(label) - p, and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        rows = labels.shape[0]
        log_probs = torch.zeros(rows, dtype=torch.float32, device=hidden.device)
        entropies = torch.zeros(rows if entropy else 0, dtype=torch.float32, device=hidden.device)
        chunk = max(1, _CHUNK_ELEMENTS // weight.shape[0])
        kept = None
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            scores = _log_softmax(hidden[part], weight, temperature)
            log_probs[part] = scores.gather(1, labels[part, None])[:, 0]
            if entropy:
                entropies[part] = -(scores.exp() * scores).sum(-1)
            kept = scores if rows <= chunk else None
        ctx.save_for_backward(hidden, weight, labels, entropies, kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, entropies, kept = ctx.saved_tensors
        if not entropies.numel():
            grad_entropies = None
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, labels.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            scores = kept if kept is not None else _log_softmax(hidden[part], weight, ctx.temperature)
            gradient = scores.exp()
            factor = torch.zeros_like(labels[part], dtype=torch.float32)[:, None]
            if grad_log_probs is not None:
                factor = factor - grad_log_probs[part, None]
            if grad_entropies is not None:
                factor = factor - grad_entropies[part, None] * (scores + entropies[part, None])
            gradient *= factor
            if grad_log_probs is not None:
                gradient.scatter_add_(1, labels[part, None], grad_log_probs[part, None])
            gradient = gradient.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = gradient @ weight
            grad_weight.addmm_(gradient.T, hidden[part])
        return grad_hidden, grad_weight, None, None, None
