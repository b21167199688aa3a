"""A small actor and critic, and what an iteration does with them, for groups of any kind."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.checkpoint import StateStore
from engines.config import EngineConfig, LayoutConfig, OptimizerConfig, RolloutConfig
from engines.rollout.base import Request, SamplingParams
from engines.streams import stream_key
from engines.training.batch import PackedBatch
from engines.training.batch.weights import seq_mean_token_mean
from engines.training.schedule import Metrics
from engines.workers.group import WorkerGroup
from engines.workers.spec import RoleSpec
from workflow.campaign.schema import AlgorithmConfig
from workflow.rl.batches import border, rollout_batch
from workflow.rl.losses import PolicyLoss, ValueLoss

TEMPERATURE = 0.7
PROMPTS = [[3 + i] * (2 + i % 5) for i in range(6) for _ in range(4)]
PARAMS = SamplingParams(temperature=TEMPERATURE, max_new_tokens=20)


def specs(
    model: Path, ranks: int = 1, backend: str = "fsdp2", layout: LayoutConfig | None = None
) -> list[RoleSpec]:
    """Actor and critic with one placement: data-parallel ranks, unless a layout is given."""
    layout = layout or LayoutConfig(data_parallel_size=ranks)
    engine = EngineConfig(backend=backend, device="cpu", layout=layout, token_budget=200)
    optimizer = OptimizerConfig(lr=1e-3)
    return [
        RoleSpec("actor", "language_model", engine, model, optimizer, 10, TEMPERATURE),
        RoleSpec("critic", "value_model", engine, model, optimizer, 10),
    ]


def requests(step: int = 0) -> list[Request]:
    """Four samples of each of six prompts."""
    return [Request(prompt, stream_key("scenario", step, i)) for i, prompt in enumerate(PROMPTS)]


def sample(group: WorkerGroup, step: int = 0) -> PackedBatch:
    """A rollout with made-up advantages and returns."""
    batch = rollout_batch(
        PROMPTS, group.generate(requests(step), PARAMS), [i // 4 for i in range(len(PROMPTS))]
    )
    noise = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(step))
    mask = batch.tokens["loss_mask"]
    return batch.with_tokens(
        old_log_probs=batch.tokens["rollout_log_probs"], advantages=noise[0] * mask, returns=noise[1] * mask
    )


def iterate(group: WorkerGroup, steps: int = 2) -> list[dict[str, Any]]:
    """Sync, sample, infer, update, for each step; what came out."""
    history = []
    for step in range(steps):
        group.sync_weights("actor")
        batch = sample(group, step)
        log_probs = PackedBatch.from_tensordict(group.infer("actor", border(batch), entropy=True)).tokens
        values = PackedBatch.from_tensordict(group.infer("critic", border(batch))).tokens["values"]
        batch = batch.with_tokens(old_values=values)
        critic = group.update(
            "critic", border(batch, "old_values", "returns"), ValueLoss(0.2), mini_batch_size=len(PROMPTS)
        )
        actor = group.update(
            "actor",
            border(batch, "old_log_probs", "advantages"),
            PolicyLoss(AlgorithmConfig(name="grpo")),
            mini_batch_size=8,
            epochs=2,
            shuffle_key=stream_key("shuffle", step),
            aggregation=seq_mean_token_mean,
        )
        history.append(
            {"batch": batch, "outputs": {**log_probs, "values": values}, "actor": actor, "critic": critic}
        )
    return history


def add_rollout(group: WorkerGroup, model: Path) -> None:
    """One replica per rank."""
    group.add_rollout(RolloutConfig(compact_every=4), model)


def compare_metrics(ours: Metrics, theirs: Metrics) -> None:
    """To the rounding of two steps."""
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"tokens_per_second"}:
        (total, count), (expected, expected_count) = ours[name], theirs[name]
        assert total / count == pytest.approx(expected / expected_count, rel=1e-4, abs=1e-5), name


def check_state_moves_to_one_rank(group: WorkerGroup, alone: WorkerGroup, folder: Path) -> None:
    """What several ranks save, one rank loads, and both go on alike."""
    store = StateStore(folder)
    begun = store.begin(2)
    state = store.commit(2, {}, {role: group.save(role, begun / role) for role in ("actor", "critic")})
    for role in ("actor", "critic"):
        alone.load(role, state)
    for ours, theirs in zip(iterate(group, steps=1), iterate(alone, steps=1), strict=True):
        for role in ("actor", "critic"):
            compare_metrics(ours[role], theirs[role])


@dataclass(frozen=True)
class FailingLoss:
    """Raises, or kills its process, on data-parallel ranks that see the token ``trigger``."""

    trigger: int
    kill: bool = False
    needs_entropy: bool = False

    def __call__(self, outputs: Any, batch: PackedBatch) -> Any:
        if (batch.tokens["input_ids"] == self.trigger).any():
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("a loss that fails")
        return outputs.log_probs * 0, {}
