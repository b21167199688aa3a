"""Losses for the suite: terms per token, from a model's outputs and a batch's fields. They know no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Metrics = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class PolicyLoss:
    """A policy gradient with importance ratio, and an entropy bonus."""

    entropy_coefficient: float = 0.1

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coefficient != 0

    def __call__(self, outputs: Any, batch: Any) -> tuple[Tensor, Metrics]:
        ratio = (outputs.log_probs - batch.tokens["old_log_probs"]).exp()
        terms = -ratio * batch.tokens["advantages"]
        if self.needs_entropy:
            terms = terms - self.entropy_coefficient * outputs.entropy
        mask = batch.tokens["loss_mask"]
        return terms, {"ratio": (float((ratio.detach() * mask).sum()), float(mask.sum()))}


@dataclass(frozen=True)
class ValueLoss:
    """Squared error of values."""

    needs_entropy: bool = False

    def __call__(self, outputs: Any, batch: Any) -> tuple[Tensor, Metrics]:
        error = (outputs.values - batch.tokens["returns"]) ** 2
        mask = batch.tokens["loss_mask"]
        return 0.5 * error, {"error": (float((error.detach() * mask).sum()), float(mask.sum()))}


@dataclass(frozen=True)
class PoisonedLoss:
    """A loss that is not finite wherever a token carries the poison."""

    needs_entropy: bool = False

    def __call__(self, outputs: Any, batch: Any) -> tuple[Tensor, Metrics]:
        known = outputs.log_probs if outputs.log_probs is not None else outputs.values
        return known / (1 - batch.tokens["poison"]), {}
