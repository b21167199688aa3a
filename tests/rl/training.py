"""A trainer of two roles with the smallest model, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from engines.checkpoint import read_state
from tests.support.jobs import ROOT
from workflow.campaign.build import make_plan
from workflow.campaign.schema import CampaignOptions
from workflow.campaign.slice import Slice
from workflow.data import PromptEncoder, load_problems
from workflow.rl.rewards import Rewarder
from workflow.rl.trainer import PPOTrainer
from workflow.stages.train import worker_groups

STEPS = 4
WORDS = [
    *("model=micro-qwen3", "algorithm=ppo", "data.train_size=16", "algorithm.samples_per_prompt=2"),
    *(
        f"algorithm.steps={STEPS}",
        "algorithm.mini_batch_size=8",
        "algorithm.epochs=2",
        "algorithm.shuffle=true",
    ),
    *("algorithm.kl.place=reward", "algorithm.kl.adaptive=true", "algorithm.kl.horizon=300"),
    *("algorithm.critic_warmup_steps=1", "algorithm.lr=1e-3", "rollout.max_new_tokens=8", "sft.steps=1"),
    *("sft.batch_size=8", "sft.demonstrations=16", "evaluate.problems=8", "data.heldout_size=8"),
]


def train_slice(folder: Path, *words: str) -> tuple[Slice, Any]:
    """The slice of the stage train, and the whole run's configuration."""
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump({"name": "state", "common": [*WORDS, *words], "runs": {"run": []}}))
    plan, (run,) = make_plan(CampaignOptions(campaign=str(path)), ROOT)
    return Slice("train", plan.stages[plan.runs["run"].stages["train"]].config), run.config


@contextmanager
def trainer_of(config: Slice, model: Path, run: str = "a run") -> Iterator[PPOTrainer]:
    """A trainer before its first step, of two roles in this process."""
    with worker_groups(config, model, 1) as groups:
        yield PPOTrainer(
            run=run,
            algorithm=config.algorithm,
            rollout_config=config.rollout,
            data=config.data,
            problems=load_problems(config.data, "train"),
            encoder=PromptEncoder(model),
            rewarder=Rewarder(config.reward, config.data),
            groups=groups,
        )


def tensors(state: Path) -> dict[str, bytes]:
    """Every file of tensors of a state, bit for bit."""
    return {name: (state / name).read_bytes() for name in read_state(state)["files"]}
