"""A campaign in a folder of its own, on a disk of its own where that can be had, and the heads that run it."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from workflow.campaign.code import source_root
from workflow.campaign.lock import is_lock
from workflow.campaign.plan import CURRENT, Plan, read_plan
from workflow.drill.processes import Process, drivers, end_all, process_of

SPARE_BYTES = 512 * 1024 * 1024
"""On the filesystem that can be filled, besides what the campaign is expected to need."""
MEMORY_SHARE = 1 / 2
"""Of the memory that is free, how much that filesystem may take when it is full; the stages need the rest."""
LEFT_BYTES = 8 * 1024
"""On it when it is full: enough for a line of a log, not for a state."""
NICENESS = os.getpriority(os.PRIO_PROCESS, 0)
"""Of this process, as it was started."""
FILLS = 3
"""Goes at it, while others write."""
QUIET = 300.0
"""Seconds after which a campaign that writes nothing is taken to hang, however busy the machine is."""


class DrillError(RuntimeError):
    """The drill cannot be made: the campaign does not end even when it is left alone, or what is needed is missing."""


@dataclass
class Campaign:
    """One folder in which ``snakemake`` runs a campaign, again and again until it is complete."""

    folder: Path
    words: list[str]
    """Of the command line, after ``--config``."""
    profile: str = "profiles/local"
    environment: dict[str, str] = field(default_factory=dict)
    """On top of this process's own."""
    disk: bool = True
    """Whether a disk of its own would be seen by all that runs the campaign: not on nodes elsewhere."""
    head: subprocess.Popen | None = None
    starts: int = 0
    """How often the command was run."""
    damaged: set[Path] = field(default_factory=set)
    """Folders of the training states that faults have damaged: their results may be computed again, and no others."""

    def start(self) -> None:
        """Run the command, which goes on where the last one ended."""
        self.starts += 1
        paths = os.pathsep.join([str(source_root()), str(Path.cwd())])
        variables = os.environ | {"PYTHONPATH": paths} | self.environment
        with self.output.open("a", encoding="utf-8") as out:
            out.write(f"== start {self.starts}\n")
            out.flush()
            self.head = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                env=variables,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_unhurried,
            )

    def command(self) -> list[str]:
        """What is run: the workflow as people start it."""
        root = source_root()
        workflow = ["--snakefile", str(root / "Snakefile"), "--profile", str(root / self.profile)]
        return [sys.executable, "-m", "snakemake", *workflow, "--quiet", "rules", "--config", *self.words]

    @property
    def output(self) -> Path:
        """What the heads said. Beside the folder: its disk may be full."""
        return self.folder.with_name(f"{self.folder.name}.txt")

    @property
    def running(self) -> bool:
        """Whether a head runs."""
        return self.head is not None and self.head.poll() is None

    @property
    def head_process(self) -> Process | None:
        """The running head."""
        return process_of(self.head.pid) if self.running else None

    def wait(self) -> int:
        """The head's exit code, once it has ended.

        Raises:
            DrillError: the campaign hangs.
        """
        pulse = Pulse(self)
        while self.running:
            pulse.check()
            time.sleep(0.2)
        return self.head.returncode

    def until(self, condition: Callable[[], object]) -> bool:
        """Wait for ``condition``; False when the campaign hangs before it is true."""
        pulse = Pulse(self)
        while not condition():
            if not pulse.beats():
                return False
            time.sleep(0.2)
        return True

    def signs(self) -> tuple[int, int, int]:
        """What changes whenever a head or a stage writes something. A lock is touched by its holder, at work or not."""
        count = newest = 0
        for folder, _, names in os.walk(self.folder / "results"):
            for name in names:
                if not is_lock(name):
                    count += 1
                    with contextlib.suppress(FileNotFoundError):
                        newest = max(newest, Path(folder, name).stat().st_mtime_ns)
        return count, newest, self.output.stat().st_size if self.output.exists() else 0

    def plan(self) -> Plan:
        """The campaign's plan."""
        (link,) = self.folder.glob(f"results/*/{CURRENT}")
        return read_plan(link.resolve())

    def further_problems(self, plan: Plan) -> Iterator[str]:
        """What only the place where it runs can tell once it is complete, such as jobs that nobody needed."""
        yield from ()

    def room(self) -> int:
        """Bytes of disk with which the campaign is never refused, however often it is begun again.

        A head that plans wants all of what unpublished stages are expected to write, though some of it may be there already.
        """
        return 2 * sum(spec.forecast_bytes for spec in self.plan().stages.values())

    def stop(self) -> None:
        """End every process that works here: the drill is over, or was interrupted."""
        end_all(self.folder)
        if self.head is not None:
            self.head.wait()


class Pulse:
    """Whether a campaign still moves, by what it writes; a time limit would be wrong on a busy machine.

    Args:
        quiet: seconds without a sign after which it hangs.
    """

    def __init__(self, campaign: Campaign, quiet: float = QUIET) -> None:
        self._campaign, self._quiet = campaign, quiet
        self._changed = self._looked = time.monotonic()
        self._signs = campaign.signs()

    def beats(self) -> bool:
        """False once it hangs."""
        now = time.monotonic()
        if now - self._looked > min(2.0, self._quiet / 4):
            self._looked = now
            if (signs := self._campaign.signs()) != self._signs:
                self._signs, self._changed = signs, now
        return now - self._changed < self._quiet

    def check(self) -> None:
        """Nothing, unless it hangs.

        Raises:
            DrillError: it does.
        """
        if not self.beats():
            seconds = time.monotonic() - self._changed
            raise DrillError(
                f"{self._campaign.folder}: it hangs: nothing was written for {seconds:.0f} s; see {self._campaign.output}"
            )


def _unhurried() -> None:
    """The campaign is no more urgent than what started the drill, though the drill itself may be."""
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)


@contextlib.contextmanager
def own_disk(campaign: Campaign, room: int = 0) -> Iterator[str]:
    """Make the folder, on a filesystem of its own where that may be; yields how a disk is filled: ``tmpfs`` or ``limit``.

    What is in it at the end is kept, on the disk below.

    Args:
        campaign: what works in it.
        room: bytes that it has to hold; where memory cannot, there is no filesystem.
    """
    folder = campaign.folder
    folder.mkdir(parents=True)
    size = room + SPARE_BYTES
    mount = ("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    fits = size <= MEMORY_SHARE * free_memory()
    mounted = campaign.disk and fits and os.geteuid() == 0 and _run(*mount)
    try:
        yield "tmpfs" if mounted else "limit"
    finally:
        if mounted:
            kept = folder.with_name(f".{folder.name}.kept")
            try:
                shutil.copytree(folder, kept, symlinks=True)
            finally:
                _run("umount", "--lazy", str(folder))
                folder.rmdir()
                kept.rename(folder)


def empty(folder: Path) -> None:
    """Remove all that is in it."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def check_room(folder: Path, room: int) -> None:
    """Nothing, where the disk has room for another campaign beside the one that was left alone.

    Raises:
        DrillError: with both numbers; the campaign would be refused, which is no difference.
    """
    if (free := shutil.disk_usage(folder).free) < room:
        raise DrillError(
            f"{folder}: another such campaign may need {room / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "free some disk, name an --output elsewhere, or keep fewer states (checkpoint.retain)"
        )


def free_memory() -> int:
    """Bytes of memory that can be had: what is free on this machine, and no more than its container may have."""
    told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free = int(told["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no such limit
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return free


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def full_disk(campaign: Campaign, how: str) -> Iterator[None]:
    """Within it, next to nothing more can be written in the campaign's folder."""
    if how == "limit":
        for driver in drivers(campaign.folder):
            for process in [driver.process, *driver.below("ray::RankActor")]:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (LEFT_BYTES, LEFT_BYTES))
        yield  # the limit goes with the processes that have it
        return
    ballast = campaign.folder / ".ballast"
    try:
        with ballast.open("wb") as file:
            for _ in range(FILLS):
                more = shutil.disk_usage(campaign.folder).free - LEFT_BYTES
                if more > 0:
                    with contextlib.suppress(OSError):  # somebody was faster: there is less now
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, more)
        yield
    finally:
        ballast.unlink()


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether ``condition`` came true within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
