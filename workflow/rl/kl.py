"""Divergence from the reference policy: per-token estimators and the controller of its coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workflow.campaign.algorithm import MAX_KL_ERROR, KLConfig

# exp() of a log-ratio beyond this says no more than "far away" and would overflow.
MAX_LOG_RATIO = 20.0
ROUNDING = 1e-5
"""As far apart two log-probs of one model are that were computed in different micro-batches or layouts."""


def k1(log_ratio: Tensor) -> Tensor:
    """-log r, with log r = log p_reference - log p_policy: unbiased, can be negative (Schulman, Approximating KL Divergence, 2020)."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, never negative; over samples of the policy the mean of its gradient is that of the KL (Schulman, as above)."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """(r - 1) - log r: unbiased, never negative (Schulman, as above).

    Where log r is above ``MAX_LOG_RATIO`` it is that of the bound, without a gradient; below, where r is near 0, nothing bounds it.
    """
    # Not inside expm1 only: that would leave the gradient of - log r, which leads away from the reference.
    bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded


def absolute(log_ratio: Tensor) -> Tensor:
    """|log r|: biased, never negative. Its gradient is 0 where log r is ``ROUNDING`` or less, whose sign rounding decides."""
    size = log_ratio.abs()
    return torch.where(size <= ROUNDING, size.detach(), size)


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, config: KLConfig) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens that the policy sampled.

    Straight through, the value is the estimator's and the gradient that of k2: over samples of the policy its mean is
    the KL's gradient, while k1's has mean 0 and k3's is that of the reverse KL(reference || policy).

    Args:
        log_probs, reference_log_probs: any equal shape.

    Returns:
        The same shape; differentiable in ``log_probs``.
    """
    log_ratio = reference_log_probs - log_probs
    estimate = config.divergence.load()(log_ratio)
    if not config.straight_through:
        return estimate
    through = k2(log_ratio)
    return estimate.detach() + (through - through.detach())


@dataclass
class KLController:
    """The coefficient of the penalty: fixed, or steered towards a target.

    Adaptive (Ziegler et al., Fine-Tuning Language Models from Human Preferences, section 2.2): after n samples whose
    mean KL per response was d, e = clip(d / target - 1, -0.2, 0.2) and coefficient *= 1 + e n / horizon. It stays above 0,
    because a horizon of a fifth of a step's samples or less is refused.
    """

    config: KLConfig
    coefficient: float

    @staticmethod
    def start(config: KLConfig) -> KLController:
        """The controller before the first step."""
        return KLController(config, config.coefficient)

    def update(self, divergence: float, samples: int) -> None:
        """Take note of the mean KL per response, ``divergence``, over ``samples`` responses."""
        if self.config.adaptive:
            error = min(max(divergence / self.config.target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
            self.coefficient *= 1 + error * samples / self.config.horizon

    def state(self) -> dict[str, Any]:
        """JSON state."""
        return {"coefficient": self.coefficient}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.coefficient = state["coefficient"]
