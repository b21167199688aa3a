"""How long a training's steps and saves take, from what published segments say; an estimate before the first. Loads no framework."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from workflow.campaign.forecast import kept_states, states_bytes
from workflow.campaign.paths import ABSENT, lookup
from workflow.campaign.plan import StageSpec
from workflow.campaign.schema import RunConfig, default_of
from workflow.manifest import MANIFEST, Manifest, ManifestError, read_manifest

START_SECONDS, LOAD_SECONDS, STEP_SECONDS, MEAN_STEP_SECONDS, SAVE_SECONDS = (
    "start_seconds", "load_seconds", "step_seconds", "mean_step_seconds", "save_seconds",
)  # fmt: skip
"""What a segment's manifest says (``extra``): before the first step; of that, verifying and loading the state; the slowest step; a
step on average, but for the first; the slowest save, and on top the slowest in the background: both may lie before the end."""
SIGNAL_SLACK = 60
"""Seconds by which SLURM may be late with a signal: it looks at time limits once in a while only (man sbatch, --signal)."""
NEWEST = 4
"""Published segments that are looked at."""
WORK = (
    "algorithm.name",
    "algorithm.advantage",
    "algorithm.policy_loss",
    "algorithm.prompts_per_step",
    "algorithm.samples_per_prompt",
    "algorithm.mini_batch_size",
    "algorithm.epochs",
    "algorithm.kl.place",
    "rollout.backend",
    "rollout.max_new_tokens",
)
"""Keys by which a step is as much work as another's."""
FLOPS = {"cpu": 1e10, "cuda": 1e14, "npu": 1e14}
"""Floating-point operations per second that are assumed of a device, for cpu of a thread."""
DECODING = 10
"""How many times as long a sampled token is assumed to take as one that is only read: decoding waits for memory."""
SAVED_BYTES = 2e8
"""Per second and rank, assumed of a shared file system."""
ESTIMATED_START = 180.0
"""Seconds, assumed for loading frameworks, model and state."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a training's parts."""

    start: float
    """Before the first step: frameworks, model, state."""
    slowest_step: float
    step: float
    save: float
    source: str
    """Where that is from, for people."""
    measured: bool

    @property
    def warning(self) -> int:
        """See :func:`warning_for`."""
        return warning_for(self.save, self.slowest_step)

    def __str__(self) -> str:
        parts = {"start": self.start, "step": self.step, "save": self.save}
        told = (
            f"{name} {value:.3g} s" if value < 100 else f"{name} {value:.0f} s"
            for name, value in parts.items()
        )
        return f"{', '.join(told)}, {self.source}"


def warning_for(save_seconds: float, step_seconds: float = 0.0) -> int:
    """Seconds before the end at which a job must be warned, so that it ends its step and saves its state in time.

    Twice the measured save, because a shared file system is slower when many jobs end together, and SLURM's own slack.
    """
    return math.ceil(2 * save_seconds + step_seconds) + SIGNAL_SLACK


def measured_pace(spec: StageSpec) -> Pace | None:
    """The slowest of the newest published segments of this training, or else of trainings whose steps are as much work."""
    folder = Path(spec.folder)
    if pace := _slowest(_measured([folder], spec), "of this training"):
        return pace
    others = sorted(folder.parent.glob(f"{spec.slug}-????????"))
    return _slowest(_measured(others, spec), f"of other trainings {spec.slug}")


def expected_pace(spec: StageSpec, parameters: int) -> Pace:
    """What is measured, else an estimate.

    Args:
        parameters: of the model.
    """
    return measured_pace(spec) or estimated_pace(spec, parameters)


def estimated_pace(spec: StageSpec, parameters: int) -> Pace:
    """What a training may take of which nothing is known but its size: by the operations that its passes need.

    Two operations per parameter and token of a pass forward and four of a pass backward (Kaplan et al., Scaling Laws for
    Neural Language Models, section 2.1).

    Args:
        parameters: of the model.
    """
    algorithm, rollout = spec.config["algorithm"], spec.config["rollout"]
    samples = algorithm["prompts_per_step"] * algorithm["samples_per_prompt"]
    read = samples * (spec.config["data"]["max_prompt_tokens"] + rollout["max_new_tokens"])
    trained = 2 if algorithm["name"] == "ppo" else 1
    inferred = trained + (algorithm["kl"]["place"] != "none")
    passes = read * (3 * trained * algorithm["epochs"] + inferred)
    operations = 2 * parameters * (passes + DECODING * samples * rollout["max_new_tokens"])
    device = spec.device.computed
    speed = FLOPS[device] * spec.world_size * (spec.threads if device == "cpu" else 1)
    step, save = operations / speed, states_bytes(parameters, trained, 1) / SAVED_BYTES / spec.world_size
    source = "estimated from the model's size: nothing is measured yet"
    return Pace(ESTIMATED_START, step, step, save, source, measured=False)


def estimated_save(spec: StageSpec) -> float:
    """Seconds that a save of a planned training may take: by the bytes of one of its states."""
    states = kept_states(spec.cuts, spec.config["checkpoint"]["retain"])
    return spec.forecast_bytes / states / SAVED_BYTES / spec.world_size


def work_of(stage: StageSpec | Manifest) -> tuple[Any, ...]:
    """What a step's time depends on: equal for trainings whose steps are as much work on the same kind of device."""
    settings = (lookup(stage.config, path) for path in WORK)
    # A manifest leaves out keys that came later and have their default.
    settings = (
        default_of(RunConfig, path) if value is ABSENT else value
        for path, value in zip(WORK, settings, strict=True)
    )
    return (
        *(stage.stage, stage.slug, stage.device.computed, stage.backends, stage.layout, stage.world_size),
        *(stage.dtype, stage.threads, *settings),
    )


def _measured(folders: Iterable[Path], spec: StageSpec) -> Iterator[dict[str, float]]:
    """What segments say of their pace, those that did any step and are as much work as ``spec``; of each folder the newest first."""
    work = work_of(spec)
    for path in (
        path for folder in folders for path in sorted(folder.glob(f"step*/{MANIFEST}"), reverse=True)
    ):
        try:
            manifest = read_manifest(path)
        except ManifestError:
            continue
        if work_of(manifest) == work and manifest.extra.get(MEAN_STEP_SECONDS):
            yield manifest.extra


def _slowest(found: Iterable[dict[str, float]], whose: str) -> Pace | None:
    segments = list(islice(found, NEWEST))
    if not segments:
        return None
    parts = (START_SECONDS, STEP_SECONDS, MEAN_STEP_SECONDS, SAVE_SECONDS)
    source = f"measured in {len(segments)} published segment{'s' * (len(segments) > 1)} {whose}"
    return Pace(*(max(segment[part] for segment in segments) for part in parts), source, measured=True)
