"""The registry: which SLURM job works on which stage, written before and after submission. No torch.

``<results>/.jobs/<stage>-<id>[-step000020]/`` holds ``job.json`` (this module), ``start.json`` and ``end.json`` (what the launcher
says at both ends of each start) and submitit's files. A job gets a name that no other ever had; it is written down *before* sbatch is called, and the
job's id after. Whoever finds a name without an id asks SLURM for the name, so no crash can make a job unknown or double.
"""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Literal

from engines.config import Config, ConfigError, parse
from workflow.campaign.plan import StageSpec
from workflow.manifest import ManifestError, is_released, read_manifest, write_json

FOLDER = ".jobs"
JOB_FILE, START_FILE, END_FILE, SUBMIT_LOCK = "job.json", "start.json", "end.json", "submit.lock"


class JobRecord(Config):
    """The newest job of a stage."""

    stage: str
    id: str
    """Of the stage in its plan."""
    step: int | None = None
    """Training: the step at which the segment ends."""
    name: str
    """Unique name of the job."""
    job: str | None = None
    """Its id; none when it is not known whether sbatch was reached."""
    attempt: int = 1
    """Which job for this stage it is; what SLURM did not take is none."""
    asked: float
    """When it was written down, seconds since the epoch."""
    partition: str | None = None
    log: str
    """Of the batch step."""
    excluded: list[str] = []
    """Nodes that failed before."""
    memory_factor: float = 1.0
    """Times the share of host memory: more after the job ran out of it."""
    failure: str | None = None
    """Failure class, when it ended without a manifest."""


class StartRecord(Config):
    """What the launcher says at the beginning of a start."""

    job: str
    restart: int
    node: str
    at: float
    """Seconds since the epoch."""


Outcome = Literal[
    "published",
    "error",
    "refused",
    "no progress",
    "requeued",
    "requeue refused",
    "stopped",
    "stopped by user",
    "node lost",
]


class EndRecord(Config):
    """What the launcher says at the end of a start: the only word on a job where SLURM forgets."""

    job: str
    restart: int
    outcome: Outcome
    code: int
    """Exit code of the stage; negative: killed by that signal."""
    node: str
    terminated: bool = False
    """Whether the launcher was told to end (SIGTERM): then the reason is SLURM's."""
    message: str = ""
    at: float


class JobFolder:
    """One stage's folder in the registry."""

    def __init__(self, results: Path, stage: str, id: str, step: int | None) -> None:
        self.path = results / FOLDER / f"{stage}-{id}{suffix(step)}"
        self._key = (stage, id, step)

    @property
    def submit_lock(self) -> Path:
        """Held by sbatch for as long as it runs, also when who called it was killed."""
        return self.path / SUBMIT_LOCK

    def read(self) -> JobRecord | None:
        """The newest job, or None."""
        return _read(self.path / JOB_FILE, JobRecord)

    def intend(self, base_name: str, log: str, earlier: JobRecord | None, **fields: object) -> JobRecord:
        """Write down that a job is about to be submitted; its name is new."""
        stage, id, step = self._key
        record = JobRecord(
            stage=stage,
            id=id,
            step=step,
            name=f"{base_name}:{secrets.token_hex(4)}",
            attempt=1 if earlier is None else earlier.attempt + (earlier.job is not None),
            asked=time.time(),
            log=log,
            **fields,
        )
        return self.write(record)

    def write(self, record: JobRecord, **changes: object) -> JobRecord:
        """Replace the record, with ``changes``."""
        record = record.model_copy(update=changes)
        write_json(self.path / JOB_FILE, record.model_dump(mode="json"))
        return record

    def end(self, job: str) -> EndRecord | None:
        """What the launcher of ``job`` said at the end of its newest start; None while that goes on."""
        end, start = _read(self.path / END_FILE, EndRecord), read_start(self.path)
        if end is None or end.job != job or (start is not None and start.restart != end.restart):
            return None
        return end


def write_start(folder: Path, start: StartRecord) -> None:
    """Leave the launcher's record of a start in a stage's folder of the registry."""
    write_json(folder / START_FILE, start.model_dump(mode="json"))


def read_start(folder: Path) -> StartRecord | None:
    """The newest start of the stage's newest job."""
    return _read(folder / START_FILE, StartRecord)


def write_end(folder: Path, end: EndRecord) -> None:
    """Leave the launcher's record of an end; nothing when a later start has begun, for which SLURM gave this one up."""
    start = read_start(folder)
    if start is None or (start.job, start.restart) == (end.job, end.restart):
        write_json(folder / END_FILE, end.model_dump(mode="json"))


def read_jobs(results: Path) -> list[tuple[Path, JobRecord]]:
    """Every record of the registry with its folder."""
    found = [
        (path.parent, _read(path, JobRecord)) for path in sorted((results / FOLDER).glob(f"*/{JOB_FILE}"))
    ]
    return [(folder, record) for folder, record in found if record is not None]


def job_log(spec: StageSpec, step: int | None) -> Path:
    """The log of the batch step, beside the stage's own."""
    return Path(spec.folder) / f"job{suffix(step)}.txt"


def published(spec: StageSpec, step: int | None) -> bool:
    """Whether the stage's manifest is valid and its files are there, in their sizes; the stage itself has hashed them."""
    return unpublished(spec, step) is None


def unpublished(spec: StageSpec, step: int | None) -> str | None:
    """Why the stage does not count as published; None when it does."""
    path = Path(spec.manifest(step))
    try:
        manifest = read_manifest(path)
    except ManifestError as error:
        return str(error)
    if manifest.identity != spec.identity or manifest.step != step:
        return f"{path} is of another stage"
    if is_released(path.parent):
        return None
    for name, record in manifest.files.items():
        file = path.parent / name
        if not file.is_file() or file.stat().st_size != record.bytes:
            return f"{file}: missing, or not of the {record.bytes} bytes that were published"
    return None


def suffix(step: int | None) -> str:
    """The step in the name of a segment's file."""
    return "" if step is None else f"-step{step:06d}"


def _read(path: Path, cls: type):
    try:
        return parse(cls, json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, ConfigError):
        return None
