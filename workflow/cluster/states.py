"""What became of a job: SLURM's states (sacct, else squeue), the launcher's own record, and the failure class they add up to. No torch."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from workflow.cluster.jobs import EndRecord
from workflow.cluster.slurm import NoSuchJob, SlurmRefused, SlurmUnavailable, slurm

FINAL = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)
UNKNOWN = "UNKNOWN"
"""Nobody can tell: neither running nor failed."""
GONE = "GONE"
"""The controller answers and has forgotten the job, so it ended; accounting does not tell how."""
SACCT_PAUSE = 60.0
"""Seconds for which a failing sacct is not asked again."""
LAST_LINES = 15
"""Of a job's log, in the message of its failure."""
"""Exit codes of a process that was killed: the memory limit does that, and SLURM tells so a little later."""


@dataclass(frozen=True)
class JobState:
    """What SLURM says of a job."""

    state: str
    """SLURM's word, UNKNOWN or GONE."""
    nodes: str = ""
    """SLURM's short spelling of its nodes."""
    reason: str = ""
    """Why it is pending."""
    time_left: str = ""

    @property
    def final(self) -> bool:
        """Whether the job has ended and will not be requeued by itself."""
        return self.state in FINAL or self.state == GONE


_UNFIT = re.compile(r"down|drain|fail|boot|\*$", re.IGNORECASE)
"""Of a node's state in sinfo; the star says that it does not respond."""


class StateWatch:
    """Asks SLURM for states, with one command for all jobs, and remembers for a while when sacct does not work."""

    def __init__(self) -> None:
        self._sacct_again = 0.0

    def query(self, jobs: Iterable[str]) -> dict[str, JobState]:
        """The state of each job; never raises for a daemon that is down: what nobody can tell is UNKNOWN.

        A final state of sacct counts when the controller does not know the job any more: accounting lags behind, also behind a requeue.
        """
        jobs = list(jobs)
        found = self._sacct(jobs)
        doubtful = [job for job in jobs if job not in found or found[job].final]
        for job, state in controller_states(doubtful).items():
            if state.state != GONE or job not in found:
                found[job] = state
        return found

    def _sacct(self, jobs: list[str]) -> dict[str, JobState]:
        if not jobs or time.monotonic() < self._sacct_again:
            return {}
        try:
            text = slurm("sacct", "-X", "-n", "-P", "-o", "JobIDRaw,State,NodeList", "-j", ",".join(jobs))
        except (SlurmUnavailable, SlurmRefused):
            self._sacct_again = time.monotonic() + SACCT_PAUSE
            return {}
        rows = [line.split("|") for line in text.splitlines()]
        return {
            job: JobState(state.split()[0], "" if nodes == "None assigned" else nodes)
            for job, state, nodes in rows
            if state
        }


def controller_states(jobs: list[str]) -> dict[str, JobState]:
    """States from the controller, which keeps ended jobs for MinJobAge: then they are GONE. UNKNOWN while it does not answer."""
    if not jobs:
        return {}
    try:
        text = slurm("squeue", "--states=all", "-h", "-r", "-o", "%i|%T|%N|%L|%r", "-j", ",".join(jobs))
    except NoSuchJob:
        if len(jobs) > 1:  # one forgotten job hides the answer for the others
            return {job: state for each in jobs for job, state in controller_states([each]).items()}
        text = ""
    except (SlurmUnavailable, SlurmRefused):
        return dict.fromkeys(jobs, JobState(UNKNOWN))
    found = dict.fromkeys(jobs, JobState(GONE))
    for line in text.splitlines():
        job, state, nodes, left, reason = line.split("|", 4)
        found[job] = JobState(state, nodes, "" if reason == "None" else reason, left)
    return found


def job_is_final(job: str) -> bool | None:
    """Whether SLURM says that a job has ended; None when it cannot be asked."""
    state = StateWatch().query([job])[job]
    return None if state.state == UNKNOWN else state.final


def failed_nodes(names: list[str]) -> list[str]:
    """Which of a job's nodes made SLURM end it as NODE_FAIL: the only one, else those that it takes no jobs for now."""
    if len(names) == 1:
        return names
    try:
        text = slurm("sinfo", "-N", "-h", "-o", "%N|%T", "-n", ",".join(names))
    except (SlurmUnavailable, SlurmRefused):
        return []
    states = dict(line.split("|") for line in text.splitlines())
    return [name for name in names if _UNFIT.search(states.get(name, ""))]


def find_jobs(name: str) -> list[str]:
    """Ids of the jobs of that (unique) name, ended ones too as far as SLURM remembers them.

    Raises:
        SlurmUnavailable: it cannot be told now.
    """
    try:
        text = slurm("squeue", "--states=all", "-h", "-r", "-o", "%i", f"--name={name}")
    except SlurmRefused as error:
        raise SlurmUnavailable(str(error)) from None
    if ids := text.split():
        return ids
    try:
        return slurm(
            "sacct", "-X", "-n", "-P", "-o", "JobIDRaw", "-S", "now-30days", f"--name={name}"
        ).split()
    except (SlurmUnavailable, SlurmRefused):
        return []  # no accounting here; the controller has just said that it has no such job


class FailureClass(StrEnum):
    """Why a stage has no manifest although its job ended."""

    OWN_ERROR = "own error"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    CANCELLED = "CANCELLED"
    NO_PROGRESS = "no progress"
    REFUSED = "refused"
    STOPPED = "stopped by the user"


RETRIED = frozenset(
    {FailureClass.OUT_OF_MEMORY, FailureClass.TIMEOUT, FailureClass.NODE_FAIL, FailureClass.PREEMPTED}
)
"""A new job can help; for all others it would fail the same way, or somebody wanted it to end."""
_BY_STATE = {
    "BOOT_FAIL": FailureClass.NODE_FAIL,
    "CANCELLED": FailureClass.CANCELLED,
    "DEADLINE": FailureClass.TIMEOUT,
    "NODE_FAIL": FailureClass.NODE_FAIL,
    "OUT_OF_MEMORY": FailureClass.OUT_OF_MEMORY,
    "PREEMPTED": FailureClass.PREEMPTED,
    "REVOKED": FailureClass.CANCELLED,
    "TIMEOUT": FailureClass.TIMEOUT,
}
_BY_OUTCOME = {
    "no progress": FailureClass.NO_PROGRESS,
    "node lost": FailureClass.NODE_FAIL,
    "refused": FailureClass.REFUSED,
    "requeue refused": FailureClass.TIMEOUT,
    "requeued": FailureClass.PREEMPTED,
    "stopped": FailureClass.CANCELLED,
    "stopped by user": FailureClass.STOPPED,
}


def settled(end: EndRecord | None) -> bool:
    """Whether the launcher's record tells the failure by itself, without SLURM's state."""
    # Of an error SLURM may know more: a rank that is killed for its memory ends the stage as its own error.
    return (
        end is not None
        and not end.terminated
        and end.outcome not in ("published", "requeued", "node lost", "error")
    )


def classify(
    state: JobState, end: EndRecord | None, over_memory: bool = False, started: bool = True
) -> FailureClass:
    """The class of a job that ended without a manifest.

    The launcher knows best why the stage ended, unless something outside ended both: then SLURM knows.

    Args:
        over_memory: see :func:`ended_for_memory`.
        started: whether the launcher has begun. Where it could not, the node lacks what it needs.
    """
    if end is not None and settled(end):
        return _BY_OUTCOME.get(end.outcome, FailureClass.OWN_ERROR)
    if over_memory:
        return FailureClass.OUT_OF_MEMORY
    if state.state in _BY_STATE:
        return _BY_STATE[state.state]
    if end is not None:
        return _BY_OUTCOME.get(end.outcome, FailureClass.OWN_ERROR)
    return FailureClass.NODE_FAIL if state.state == GONE or not started else FailureClass.OWN_ERROR


def ended_for_memory(log: Path, job: str) -> bool:
    """Whether SLURM has written into a job's log that it was over its memory.

    Where SLURM itself looks how much memory a job has (``JobAcctGatherParams=OverMemoryKill``), the state does not tell.
    """
    told = re.compile(rf"\bStepId={job}\.\w+ exceeded memory limit")
    return any(told.search(line) for line in last_lines(log, 50))


def last_lines(path: Path, count: int = LAST_LINES) -> list[str]:
    """The end of a log; empty when there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=count)]
    except OSError:
        return []
