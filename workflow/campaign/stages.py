"""The table of stages: what each one reads, starts from, and which version of its results it produces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workflow.campaign.schema import RunConfig


@dataclass(frozen=True)
class Stage:
    """One kind of job."""

    name: str
    version: int
    """Raised whenever the same slice and inputs would give another result."""
    reads: tuple[str, ...]
    """Config paths that are part of the identity."""
    settings: tuple[str, ...] = ()
    """Config paths that it reads and that cannot change its result."""
    roles: tuple[str, ...] = ()
    """Config paths of the engines it runs; empty for stages that no layout and no device can change."""
    backends: tuple[str, ...] = ()
    """Engines' frameworks that it needs without running the engines."""
    unused: Callable[[RunConfig], tuple[str, ...]] = lambda config: ()
    """Of ``reads``, the paths that this very run does not need: they are left out, so more runs share the result."""


def _convert_unused(config: RunConfig) -> tuple[str, ...]:
    # Weights and tokenizer are made from seed and problems only when there is no source to take them from.
    return () if config.model.architecture is not None else ("seed", "data")


def _train_unused(config: RunConfig) -> tuple[str, ...]:
    unused = [] if config.algorithm.has_critic else ["critic"]
    return (*unused, *([] if config.algorithm.kl.place != "none" else ["reference"]))


CONVERT = Stage("convert", version=1, reads=("seed", "model", "data"), unused=_convert_unused)
SFT = Stage(
    "sft", version=1, reads=("seed", "data", "sft", "engine"), settings=("tracking",), roles=("engine",)
)
TRAIN = Stage(
    "train",
    version=1,
    reads=("seed", "data", "algorithm", "rollout", "reward", "actor", "critic", "reference"),
    settings=("checkpoint", "tracking"),
    roles=("actor.engine", "critic.engine", "reference.engine"),
    unused=_train_unused,
)
EVALUATE = Stage(
    "evaluate",
    version=1,
    reads=(
        "data",
        "evaluate",
        "rollout.backend",
        "rollout.max_new_tokens",
        "reward.kind",
        "reward.pattern",
        "reward.function",
        "engine.device",
        "engine.dtype",
    ),
    roles=("engine",),
)
EXPORT = Stage("export", version=1, reads=("export", "model.name", "data.name", "algorithm.name"))
MEGATRON = Stage("megatron", version=1, reads=(), settings=("conversion",), backends=("megatron",))

STAGES = {stage.name: stage for stage in (CONVERT, SFT, TRAIN, EVALUATE, EXPORT, MEGATRON)}
"""Every stage that publishes a manifest, in the order of a run."""
