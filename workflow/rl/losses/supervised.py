"""The losses that have a target: of the critic, and of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.training.batch import PackedBatch
from engines.training.schedule import Metrics, ModelOutputs
from workflow.rl.losses.report import over_loss_tokens


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
        # Inside the range both errors are one number, computed in two ways: which is larger says nothing.
        outside = (outputs.values - old).abs() > self.clip
        metrics = {
            "value_error": error,
            "value_clip_fraction": outside & (clipped_error > error),
            "value": outputs.values,
        }
        return torch.maximum(error, clipped_error) / 2, over_loss_tokens(metrics, mask)


@dataclass(frozen=True)
class SftLoss:
    """Negative log-likelihood: term_t = -log p(token t)."""

    needs_entropy: bool = False

    def __call__(self, outputs: ModelOutputs, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        terms = -outputs.log_probs
        return terms, over_loss_tokens({"nll": terms}, batch.tokens["loss_mask"])
