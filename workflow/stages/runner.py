"""What all stages share: an attempt, from the refusal of a plan over lock, signals and log to the publication. Loads no framework."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.config import ConfigError
from engines.model_folder import ModelFolderError
from workflow.campaign.code import code_digest, source_root
from workflow.campaign.identity import Content, Identity, contents, identify
from workflow.campaign.lock import FolderLock
from workflow.campaign.paths import cut, lookup
from workflow.campaign.plan import Plan, PlanError, StageSpec, read_plan
from workflow.campaign.slice import Slice
from workflow.campaign.stages import STAGES
from workflow.campaign.triggers import Triggers
from workflow.cluster.states import job_is_final
from workflow.data.errors import DataError
from workflow.manifest import Manifest, ManifestError, write_json
from workflow.stages.attempts import AttemptLog
from workflow.stages.progress import Progress
from workflow.stages.provenance import timestamp
from workflow.stages.publication import (
    Source,
    StageRefused,
    publish,
    published,
    read_input,
    segment_before,
)
from workflow.stages.retention import release_states
from workflow.stages.stop import StoppedByUser, StoppedOnRequest, StopRequest

PUBLISHED, OWN_ERROR, REFUSED, STOPPED, STOPPED_BY_USER = 0, 1, 64, 75, 76
"""Exit codes: a manifest is there; the stage's own error; bad input; stopped on request with its state saved; the same by the file
``stop``, and not to be started again while that is there."""
LAST_LINES = 30
"""Of the log, in the record of a failure."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""A stage reads what its inputs published and asks no server: ``baton stage-in`` is for what has to come from elsewhere."""


class StageIncomplete(RuntimeError):
    """The stage ended with fewer steps than planned."""


_BAD_INPUT = (ConfigError, DataError, ManifestError, ModelFolderError, PlanError, StageRefused)


@dataclass
class StageContext:
    """What a stage's ``main`` gets."""

    spec: StageSpec
    """The stage as planned."""
    config: Slice
    """Its declared configuration."""
    inputs: dict[str, Manifest]
    """The manifests it starts from; their files were hashed again."""
    folder: Path
    """Working folder: checkpoints, logs. Survives failures and restarts."""
    output: Path
    """Where published files lie and the manifest will appear: ``folder``, or for training ``folder/step000040``."""
    step: int | None
    """Training: the step at which this segment ends."""
    stop: StopRequest
    triggers: Triggers
    """What people ask of it by files."""
    log: logging.Logger
    attempts: AttemptLog
    _input_folders: dict[str, Path] = field(default_factory=dict)
    before: Source | None = None
    """Training: the state at which the segment before this one ended, as it was when this start began."""
    lock: FolderLock | None = None
    """Of the folder. Not held for ever: SLURM may give up a node on which this process goes on."""

    def input_path(self, name: str) -> Path:
        """The folder of an input's published files."""
        return self._input_folders[name]

    def progress(self, description: str, total: int) -> Progress:
        """A progress bar on the terminal; use as a context manager and call ``advance(n, **values)``."""
        return Progress(f"{description} {self.spec.slug}", total)

    def step_done(self, step: int) -> None:
        """Training: note that ``step`` is complete, for the record of attempts. Ends the process when its folder is another's."""
        self.leave_if_lost()
        self.attempts.step_done(step)

    def leave_if_lost(self) -> None:
        """End the process when its folder is another's, or may be."""
        if self.lock is not None and not self.lock.held:
            _leave()


@dataclass
class StageResult:
    """What a stage's ``main`` returns."""

    files: list[Path]
    """Published files (or folders of them), relative to ``context.output``."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Summary, JSON."""
    steps_planned: int = 0
    steps_done: int = 0
    seeds: dict[str, int] = field(default_factory=dict)
    device_seconds: float | None = None
    """World size x wall time that led to the result; measured by the runner when not given."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What only this stage has to say, JSON."""


def run(stage: str, plan_path: Path, key: str, step: int | None = None) -> int:
    """Run one planned stage in this process and publish its manifest; returns the exit code."""
    try:
        plan = read_plan(plan_path)
        spec = plan.find(stage, key)
        _check_plan(plan, spec, step)
        spec = spec.at(step)
    except _BAD_INPUT as error:
        print(f"{stage} {key}: refused: {error}", file=sys.stderr)
        return REFUSED
    output = Path(spec.output_folder(step))
    lock = FolderLock(Path(spec.folder), job_is_final=job_is_final, on_lost=_leave)
    if published(spec, output) is not None:
        return PUBLISHED
    triggers = Triggers.of(plan, plan_path.parent, spec)
    if triggers.stop_asked:
        print(f"{stage} {spec.name}: {triggers.way_on}", file=sys.stderr)
        return STOPPED_BY_USER
    stop = StopRequest()
    stop.install()
    try:
        stop.interrupt()
        _wait_for(lock, spec)
        stop.will_poll()
        if published(spec, output) is not None:  # by the process we waited for
            return PUBLISHED
        return _attempt(plan, spec, step, lock, triggers, stop)
    except StoppedOnRequest as error:
        print(f"{stage} {spec.name}: stopped before it began: {error}", file=sys.stderr)
        return STOPPED
    finally:
        lock.release()


def framework_variables(threads: int) -> dict[str, str]:
    """The environment in which a stage loads a framework."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads)) | _OFFLINE


def _attempt(
    plan: Plan, spec: StageSpec, step: int | None, lock: FolderLock, triggers: Triggers, stop: StopRequest
) -> int:
    """One start, from the record of attempts to the manifest or the record of the failure."""
    log_path = Path(spec.log(step))
    attempts = AttemptLog(Path(spec.folder), step, log_path)
    log = _open_log(spec, log_path)
    log.info("start %d of %s %s", attempts.number, spec.stage, spec.name)
    os.environ.update(framework_variables(spec.threads))
    try:
        stop.interrupt()
        context = _context(plan, spec, step, stop, triggers, log, attempts)
        context.lock = lock
        module = importlib.import_module(f"workflow.stages.{spec.stage}")
        stop.interrupt()  # again: an import may swallow what it does not know
        result = module.main(context)
        if result.steps_done < result.steps_planned:
            raise StageIncomplete(f"{result.steps_done} of {result.steps_planned} steps were done")
        attempts.will_end("published")
        # First, as a kill may come in between: no result stands beside the record of a failure.
        Path(spec.failure(step)).unlink(missing_ok=True)
        publish(plan, context, result)
        stop.will_poll()  # nothing is left that a request could stop
        attempts.end("published")
    except StoppedByUser as error:
        attempts.end("stopped")
        log.warning("%s; %s", error, triggers.way_on)
        return STOPPED_BY_USER
    except (StoppedOnRequest, KeyboardInterrupt) as error:
        attempts.end("stopped")
        log.warning("stopped: %s; the same command continues", error)
        return STOPPED
    except Exception as error:
        refused = isinstance(error, _BAD_INPUT)
        attempts.end("refused" if refused else "error")
        _record_failure(spec, step, error, log_path, log)
        return REFUSED if refused else OWN_ERROR
    _release(plan, spec, log)
    log.info("published %s", spec.manifest(step))
    return PUBLISHED


def _leave() -> None:
    """Another start has the folder: write nothing more, record nothing."""
    os._exit(STOPPED)


def _check_plan(plan: Plan, spec: StageSpec, step: int | None) -> None:
    """Refuse a plan that other code made, or a stage that is not what its identity says."""
    stage = STAGES[spec.stage]
    if plan.code != (digest := code_digest(source_root())):
        raise PlanError(
            f"the plan was made by another version of the code ({plan.code[:12]}, this is {digest[:12]}); "
            "start the workflow again, so that it plans anew"
        )
    if spec.version != stage.version:
        raise PlanError(f"planned for version {spec.version} of stage {spec.stage}, this is {stage.version}")
    if step not in (spec.cuts or [None]):
        raise PlanError(f"--step {step}: the plan cuts {spec.name} at {spec.cuts or 'no step'}")
    values = cut(spec.config, stage.reads)
    for path, digest in contents(values).items():
        if digest != (planned := spec.contents.get(path)):
            raise PlanError(
                f"{path}={lookup(values, path)!r} has changed since it was planned: {planned} then, {digest} now; "
                "put it back, or start the workflow again, which then computes other results beside those that are there"
            )
    content = Content.of(stage, values)
    inputs = {
        name: Identity(source.identity, source.learning_identity, ref.step)
        for name, ref in spec.inputs.items()
        for source in [plan.stages[ref.id]]
    }
    if identify(stage, content, inputs, spec.threads) != Identity(spec.identity, spec.learning_identity):
        raise PlanError(
            f"{spec.name} is not what was planned: its configuration was altered; start the workflow again"
        )


def _wait_for(lock: FolderLock, spec: StageSpec) -> None:
    """Take the folder's lock; while another living process has it (one whose head died), say so and wait for it."""
    said = False
    for holder in lock.wait():
        if not said:
            print(f"{spec.stage} {spec.name}: waiting for {holder}, which is working on it", file=sys.stderr)
        said = True


def _context(
    plan: Plan,
    spec: StageSpec,
    step: int | None,
    stop: StopRequest,
    triggers: Triggers,
    log: logging.Logger,
    attempts: AttemptLog,
) -> StageContext:
    inputs, folders = {}, {}
    for name, ref in spec.inputs.items():
        path = Path(plan.input_manifest(ref))
        folders[name] = path.parent
        inputs[name] = read_input(plan, name, ref, path)
    output = Path(spec.output_folder(step))
    if step is None:
        output.mkdir(parents=True, exist_ok=True)  # a training state's folder appears with the state
    config = Slice(spec.stage, spec.config)
    return StageContext(
        *(spec, config, inputs, Path(spec.folder), output, step),
        *(stop, triggers, log, attempts, folders, segment_before(spec, step)),
    )


def _release(plan: Plan, spec: StageSpec, log: logging.Logger) -> None:
    """Give up training states that are not needed now that this stage has published. What goes wrong here does not undo that."""
    trains = [spec] if spec.stage == "train" else []
    trains += [plan.stages[ref.id] for ref in spec.inputs.values() if ref.step is not None]
    for train in trains:
        try:
            if steps := release_states(plan, train):
                log.info("released the states of steps %s of %s", steps, train.name)
        except OSError as error:
            log.warning("states of %s that nobody needs any more are still there: %s", train.name, error)


def _record_failure(
    spec: StageSpec, step: int | None, error: Exception, log_path: Path, log: logging.Logger
) -> None:
    text = "".join(traceback.format_exception(error))
    with log_path.open("a", encoding="utf-8") as file:
        file.write(text)
    log.error("%s: %s", type(error).__name__, error)
    print(f"{spec.stage} {spec.name} failed; its log: {log_path}", file=sys.stderr)
    with log_path.open(encoding="utf-8", errors="replace") as file:
        last = [line.rstrip("\n") for line in deque(file, maxlen=LAST_LINES)]
    record = {
        "stage": spec.stage,
        "id": spec.id,
        "step": step,
        "class": type(error).__name__,
        "message": str(error),
        "log": str(log_path),
        "last_lines": last,
        "created": timestamp(),
    }
    write_json(Path(spec.failure(step)), record)


def _open_log(spec: StageSpec, path: Path) -> logging.Logger:
    """Everything goes to the file with its time; warnings and errors also to the terminal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = logging.StreamHandler()
    terminal.setLevel(logging.WARNING)
    terminal.setFormatter(logging.Formatter(f"{spec.stage} {spec.slug}: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[file, terminal], force=True)
    return logging.getLogger(f"baton.{spec.stage}")
