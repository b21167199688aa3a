"""Everything that the runs of a campaign left behind, read once: manifests, failures, metrics. Loads no framework."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from workflow.campaign.plan import Plan, RunPlan, StageSpec
from workflow.manifest import Manifest, ManifestError, read_manifest
from workflow.rl.metrics import METRICS_FILE, SFT_CURVE_FILE, read_metrics


@dataclass(frozen=True)
class Failure:
    """Why a stage published nothing."""

    stage: str
    kind: str
    """Class of the error."""
    message: str
    log: str
    last_lines: tuple[str, ...] = ()

    def to_json(self) -> dict[str, str]:
        """As it stands in the summary."""
        return {"stage": self.stage, "class": self.kind, "message": self.message, "log": self.log}


@dataclass(frozen=True)
class Job:
    """One manifest that the plan asks for, and what came of it."""

    spec: StageSpec
    step: int | None
    manifest: Manifest | None
    failure: Failure | None = None

    @property
    def label(self) -> str:
        """``train, step 40``."""
        return self.spec.stage if self.step is None else f"{self.spec.stage}, step {self.step}"

    @property
    def seconds(self) -> float:
        """Wall time of all its starts."""
        return sum(attempt.seconds for attempt in self.manifest.attempts) if self.manifest else 0.0


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy after a training step; 0 is the SFT model."""

    step: int
    accuracy: float
    low: float
    high: float
    problems: int


@dataclass
class Run:
    """One run of the campaign."""

    name: str
    plan: RunPlan
    jobs: list[Job]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """One entry per training step."""
    sft_curve: list[dict[str, Any]] = field(default_factory=list)

    @cached_property
    def train(self) -> StageSpec:
        """The stage that follows SFT, as planned: RL, or in a control more SFT."""
        return [job.spec for job in self.jobs if job.spec.stage in ("sft", "train")][-1]

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """In the order of training."""
        found = []
        for job in self.jobs:
            if job.spec.stage == "evaluate" and job.manifest:
                values = job.manifest.metrics
                low, high = values["accuracy_ci95"]
                step = self._steps_before(job.spec)
                found.append(Evaluation(step, values["accuracy"], low, high, values["problems"]))
        return sorted(found, key=lambda evaluation: evaluation.step)

    def _steps_before(self, evaluate: StageSpec) -> int:
        """After how many steps of ``train`` the model of an evaluation is published; 0 for the SFT model."""
        model = evaluate.inputs["model"]
        return (model.step or self.train.steps) if model.id == self.train.id else 0

    @property
    def start(self) -> Evaluation | None:
        """Of the SFT model."""
        return next((e for e in self.evaluations if e.step == 0), None)

    @property
    def final(self) -> Evaluation | None:
        """After the last planned step."""
        return next((e for e in self.evaluations if e.step == self.train.steps), None)

    @property
    def trained(self) -> list[Job]:
        """The published segments."""
        return [job for job in self.jobs if job.spec.id == self.train.id and job.manifest]

    @property
    def steps_done(self) -> int:
        """The last step whose training state is published."""
        return max((job.step or job.manifest.steps_done for job in self.trained), default=0)

    @property
    def is_control(self) -> bool:
        """Whether the run is an experiment that shows what the effect is not due to."""
        return self.plan.algorithm == "sft" or self.train.config["reward"]["shuffled"]

    @property
    def complete(self) -> bool:
        """Whether everything planned is published."""
        return all(job.manifest for job in self.jobs)

    @property
    def failures(self) -> list[Failure]:
        """In the order of the stages; the first one is what stopped the run."""
        recorded = [job.failure for job in self.jobs if job.failure]
        return recorded or [_unfinished(job) for job in self.jobs if not job.manifest][:1]


@dataclass
class Campaign:
    """All runs of a plan."""

    plan: Plan
    plan_path: str
    runs: list[Run]

    @property
    def complete(self) -> bool:
        """Whether every run is."""
        return all(run.complete for run in self.runs)

    @property
    def manifests(self) -> dict[str, Manifest]:
        """Every published manifest by its path, shared ones once."""
        return {
            job.spec.manifest(job.step): job.manifest for run in self.runs for job in run.jobs if job.manifest
        }

    @property
    def finished_at(self) -> datetime | None:
        """When the last manifest was published."""
        return max((datetime.fromisoformat(m.created) for m in self.manifests.values()), default=None)


def collect(plan: Plan, plan_path: Path) -> Campaign:
    """Read what there is; nothing has to be complete."""
    return Campaign(plan, plan_path.as_posix(), [_run(plan, name, run) for name, run in plan.runs.items()])


def _run(plan: Plan, name: str, planned: RunPlan) -> Run:
    jobs = [_job(plan.stages[id], step) for id in planned.ids() for step in plan.stages[id].cuts or [None]]
    run = Run(name, planned, jobs)
    run.metrics = read_metrics(Path(run.train.folder) / METRICS_FILE)
    for spec in [job.spec for job in jobs if job.spec.stage == "sft"]:
        before = len(run.sft_curve)
        curve = read_metrics(Path(spec.folder) / SFT_CURVE_FILE)
        run.sft_curve += [{**point, "step": point["step"] + before} for point in curve]
    return run


def _job(spec: StageSpec, step: int | None) -> Job:
    try:
        manifest = read_manifest(Path(spec.manifest(step)))
    except ManifestError:
        return Job(spec, step, None, _read_failure(spec, step))
    return Job(spec, step, manifest if manifest.identity == spec.identity else None)


def _read_failure(spec: StageSpec, step: int | None) -> Failure | None:
    path = Path(spec.failure(step))
    if not path.is_file():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    label = record["stage"] if step is None else f"{record['stage']}, step {step}"
    lines = tuple(record.get("last_lines", ()))
    return Failure(label, record["class"], record["message"], record["log"], lines)


def _unfinished(job: Job) -> Failure:
    return Failure(
        job.label,
        "NotFinished",
        "the stage published nothing and recorded no failure: it was killed, or has not run yet",
        job.spec.log(job.step),
    )
