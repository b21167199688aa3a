"""Schedules against transformers' own, step by step."""

from __future__ import annotations

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup
from transformers.optimization import get_constant_schedule_with_warmup

from engines.config import OptimizerConfig
from engines.training.learning_rate import learning_rate

STEPS = 20


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_schedules_are_the_usual_ones(name: str, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    if name == "constant":
        usual = get_constant_schedule_with_warmup(optimizer, warmup)
    else:
        make = get_linear_schedule_with_warmup if name == "linear" else get_cosine_schedule_with_warmup
        usual = make(optimizer, warmup, STEPS)
    config = OptimizerConfig(lr=0.5, scheduler={"name": name, "warmup_steps": warmup})
    for step in range(STEPS + 3):
        if step <= STEPS or name != "cosine":  # transformers' cosine rises again after its end
            assert learning_rate(config, step, STEPS) == pytest.approx(usual.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        usual.step()


def test_a_share_of_the_rate_is_left_at_the_end() -> None:
    config = OptimizerConfig(lr=0.5, scheduler={"name": "cosine", "min_ratio": 0.1})
    assert learning_rate(config, STEPS, STEPS) == pytest.approx(0.05)
    assert learning_rate(config, 10 * STEPS, STEPS) == pytest.approx(0.05)
