"""The frozen plan of a campaign: every stage of every run, resolved. Written once; jobs read it and compose nothing."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from engines.catalog import installed_on_top
from engines.config import Config, ConfigError, LayoutConfig, parse
from workflow.campaign.stages import STAGES
from workflow.manifest import MANIFEST, Device, Manifest, write_text

RESULTS = Path("results")
"""Where the workflow runs: every campaign's folder, and the store of results."""
CURRENT = "plan.json"
"""In a campaign's folder, a link to the plan that it shows."""


class PlanError(RuntimeError):
    """A plan is missing, altered, or made by another version of the code."""


class InputRef(Config):
    """An input of a stage: the stage that publishes it, and for training states the step."""

    id: str
    step: int | None = None


class Leg(Config):
    """How a training is laid out from a step on."""

    after: int
    """Steps that are done before."""
    layout: LayoutConfig
    world_size: int


class StageSpec(Config):
    """One stage, resolved: all that its job needs to know."""

    stage: str
    slug: str
    version: int
    identity: str
    """Numeric identity, hex."""
    learning_identity: str
    """Identity without backend, device, layout, dtype and threads, hex."""
    config: dict[str, Any]
    """The declared slice of the run, paths as they are on this machine."""
    contents: dict[str, str] = {}
    """Of the config paths that name a file, folder, package or function: digests of what was there."""
    inputs: dict[str, InputRef] = {}
    device: Device
    layout: LayoutConfig = LayoutConfig()
    """Of the role with the most ranks."""
    world_size: int = 1
    """Ranks of all its process groups together."""
    relay: list[Leg] = []
    """Training: what takes over from ``layout`` and ``world_size``, in the order of steps."""
    backends: dict[str, str] = {}
    """Engine per role."""
    dtype: str = "float32"
    """Compute type."""
    threads: int = 1
    """CPU threads per rank."""
    steps: int = 0
    """Training steps in all; 0 for stages that do not count steps."""
    cuts: list[int] = []
    """Training: the steps at which segments end."""
    folder: str
    """Working folder, relative to the folder from which the workflow runs."""
    forecast_bytes: int = Field(0, ge=0)
    """What the stage is expected to write."""

    @property
    def id(self) -> str:
        """Key in the plan."""
        return self.identity[:16]

    @property
    def name(self) -> str:
        """The last part of the folder: the wildcard of the stage's rule."""
        return f"{self.slug}-{self.identity[:8]}"

    @property
    def environment(self) -> str:
        """Where it runs: the device key that is computed on, and what is installed on top, such as ``cpu+megatron``."""
        backends = (*self.backends.values(), *STAGES[self.stage].backends)
        return "+".join([self.device.computed, *installed_on_top(backends, self.device.computed)])

    def at(self, step: int | None) -> StageSpec:
        """The same stage with the layout and the ranks of the segment that ends at ``step``."""
        legs = [leg for leg in self.relay if step is not None and leg.after < step]
        if not legs:
            return self
        return self.model_copy(update={"layout": legs[-1].layout, "world_size": legs[-1].world_size})

    @property
    def layout_text(self) -> str:
        """The parallel sizes that are not 1, such as dp2 or tp2-dp4-sp; dp1 when all are."""
        short = {
            "tensor": "tp",
            "pipeline": "pp",
            "virtual_pipeline": "vpp",
            "context": "cp",
            "expert": "ep",
            "expert_tensor": "etp",
            "data": "dp",
        }
        sizes = [
            f"{text}{size}"
            for name, text in short.items()
            if (size := getattr(self.layout, f"{name}_parallel_size")) > 1
        ]
        flags = {"sp": self.layout.sequence_parallel, "do": self.layout.distributed_optimizer}
        return "-".join([*sizes, *(text for text, is_set in flags.items() if is_set)]) or "dp1"

    def output_folder(self, step: int | None = None) -> str:
        """Folder of the manifest that ends at ``step`` (training), or of the only one."""
        return self.folder if step is None else f"{self.folder}/step{step:06d}"

    def manifest(self, step: int | None = None) -> str:
        """Path of that manifest."""
        return f"{self.output_folder(step)}/{MANIFEST}"

    def log(self, step: int | None = None) -> str:
        """Path of the log of the job that publishes it."""
        return f"{self.folder}/log{_suffix(step)}.txt"

    def failure(self, step: int | None = None) -> str:
        """Path of the record that a failed job leaves, and the next success removes."""
        return f"{self.folder}/failure{_suffix(step)}.json"


class RunPlan(Config):
    """One run: which stages it consists of."""

    stages: dict[str, str | list[str]]
    """Stage name -> id; ``evaluate`` is a list, first after SFT, then after each segment."""
    overrides: list[str]
    """What sets this run apart, in the order it was applied."""
    algorithm: str
    """grpo, ppo, or sft for the control without RL."""
    seed: int

    def ids(self) -> list[str]:
        """Every stage of the run."""
        return [id for value in self.stages.values() for id in ([value] if isinstance(value, str) else value)]


class Plan(Config):
    """A whole campaign."""

    format: Literal[1] = 1
    campaign: str
    code: str
    """Digest of the source that made it."""
    environments: dict[str, str]
    """Of every environment that a stage runs in, the digest of its lock files."""
    segments: int | Literal["auto"] = 1
    """Into how many segments trainings were asked to be cut."""
    options: dict[str, Any] = {}
    """The command line: seed, controls, overrides, site."""
    stages: dict[str, StageSpec]
    """By id."""
    runs: dict[str, RunPlan]

    @cached_property
    def text(self) -> str:
        """The plan as its file holds it; equal plans have equal texts."""
        return self.model_dump_json()

    @cached_property
    def digest(self) -> str:
        """First 16 hex digits of the digest of ``text``; part of the file's name."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], StageSpec]:
        return {(spec.stage, spec.name): spec for spec in self.stages.values()}

    def find(self, stage: str, key: str) -> StageSpec:
        """A stage by its id or by the name of its folder.

        Raises:
            PlanError: the plan has no such stage.
        """
        spec = self._by_name.get((stage, key)) or self.stages.get(key)
        if spec is None or spec.stage != stage:
            raise PlanError(f"the plan of campaign {self.campaign!r} has no {stage} {key!r}")
        return spec

    def run_manifests(self, name: str) -> list[str]:
        """Paths of all manifests of a run."""
        specs = [self.stages[id] for id in self.runs[name].ids()]
        return [spec.manifest(step) for spec in specs for step in spec.cuts or [None]]

    def last_manifests(self, name: str) -> list[str]:
        """Paths of the manifests of a run from which no other stage of it starts: when they are there, all are."""
        specs = [self.stages[id] for id in self.runs[name].ids()]
        used = {(ref.id, ref.step) for spec in specs for ref in spec.inputs.values()}
        return [
            spec.manifest(step)
            for spec in specs
            for step in spec.cuts[-1:] or [None]
            if (spec.id, step) not in used
        ]

    def input_manifest(self, ref: InputRef) -> str:
        """Path of an input's manifest."""
        return self.stages[ref.id].manifest(ref.step)

    def manifest_of(self, spec: StageSpec, **found: Any) -> Manifest:
        """The manifest of a stage of this plan: what was planned, and what its job ``found`` (the other fields; they come first)."""
        planned = {
            "stage": spec.stage,
            "version": spec.version,
            "id": spec.id,
            "identity": spec.identity,
            "learning_identity": spec.learning_identity,
            "slug": spec.slug,
            "config": spec.config,
            "backends": spec.backends,
            "device": spec.device,
            "layout": spec.layout,
            "world_size": spec.world_size,
            "dtype": spec.dtype,
            "threads": spec.threads,
            "environment": self.environments[spec.environment],
            "code": self.code,
        }
        return Manifest(**planned | found)


def _suffix(step: int | None) -> str:
    return "" if step is None else f"-step{step:06d}"


def write_plan(plan: Plan, folder: Path) -> Path:
    """Freeze ``plan`` in ``folder`` (by one rename; an equal one that is there stays). Returns its path."""
    path = folder / f"plan-{plan.digest}.json"
    if not path.exists():
        write_text(path, plan.text)
    return path


def read_plan(path: Path) -> Plan:
    """Read a frozen plan and check that it is what its name says.

    Raises:
        PlanError: missing, not a plan, or altered.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanError(f"{path}: no such plan") from None
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    if path.name != f"plan-{digest}.json":
        raise PlanError(f"{path}: altered since it was frozen (its digest is now {digest})")
    try:
        return parse(Plan, json.loads(text))
    except (ValueError, ConfigError) as error:
        raise PlanError(f"{path}: not a plan of this version: {error}") from None
