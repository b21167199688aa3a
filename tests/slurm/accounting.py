"""What SLURM remembers of a campaign's jobs, beside what the campaign itself says of them; and when it was asked."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.slurm.minicluster import MiniCluster
from workflow.campaign.plan import Plan, StageSpec
from workflow.cluster.jobs import JobRecord, read_jobs
from workflow.cluster.placement import job_name
from workflow.drill.evidence import starts

COMMANDS = ("sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
_ASKED = "asked.txt"


@dataclass(frozen=True)
class JobStart:
    """One start of a job, as accounting tells it."""

    job: str
    name: str
    begun: float | None
    ended: float | None


def job_starts(cluster: MiniCluster, folder: Path) -> list[JobStart]:
    """All starts of all jobs that were submitted in ``folder``, requeued ones too."""
    fields = "JobIDRaw,JobName,Start,End,WorkDir"
    text = cluster.run("sacct", "-D", "-X", "-n", "-P", "-S", "now-1days", "-o", fields)
    return read_job_starts(text, folder)


def read_job_starts(text: str, folder: Path) -> list[JobStart]:
    """From what sacct prints."""
    rows = [line.split("|") for line in text.splitlines()]
    return [
        JobStart(job, name, _seconds(begun), _seconds(ended))
        for job, name, begun, ended, place in rows
        if place in _names(folder)
    ]


def queued_jobs(cluster: MiniCluster, folder: Path) -> list[str]:
    """Ids of the jobs of ``folder`` that wait or run."""
    rows = [line.split("|") for line in cluster.run("squeue", "-h", "-o", "%i|%Z").splitlines()]
    return [job for job, place in rows if place in _names(folder)]


def job_problems(
    folder: Path, plan: Plan, found: Collection[JobStart], queued: Collection[str]
) -> Iterator[str]:
    """No stage had a job that its registry does not count, none had two at a time, and none is left."""
    records = {(one.stage, one.id, one.step): one for _, one in read_jobs(folder / "results")}
    names = set()
    for spec in plan.stages.values():
        for step in spec.cuts or [None]:
            name = job_name(spec.stage, spec.id, step)
            names.add(name)
            own = [start for start in found if _base(start.name) == name]
            yield from _counted(name, records.get((spec.stage, spec.id, step)), own)
            yield from _known(name, folder, spec, step, {start.job for start in own})
            yield from _two_at_a_time(name, own)
    for start in found:
        if _base(start.name) not in names:
            yield f"job {start.job} ({start.name}) is of no stage"
    for job in queued:
        yield f"job {job} is left"


def _counted(name: str, record: JobRecord | None, own: list[JobStart]) -> Iterator[str]:
    """The registry's last job counts when SLURM has taken it: a head may have died before it could write down its id."""
    jobs, expected = sorted({start.job for start in own}), 0
    if record is not None:
        taken = record.job is not None or any(start.name == record.name for start in own)
        expected = record.attempt - (not taken)
        if record.job is not None and record.job not in jobs:
            yield f"{name}: its registry names job {record.job}, SLURM had {jobs}"
    if len(jobs) != expected:
        yield f"{name}: SLURM had the jobs {jobs}, its registry counts {expected}"


def _known(name: str, folder: Path, spec: StageSpec, step: int | None, jobs: set[str]) -> Iterator[str]:
    begun = {
        line["job"]
        for line in starts(folder / spec.folder)
        if line["segment"] == step and line.get("job") is not None
    }
    if begun - jobs:
        yield f"{name}: it started in the jobs {sorted(begun - jobs)}, which are not its own"


def _two_at_a_time(name: str, own: list[JobStart]) -> Iterator[str]:
    """Accounting knows whole seconds."""
    ran = sorted((one for one in own if one.begun is not None), key=lambda one: one.begun)
    for one, after in itertools.pairwise(ran):
        if one.ended is None or after.begun < one.ended:
            yield f"{name}: job {after.job} began before job {one.job} had ended"


def note_questions(folder: Path) -> Path:
    """A folder for the front of PATH, in which SLURM's commands note when they are called before they run."""
    folder.mkdir(exist_ok=True)
    for name in COMMANDS:
        if real := shutil.which(name):
            script = f'#!/bin/sh\necho "$(date +%s.%N) {name}" >> "{folder / _ASKED}"\nexec {real} "$@"\n'
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
    return folder


def was_asked(folder: Path, commands: Collection[str], since: float, until: float | None = None) -> bool:
    """Whether one of the commands was called in that time (of ``time.time()``)."""
    try:
        lines = (folder / _ASKED).read_text().splitlines()
    except FileNotFoundError:
        return False
    called = [(float(at), name) for at, name in (line.split() for line in lines)]
    return any(name in commands and since <= at <= (until or time.time()) for at, name in called)


def _base(name: str) -> str:
    """Without what makes it unique."""
    return name.rpartition(":")[0]


def _names(folder: Path) -> tuple[str, str]:
    return str(folder), str(folder.resolve())


def _seconds(text: str) -> float | None:
    """Of a date; accounting has words for those that are not there."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
