"""What runs in a job: enters the stage's environment, passes signals on, and decides what its end means. No torch.

The warning before the end (USR2) goes to the launcher alone. It asks SLURM for the deadline, tells the stage in time, and when the
stage has saved its state it requeues its own job: same id, same folder, next start. What it says at the end of each start
(``end.json``) is the last word where SLURM forgets or is down.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path

from engines.config import Config, ConfigError, parse
from engines.workers.nodes import NodesUnreachable
from engines.workers.private_folder import NoShortFolder, PrivateFolder
from workflow.campaign.site import DeviceSite
from workflow.cluster.devices import DevicesUnclear, device_variables, query_allocation, visible_devices
from workflow.cluster.environment import enter, enter_on
from workflow.cluster.jobs import EndRecord, StartRecord, write_end, write_start
from workflow.cluster.parts import ARGUMENTS, NodeParts, NodesUnclear, allocated, meeting_point
from workflow.cluster.slurm import SlurmLimit, SlurmRefused, SlurmUnavailable, slurm

PUBLISHED, OWN_ERROR, REFUSED, STOPPED, STOPPED_BY_USER = 0, 1, 64, 75, 76
"""Exit codes of a stage; see workflow.stages.runner."""
WARNED_EARLY = 90.0
"""Seconds by which SLURM's warning before a time limit may come early; a warning still earlier has another reason: preemption."""
LOST_SECONDS = 15.0
"""For a stage to see by itself that a node is lost, and for this process to see why a stage ended."""
ENDED_SECONDS = 30.0
"""In which SLURM ends a start that was requeued."""
ASK_AGAIN_SECONDS = 5.0
SCRATCH = "baton-job-"
"""Of a job's folder on its first node."""
UNPROGRESSED_STARTS = 2
"""Starts without a new step after which a job is not requeued again."""
_OWN_WORD = (PUBLISHED, REFUSED, STOPPED, STOPPED_BY_USER)
"""How a stage ends that nothing has disturbed, or that saved its state."""
_STOP_CODES = (STOPPED, -signal.SIGUSR2, -signal.SIGTERM, 128 + signal.SIGUSR2, 128 + signal.SIGTERM)
"""How a stage ends that was stopped: by itself, or, before it listened, by the signal."""


class Task(Config):
    """All that the launcher is told; plain text, so that nothing edited later changes a waiting job."""

    stage: str
    name: str
    """Of the stage, for messages."""
    step: int | None = None
    folder: str
    """From which the workflow runs, absolute."""
    registry: str
    """The stage's folder in the registry, absolute."""
    arguments: list[str]
    """Of the interpreter: ``-m workflow.stages ...``."""
    variables: dict[str, str]
    """Environment of the stage."""
    nodes: int
    """Of the job."""
    ranks_per_node: int
    """They fill the nodes in their order."""
    device: str
    """Device key that is computed on."""
    site_key: str
    """Where the site file describes it, for messages."""
    offered: DeviceSite
    manifest: str
    """What the stage publishes, relative to ``folder``."""
    attempts: str
    """The stage's record of starts, relative to ``folder``."""
    time_seconds: int
    """Walltime that was asked for."""
    warning_seconds: int
    """Before the end, when the stage must be told."""
    requeue: bool


def launch(text: str) -> None:
    """Run one start of a stage in this job; ends the process with the stage's exit code."""
    task = parse(Task, json.loads(text))
    sys.exit(_Start(task).run())


class _Start:
    """One start of a job."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._job = os.environ["SLURM_JOB_ID"]
        self._restart = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        self._node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        self._begun = time.time()
        self._warned = self._terminated = False
        self._tell_at: float | None = None
        """When to tell the stage to save; None: not planned."""
        self._told = False

    def run(self) -> int:
        """Run the stage, write the record of its end, requeue where that is due; returns the job's exit code."""
        task = self._task
        write_start(
            Path(task.registry),
            StartRecord(job=self._job, restart=self._restart, node=self._node, at=self._begun),
        )
        deadline = self._deadline()
        self._say(
            f"job {self._job}, restart {self._restart}, on {self._node}: {task.stage} {task.name}, "
            f"{max(deadline - time.time(), 0):.0f} s until the deadline"
        )
        self._tell_at = deadline - task.warning_seconds
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._receive)
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        try:
            scratch = PrivateFolder(SCRATCH, parent=os.path.expandvars(task.offered.scratch))
        except NoShortFolder as error:
            return self._end("refused", REFUSED, f"{task.site_key}.scratch={task.offered.scratch}: {error}")
        try:
            code, lost = self._run_stage(scratch)
        except (ConfigError, DevicesUnclear, NodesUnclear, NodesUnreachable) as error:
            return self._end("refused", REFUSED, str(error))
        finally:
            scratch.remove()
        return self._judge(code, lost)

    def _run_stage(self, scratch: PrivateFolder) -> tuple[int, str]:
        """Run the stage here and what joins it on further nodes; its exit code, and which node was lost, if that ended it.

        Raises:
            ConfigError, DevicesUnclear, NodesUnclear, NodesUnreachable: nothing was started.
        """
        task, parts = self._task, None
        variables = dict(task.variables)
        # Of this start: what a killed one left there is nobody's.
        folder = Path(task.registry, self._job, f"start{self._restart}")
        cpus = allocated(task.nodes)
        if task.nodes > 1:
            interface = task.offered.interface
            variables |= meeting_point([*cpus], task.ranks_per_node, task.device, interface, folder)
        scripts = {node: self._script(node, cpus[node], variables, scratch) for node in cpus}
        if task.nodes > 1:
            parts = NodeParts([*cpus], scripts.__getitem__, folder)
        try:
            code = self._wait(subprocess.Popen(["bash", "-c", scripts[self._node]], cwd=task.folder), parts)
            return code, "" if parts is None or code in _OWN_WORD else self._lost(parts)
        finally:
            if parts is not None:
                parts.end()

    def _judge(self, code: int, lost: str) -> int:
        """What the stage's end means."""
        task = self._task
        if code == PUBLISHED or Path(task.folder, task.manifest).exists():  # ended while it was leaving
            return self._end("published", PUBLISHED)
        if code == REFUSED:
            return self._end("refused", code)
        if code == STOPPED_BY_USER:
            return self._end("stopped by user", code)
        if code in _STOP_CODES and (self._told or self._terminated):
            return self._stopped(code)
        if lost:
            return self._end("node lost", code, lost)
        return self._end("stopped" if code == STOPPED else "error", code)

    def _script(self, node: str, cpus: int, variables: dict[str, str], scratch: PrivateFolder) -> str:
        """What runs on a node: the stage on this one, what joins it on the others."""
        task, offered = self._task, self._task.offered
        first = node == self._node
        if first:
            variables = variables | scratch.caches()
        if task.device != "cpu":
            devices = visible_devices(lambda: self._allocation, node, task.device, offered)
            variables = variables | device_variables(task.device, devices)
        how = {
            "folder": task.folder,
            "scratch": offered.scratch,
            "variables": variables,
            "device": task.device,
            "cpus": cpus,
            "cpu_bind": offered.cpu_bind,
            "key": f"{task.site_key}.environment",
        }
        if first:
            return enter(offered.environment, task.arguments, node=node, **how)
        return enter_on(node, offered.environment, ARGUMENTS, **how)

    @cached_property
    def _allocation(self) -> str:
        return query_allocation(self._job)

    def _wait(self, child: subprocess.Popen, parts: NodeParts | None) -> int:
        """The stage's exit code; until then, pass on what this process is told, when it is time."""
        passed_term, lost = False, None
        while True:
            if self._warned:
                self._warned = False
                self._tell_at = self._warning_time()
            if parts is not None:
                self._terminated |= parts.told_to_end()
                lost = lost or (time.monotonic() if parts.lost() else None)
                if lost and time.monotonic() > lost + LOST_SECONDS:
                    child.kill()
            if self._terminated and not passed_term:
                passed_term = True
                self._say("the job is ended: the stage is told to save its state")
                child.send_signal(signal.SIGTERM)
            elif not self._told and self._tell_at is not None and time.time() >= self._tell_at:
                self._told = True
                self._say("the end is near: the stage is told to save its state")
                child.send_signal(signal.SIGUSR2)
            try:
                return child.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue

    def _lost(self, parts: NodeParts) -> str:
        """Why a node is lost: the stage may have seen it before this process can."""
        deadline = time.monotonic() + LOST_SECONDS
        while not (reason := parts.lost()) and not parts.closed and time.monotonic() < deadline:
            time.sleep(0.2)
        return reason

    def _receive(self, number: int, frame: object) -> None:
        if number == signal.SIGTERM:
            self._terminated = True
        else:
            self._warned = True

    def _warning_time(self) -> float:
        """When the stage has to be told after SLURM's warning: now, unless SLURM is only early."""
        due, now = self._deadline() - self._task.warning_seconds, time.time()
        if now < due <= now + WARNED_EARLY:
            self._say(f"warned {due - now:.0f} s early; the stage goes on until then")
            return due
        return now

    def _deadline(self) -> float:
        """Seconds since the epoch at which SLURM will end this job: asked of it, since extensions and preemption move it."""
        try:
            text = slurm("squeue", "-h", "-j", self._job, "-o", "%e", timeout=20).strip()
            return datetime.datetime.fromisoformat(text).timestamp()
        except (SlurmUnavailable, SlurmRefused, SlurmLimit, ValueError):
            pass
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        return float(end) if end.isdigit() else self._begun + self._task.time_seconds

    def _stopped(self, code: int) -> int:
        """The stage has saved its state: requeue this job, unless it is at its end anyway or gets nowhere."""
        task = self._task
        state = self._state()
        if state not in ("RUNNING", None):
            return self._end("stopped", code, f"the job is {state}")
        if starts := unprogressed(Path(task.folder, task.attempts), task.step, self._job, self._restart):
            return self._end("no progress", code, f"no new step in {starts} starts of this job")
        if not task.requeue:
            return self._end("requeue refused", code, "the site does not requeue jobs")
        self._end("requeued", code)
        if refused := self._requeue():
            return self._end("requeue refused", code, refused)
        time.sleep(ENDED_SECONDS)  # SLURM ends this start
        return STOPPED

    def _requeue(self) -> str:
        """Ask SLURM to requeue this job, again while it does not answer; why it says no.

        A request without an answer may still be worked off, so the record says requeued, and what is said of a second one counts no more.
        """
        asked, deadline = 0, self._deadline() - LOST_SECONDS
        while True:
            asked += 1
            try:
                slurm("scontrol", "requeue", self._job)
                self._say("requeued")
                return ""
            except (SlurmRefused, SlurmLimit) as error:
                return str(error) if asked == 1 else ""
            except SlurmUnavailable as error:
                self._say(f"not requeued yet: {error}")
            if time.time() > deadline:
                return ""
            time.sleep(ASK_AGAIN_SECONDS)

    def _state(self) -> str | None:
        try:
            return (
                slurm("squeue", "--states=all", "-h", "-j", self._job, "-o", "%T", timeout=20).strip() or None
            )
        except (SlurmUnavailable, SlurmRefused, SlurmLimit):
            return None

    def _end(self, outcome: str, code: int, message: str = "") -> int:
        self._say(f"{outcome}, exit code {code}{': ' + message if message else ''}")
        write_end(
            Path(self._task.registry),
            EndRecord(
                job=self._job,
                restart=self._restart,
                outcome=outcome,
                code=code,
                node=self._node,
                terminated=self._terminated,
                message=message,
                at=time.time(),
            ),
        )
        return code if 0 <= code < 128 else OWN_ERROR

    def _say(self, text: str) -> None:
        clock = datetime.datetime.now().isoformat(timespec="seconds")
        print(f"{clock} baton launcher: {text}", flush=True)


def unprogressed(attempts: Path, segment: int | None, job: str, restart: int) -> int:
    """The last starts of ``job``, up to ``restart``, that brought no new step; 0 while there are fewer than two of them.

    A start's last step is in its own record; of a killed one it shows in where the next start began. A start without a record
    ended before its stage began. What was reached before a published result was withdrawn counts no more: it is computed anew.
    """
    recorded = _starts(attempts, segment)
    withdrawn = max((n for n, s in recorded.items() if s.get("end") == "withdrawn"), default=0)
    numbers = {s["restart"]: number for number, s in recorded.items() if s.get("job") == job}
    without = 0
    for count in range(restart, -1, -1):
        if (number := numbers.get(count)) is not None:
            following = recorded.get(number + 1, {})
            reached = recorded[number].get("last_step") or (following.get("first_step") or 1) - 1
            earlier = [s.get("last_step") or 0 for n, s in recorded.items() if withdrawn < n < number]
            before = max(earlier, default=0)
            if reached > before:
                break
        without += 1
    return without if without >= UNPROGRESSED_STARTS else 0


def _starts(attempts: Path, segment: int | None) -> dict[int, dict]:
    """A segment's starts by number; a line that a kill cut short is passed over."""
    starts: dict[int, dict] = {}
    for line in attempts.read_text(encoding="utf-8").splitlines() if attempts.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["segment"] == segment:
            starts.setdefault(entry["number"], {}).update(entry)
    return starts
