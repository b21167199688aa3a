"""What the workflow's head does: options -> frozen plan, then lock, preflight and a copy of the source before the first job."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.config import ConfigError, parse
from engines.model_folder import ModelFolderError
from workflow.campaign.build import PlannedRun, make_plan
from workflow.campaign.code import code_digest, snapshot, source_root
from workflow.campaign.lock import HEAD_LOCK, FolderLock, LockHeld
from workflow.campaign.plan import CURRENT, RESULTS, Plan, PlanError, read_plan, write_plan
from workflow.campaign.preflight import (
    DiskFull,
    check_budgets,
    check_data,
    check_disk,
    check_sizes,
    check_trackers,
)
from workflow.campaign.released import StatesReleased, check_released
from workflow.campaign.schema import CampaignOptions
from workflow.campaign.segments import note_cuts
from workflow.campaign.site import LOCAL, SiteConfig, detect_site, load_site
from workflow.campaign.stage_server import start_stage_server
from workflow.campaign.triggers import Triggers
from workflow.data import DataError, PromptError

REFUSALS = (
    ConfigError, DataError, DiskFull, LockHeld, ModelFolderError, PlanError, PromptError, StatesReleased,
)  # fmt: skip
"""What makes a campaign stop before its first job; each message is for the person who started it."""
CODE = RESULTS / ".code"
GAVE_WAY = 3
"""Exit code of a head that another one took for dead."""


@dataclass
class Head:
    """A campaign as the workflow sees it."""

    plan: Plan
    path: Path
    """The frozen plan."""
    runs: list[PlannedRun] = field(default_factory=list)
    """Composed runs; none when the plan was given."""
    _lock: FolderLock | None = None

    @property
    def folder(self) -> Path:
        """Where people look."""
        return RESULTS / self.plan.campaign

    @property
    def code(self) -> Path:
        """The copy of the source that the campaign's jobs run."""
        return CODE / self.plan.code[:16]

    @property
    def site(self) -> SiteConfig:
        """Where jobs go: the site of the runs, or of a given plan.

        Raises:
            ConfigError: the site's file is gone or wrong, or the runs have several.
        """
        if self.runs:
            site = self.runs[0].config.site
            if others := [run.name for run in self.runs if run.config.site != site]:
                raise ConfigError(
                    f"run {others[0]!r} has other values below site than run {self.runs[0].name!r}: "
                    "all runs of a campaign go to one site; set them for all, or on the command line"
                )
            return site
        return load_site(self.plan.options.get("site") or LOCAL, source_root() / "configs")

    def start(self, job_is_final: Callable[[str], bool | None], local: bool = False) -> None:
        """Before the first job: be the only head, check states, data and disk, copy the source.

        Args:
            job_is_final: asks SLURM about another head that runs in a job; see :class:`FolderLock`.
            local: jobs are processes of this host, and may come from a stage server.

        Raises:
            LockHeld: another head works in this results folder.
            StatesReleased, ConfigError, DataError, PromptError, DiskFull: nothing has been started.
        """
        lock = FolderLock(RESULTS, HEAD_LOCK, job_is_final, on_lost=_give_way)
        try:
            lock.acquire()
        except LockHeld as error:
            raise LockHeld(f"another head is running: {error}; wait for it or stop it") from None
        self._lock = lock
        atexit.register(lock.release)
        check_released(self.plan)
        check_data(self.runs)
        check_disk(self.plan, RESULTS)
        snapshot(source_root(), self.plan.code, CODE)
        note_cuts(self.plan)
        for name in self.plan.runs:
            (self.folder / name).mkdir(parents=True, exist_ok=True)  # for what people ask of it by files
        _point_to(self.path, self.folder / CURRENT)
        # A fork has neither another one's devices nor its threads.
        needs = {(spec.device.computed, spec.threads) for spec in self.plan.stages.values()}
        if local and needs == {("cpu", 1)}:
            start_stage_server(self.code)

    def closing_words(self) -> str:
        """Where the report and the exported models are, those that exist, and which runs somebody stopped."""
        exports = {
            name: Path(self.plan.stages[export].output_folder()) / "export"
            for name, run in self.plan.runs.items()
            if isinstance(export := run.stages.get("export"), str)
        }
        found = {
            "report": self.folder / "report.html",
            **{f"model of {name}": path for name, path in exports.items()},
        }
        lines = [f"  {what}: {path}" for what, path in found.items() if path.exists()]
        for name in self.plan.runs:
            triggers = Triggers((self.folder / name,))
            if triggers.stop_asked and not all(map(os.path.exists, self.plan.last_manifests(name))):
                lines.append(f"  run {name}: {triggers.way_on}")
        return "\n".join([f"campaign {self.plan.campaign}:", *lines])


def open_campaign(config: Mapping[str, Any]) -> Head:
    """Freeze the plan that the command line asks for, or take the one it names.

    Raises:
        ConfigError: anything wrong with the configuration, every key named.
        PlanError: the named plan is missing, altered, or of another version of the code.
    """
    options = read_options(config)
    root = source_root()
    if options.plan is not None:
        plan = read_plan(Path(options.plan))
        if plan.code != (digest := code_digest(root)):
            raise PlanError(
                f"plan={options.plan}: made by another version of the code ({plan.code[:12]}, this is {digest[:12]}); "
                "leave plan out to plan anew: what is published stays valid"
            )
        return Head(plan, Path(options.plan))
    plan, runs = plan_campaign(options, root)
    path = write_plan(plan, RESULTS / plan.campaign)
    current = path.with_name(CURRENT)
    if current.is_symlink() and current.readlink().name != path.name:
        os.utime(path)  # newer than what the folder shows of another plan, so that it is made anew
    # A large plan lives as long as this process: the garbage collector need not walk through it again and again.
    gc.freeze()
    return Head(plan, path, runs)


def plan_campaign(options: CampaignOptions, root: Path) -> tuple[Plan, list[PlannedRun]]:
    """Plan a campaign and check what needs no data; writes nothing.

    Raises:
        ConfigError: with the run, the key, the value and what would be right.
    """
    options = on_this_site(options, root)
    plan, runs = make_plan(options, root)
    for run in runs:
        try:
            check_sizes(run.config)
            check_budgets(run)
            check_trackers(run.config)
        except ConfigError as error:
            raise ConfigError(f"run {run.name!r}: {error}") from None
    return plan, runs


def recut(options: CampaignOptions, root: Path) -> None:
    """Decide on new cuts and note them, for a head that is yet to be started.

    Raises:
        LockHeld: a head is running.
        ConfigError: see :func:`plan_campaign`.
    """
    with FolderLock(RESULTS, HEAD_LOCK):
        plan, _ = plan_campaign(options.model_copy(update={"recut": True}), root)
        note_cuts(plan)


def on_this_site(options: CampaignOptions, root: Path) -> CampaignOptions:
    """The same options, with the site of the cluster that this host belongs to when they name none.

    Raises:
        ConfigError: there is a cluster here, and no site file, or more than one, that names it.
    """
    if options.site is None and (site := detect_site(root / "configs")) != LOCAL:
        return options.model_copy(update={"site": site})
    return options


def read_options(config: Mapping[str, Any]) -> CampaignOptions:
    """The options of ``snakemake --config``, typed.

    Raises:
        ConfigError: an unknown option (nearest spelling) or a value out of range.
    """
    values = dict(config)
    if isinstance(values.get("set"), (list, tuple)):
        values["set"] = " ".join(str(word) for word in values["set"])
    if isinstance(values.get("set"), Mapping):  # Snakemake has read its text as YAML
        raise ConfigError(f"--config set={values['set']!r}: a value with ': ' belongs in a campaign's file")
    if "campaign" in values:
        values["campaign"] = str(values["campaign"])
    return parse(CampaignOptions, values, path="--config")


def _give_way() -> None:
    """Two heads would submit everything twice. Nothing is cancelled: this one's jobs are the other's now."""
    print("another head has taken over; this one ends and leaves its jobs to it", file=sys.stderr, flush=True)
    os._exit(GAVE_WAY)


def _point_to(path: Path, link: Path) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name)
    temporary.rename(link)
