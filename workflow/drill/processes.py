"""The processes of a running campaign, told apart from outside: by the kernel's lists and the locks they hold. Linux only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from workflow.campaign.lock import Holder, process_start


@dataclass(frozen=True)
class Process:
    """One process, for ever: a later one of the same number is another."""

    pid: int
    started: str
    command: str

    @property
    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return process_start(self.pid) == self.started

    @property
    def program(self) -> str:
        """Name of the file that runs."""
        return self.command.split(" ", 1)[0].rpartition("/")[2]

    def __str__(self) -> str:
        return f"process {self.pid}"


@dataclass(frozen=True)
class Driver:
    """The process that works on a stage: the holder of its folder's lock."""

    process: Process
    folder: Path
    """The stage's."""

    @property
    def stage(self) -> str:
        """Such as train."""
        return self.folder.parent.name

    def below(self, *commands: str) -> list[Process]:
        """Its descendants whose command lines begin with, or whose programs are, one of these."""
        found = [process_of(pid) for pid in descendants(self.process.pid)]
        return [
            p for p in found if p is not None and (p.program in commands or p.command.startswith(commands))
        ]

    def __str__(self) -> str:
        return f"{self.stage} {self.folder.name}"


def process_of(pid: int) -> Process | None:
    """The living process of this number."""
    started = process_start(pid)
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return None if started is None else Process(pid, started, command.strip())


def parent(pid: int) -> int | None:
    """Process id of its parent; None when it is gone."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(status.rpartition(") ")[2].split()[1])


def descendants(root: int, generations: int | None = None) -> list[int]:
    """Process ids of all children of ``root``, their children, and so on; of so many ``generations`` only, if given."""
    parents = {pid: parent(pid) for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*"))}
    wanted, found, age = {root}, [], 0
    while age != generations and (new := {pid for pid, above in parents.items() if above in wanted} - wanted):
        wanted |= new
        found += sorted(new)
        age += 1
    return found


def drivers(folder: Path) -> list[Driver]:
    """Who works on the stages of the campaign in ``folder`` on this machine, heads dead or alive.

    By number and start (which names the boot), not by host: nodes of a test cluster have names of their own.
    """
    found = [_driver(lock) for lock in sorted(folder.glob("results/store/*/*/lock.json"))]
    return [driver for driver in found if driver is not None]


def _driver(lock: Path) -> Driver | None:
    try:
        holder = Holder(**json.loads(lock.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    process = process_of(holder.pid)
    return Driver(process, lock.parent) if process is not None and process.started == holder.started else None


@contextlib.contextmanager
def halted(stage: Path | None) -> Iterator[None]:
    """Within it the driver of a stage stands still (SIGSTOP): a save is over sooner than a victim is chosen."""
    driver = _driver(stage / "lock.json") if stage is not None else None
    if driver is None:
        yield
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(driver.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if driver.process.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(driver.process.pid, signal.SIGCONT)


def working_in(folder: Path, this_one: bool = False) -> list[Process]:
    """All processes whose current folder is ``folder`` or below, but for those of people at a terminal, and this one if not wanted."""
    inside = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        pid = int(link.parent.name)
        try:
            current = link.readlink()
        except OSError:
            continue
        if not current.is_relative_to(folder) or _has_terminal(pid) or (pid == os.getpid() and not this_one):
            continue
        if process := process_of(pid):
            inside.append(process)
    return inside


def end_all(folder: Path, seconds: float = 10.0) -> list[Process]:
    """SIGKILL for every process that works in ``folder`` or on a stage of a campaign there; returns those that live on."""
    end = time.monotonic() + seconds
    while (left := _at_work(folder)) and time.monotonic() < end:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        wait_gone(left, 1)  # then again: one of them may just have started another
    return left


def _at_work(folder: Path) -> list[Process]:
    campaigns = [folder, *(path.parent for path in folder.glob("*/results"))]
    return [driver.process for campaign in campaigns for driver in drivers(campaign)] + working_in(folder)


def _has_terminal(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(") ")[2].split()[4] != "0"


def wait_gone(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Those that are still alive after ``seconds``."""
    end = time.monotonic() + seconds
    while (alive := [process for process in processes if process.alive]) and time.monotonic() < end:
        time.sleep(0.02)
    return alive
