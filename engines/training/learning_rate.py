"""The learning rate as a pure function of the number of optimizer steps done; its only state is that number."""

from __future__ import annotations

import math

from engines.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step ``step`` (from 0) out of ``total_steps``.

    Warm-up is linear from 0; then constant, or linear or cosine (Loshchilov and Hutter, SGDR, equation 5, one cycle) down
    to ``min_ratio`` of the peak at ``total_steps``, and flat from there.
    """
    schedule = config.scheduler
    if step < schedule.warmup_steps:
        return config.lr * step / schedule.warmup_steps
    if schedule.name == "constant":
        return config.lr
    decay_steps = max(1, total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / decay_steps)
    left = 1 - progress if schedule.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (schedule.min_ratio + (1 - schedule.min_ratio) * left)
