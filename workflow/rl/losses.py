"""The losses, as terms per token. Their aggregation is fixed by weights before any split (docs: exact loss).

Each is a frozen dataclass, so it travels to worker processes, and follows ``engines.training.base.LossFunction``: called
with a micro-batch's outputs and the micro-batch, it returns terms (tokens,) aligned with the weights, and metrics as
(sum, count) over loss tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.training.batch import PackedBatch
from engines.training.schedule import Metrics, ModelOutputs
from workflow.rl.kl import MAX_LOG_RATIO, kl_estimate


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped surrogate (Schulman et al., Proximal Policy Optimization, equation 7), entropy bonus, KL penalty.

    term_t = -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t) - entropy_coefficient H_t
    + kl_coefficient KL_t, with ratio_t = exp(log_probs_t - old_log_probs_t).

    Reads ``old_log_probs``, ``advantages`` and, with a KL penalty, ``reference_log_probs``.
    """

    clip_low: float
    clip_high: float
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: str | None = None
    """Set when the penalty is part of the loss."""
    needs_entropy: bool = True
    """The entropy is a metric even when it is no part of the loss."""

    def __call__(self, outputs: ModelOutputs, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        mask, advantages = batch.tokens["loss_mask"], batch.tokens["advantages"]
        log_ratio = (outputs.log_probs - batch.tokens["old_log_probs"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate = -torch.minimum(ratio * advantages, bounded * advantages)
        terms = surrogate
        metrics = {
            "policy_loss": surrogate,
            "entropy": outputs.entropy,
            "ratio": ratio,
            "ratio_deviation": (ratio - 1).abs(),
            "clip_fraction_low": (ratio < 1 - self.clip_low) & (advantages < 0),
            "clip_fraction_high": (ratio > 1 + self.clip_high) & (advantages > 0),
            "approx_kl": torch.expm1(log_ratio) - log_ratio,
        }
        if self.entropy_coefficient:
            terms = terms - self.entropy_coefficient * outputs.entropy
        if self.kl_estimator is not None:
            kl = kl_estimate(outputs.log_probs, batch.tokens["reference_log_probs"], self.kl_estimator)
            terms = terms + self.kl_coefficient * kl
            metrics["kl"] = kl
        return terms, _over_loss_tokens(metrics, mask)


@dataclass(frozen=True)
class ValueLoss:
    """term_t = max((V_t - R_t)^2, (clip(V_t, V_old +- clip) - R_t)^2) / 2.

    The clipped value loss of PPO's reference implementation (Engstrom et al., Implementation Matters in Deep Policy
    Gradients, section 3). Reads ``old_values`` and ``returns``.
    """

    clip: float
    needs_entropy: bool = False

    def __call__(self, outputs: ModelOutputs, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        old, returns, mask = (batch.tokens[name] for name in ("old_values", "returns", "loss_mask"))
        clipped = old + (outputs.values - old).clamp(-self.clip, self.clip)
        error, clipped_error = (outputs.values - returns).square(), (clipped - returns).square()
        metrics = {
            "value_error": error,
            "value_clip_fraction": clipped_error > error,
            "value": outputs.values,
        }
        return torch.maximum(error, clipped_error) / 2, _over_loss_tokens(metrics, mask)


@dataclass(frozen=True)
class SftLoss:
    """Negative log-likelihood: term_t = -log p(token t)."""

    needs_entropy: bool = False

    def __call__(self, outputs: ModelOutputs, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        terms = -outputs.log_probs
        return terms, _over_loss_tokens({"nll": terms}, batch.tokens["loss_mask"])


def _over_loss_tokens(fields: dict[str, Tensor], mask: Tensor) -> Metrics:
    """(sum, count) of each field over the loss tokens; one transfer from the device for all of them."""
    stacked = torch.stack([mask, *(field.detach() * mask for field in fields.values())]).double().sum(dim=-1)
    count, *sums = stacked.tolist()
    return {name: (total, count) for name, total in zip(fields, sums, strict=True)}
