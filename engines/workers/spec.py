"""What a role is, in plain data, and which roles share processes. Planning asks too, so no framework is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.config import EngineConfig, LayoutConfig, OptimizerConfig


@dataclass(frozen=True)
class RoleSpec:
    """One role (actor, critic, reference, reward) and the engine it runs on."""

    name: str
    model_type: str
    """"language_model" or "value_model"."""
    engine: EngineConfig
    """With ``backend`` and ``device`` resolved (not "auto"): planning decides, workers obey."""
    model_path: Path
    """Hugging Face folder that the weights start from."""
    optimizer: OptimizerConfig | None = None
    """None for a role that is never updated (``engine.forward_only``)."""
    total_steps: int = 1
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    temperature: float = 1.0
    """Logits are divided by it, as the rollout does."""


def process_groups(engines: Mapping[str, EngineConfig]) -> list[list[str]]:
    """Which roles share worker processes: those whose engines have equal backend, device and layout; all others have their own.

    Megatron's parallel state is process-wide, so two of its layouts, or Megatron beside another backend, must never
    meet in one process; that no two placements share one holds for every backend alike.

    Args:
        engines: role -> its engine, resolved.
    """
    groups: dict[tuple[str, str, LayoutConfig], list[str]] = {}
    for role, engine in engines.items():
        groups.setdefault((engine.backend, engine.device, engine.layout), []).append(role)
    return list(groups.values())


def total_ranks(engines: Mapping[str, EngineConfig]) -> int:
    """Ranks of all process groups: what a job of these roles needs devices for."""
    return sum(engines[roles[0]].layout.world_size for roles in process_groups(engines))
