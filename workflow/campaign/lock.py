"""Locks that name their holder, are taken over from the dead, and never from the living. Loads no framework."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

STAGE_LOCK = "lock.json"
"""In a stage's folder, held by the start that works on it."""
HEAD_LOCK = ".head.json"
"""In the results folder, held by the head that is running."""
RELEASE_LOCK = "release.json"
"""In a training's folder, held by whoever gives up states."""
HEARTBEAT_SECONDS = 20.0
STALE_SECONDS = 180.0
"""A holder on another host that has not touched its lock for so long is taken for dead, unless SLURM says that its job goes on."""


class LockHeld(RuntimeError):
    """Somebody alive holds the lock; the message names it."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    host: str
    pid: int
    started: str
    """Start time of the process, so that a later process of the same number is not mistaken for it."""
    job: str | None = None
    """SLURM's id of the job it runs in."""
    restart: int = 0
    """How often that job was requeued before."""

    def __str__(self) -> str:
        job = f" (SLURM job {self.job}, restart {self.restart})" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


class FolderLock:
    """At most one living process holds the lock of a folder. Use as a context manager, or ``acquire`` and ``release``.

    A requeued job takes its own lock back; another job's is taken when SLURM says that it has ended, and not before, however long its
    heart has not been seen to beat: it may be stopped, or cut off from the file system. SLURM may be wrong about a node that it lost: whoever
    still works there finds at the next heartbeat that the lock is another's, and must stop.

    Args:
        folder: what is locked.
        name: of the lock's file.
        job_is_final: asks SLURM whether a job has ended; None when it cannot tell. Without an answer the heartbeat counts.
        on_lost: called from the heartbeat's thread when somebody else has taken the lock.
    """

    def __init__(
        self,
        folder: Path,
        name: str = STAGE_LOCK,
        job_is_final: Callable[[str], bool | None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.path = Path(folder) / name
        self._job_is_final = job_is_final
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._mine = False

    def acquire(self) -> None:
        """Take the lock, or take it over from a holder that died.

        Raises:
            LockHeld: naming the living holder.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._exclusive():
            if holder := self.living_holder():
                raise LockHeld(f"{self.path.parent} is in use by {holder}")
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            temporary.write_text(json.dumps(asdict(_myself())), encoding="utf-8")
            temporary.rename(self.path)
            self._mine = True
        threading.Thread(target=self._beat, daemon=True, name="lock heartbeat").start()

    def wait(self, seconds: float = 1.0) -> Iterator[Holder]:
        """Try to acquire again and again; yields the living holder after each attempt that failed."""
        while True:
            try:
                return self.acquire()
            except LockHeld:
                holder = self.holder()
                if holder is not None:
                    yield holder
                time.sleep(seconds)

    def holder(self) -> Holder | None:
        """Who is written in the lock, alive or not."""
        try:
            return Holder(**json.loads(self.path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def living_holder(self) -> Holder | None:
        """Who holds the lock and is not known to be dead."""
        holder = self.holder()
        return holder if holder is not None and self._alive(holder) else None

    @property
    def lost(self) -> bool:
        """Whether somebody else has taken the lock from us."""
        return self._mine and self.holder() not in (None, _myself())

    @property
    def held(self) -> bool:
        """Whether this process may write into the folder: it has taken the lock, has not given it back, and nobody else has it."""
        return self._mine and not self.lost

    def release(self) -> None:
        """Give the lock back; nothing happens when it is not ours."""
        self._stop.set()
        if self._mine and self.holder() == _myself():
            self.path.unlink(missing_ok=True)
        self._mine = False

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Between looking and taking, nobody else may look. The kernel frees this one when its owner dies."""
        with self.path.with_name(f".{self.path.name}.guard").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _alive(self, holder: Holder) -> bool:
        myself = _myself()
        if holder.job is not None and holder.job == myself.job and holder.restart < myself.restart:
            return False  # SLURM ends one start of a job before it begins the next
        if holder.host == myself.host:
            return holder.pid != os.getpid() and process_start(holder.pid) == holder.started
        if holder.job not in (None, myself.job) and self._job_is_final is not None:
            final = self._job_is_final(holder.job)
            if final is not None:
                return not final
        return time.time() - self.path.stat().st_mtime < STALE_SECONDS

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            if self.lost:
                if self._on_lost is not None:
                    self._on_lost()
                return
            try:
                os.utime(self.path)
            except FileNotFoundError:
                return


def is_lock(name: str) -> bool:
    """Whether a file of this name is a lock, or made in taking one: its holder touches it, at work or not."""
    return any(lock in name for lock in (STAGE_LOCK, HEAD_LOCK, RELEASE_LOCK))


def process_start(pid: int) -> str | None:
    """Boot and clock tick at which a local process started; None when there is no such process, or only its zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = status.rpartition(")")[2].split()  # after the command's name, which may hold blanks
    return None if fields[0] in "ZX" else f"{boot[:8]}:{fields[19]}"


def _myself() -> Holder:
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=process_start(os.getpid()) or "",
        job=os.environ.get("SLURM_JOB_ID"),
        restart=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
    )
