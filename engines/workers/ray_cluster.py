"""A private Ray on this machine: never joined by others, never joining another, gone with its driver.

Everything Ray writes lies below one folder of mode 700 with a short path, because a Unix socket's path may not exceed
107 bytes. The folder is locked while the driver lives, so the next start removes what is left of dead ones (such as the
logs that an error pointed to); a reaper ends the processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._raylet import AuthenticationTokenLoader, Config

from engines.workers import reaper

PREFIX = "baton-ray-"
LONGEST_SOCKET_PATH = 107
_SESSION_PART = len("/ray/session_2026-01-31_23-59-59_999999_9999999/sockets/plasma_store")
OBJECT_STORE_BYTES = 256 * 1024 * 1024
"""Batches pass through it; weights do not."""


class RayStartError(RuntimeError):
    """The private Ray could not be started."""


class RayCluster:
    """One Ray instance of this process, shared by the process's worker groups.

    Raises:
        RayStartError: this process already uses Ray, or no folder with a short enough path can be made.
    """

    def __init__(self) -> None:
        if ray.is_initialized():
            raise RayStartError(
                "this process is connected to a Ray cluster already; worker groups start their own"
            )
        self.folder, self._lock = _private_folder()
        self._groups = 0
        self._keep_logs = False
        settings = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ranks choose their accelerator by LOCAL_RANK; Ray would hide all of them from actors that reserve none.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        self._environment = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        _reread_authentication()
        (self.folder / "logs").mkdir()
        self._reaper = reaper.start(self.folder)
        try:
            with _own_sigterm_handler():
                ray.init(
                    address="local",  # a new instance, whatever RAY_ADDRESS says
                    num_cpus=usable_cpus(),
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="error",
                    _temp_dir=str(self.folder / "ray"),
                )
        except BaseException:
            self._close()
            raise

    def log_file(self, group: int, rank: int) -> Path:
        """Where a rank's output goes."""
        return self.folder / "logs" / f"group{group}-rank{rank:05d}.log"

    def join(self) -> int:
        """Register a group; its number."""
        self._groups += 1
        return self._groups - 1

    def leave(self, keep_logs: bool) -> None:
        """Unregister a group; the last one stops Ray and removes the folder (but for logs that an error points to)."""
        self._groups -= 1
        self._keep_logs |= keep_logs
        if self._groups == 0:
            self._close()

    def _close(self) -> None:
        with _own_sigterm_handler():
            ray.shutdown()
        reaper.stop(self._reaper)
        shutil.rmtree(self.folder / "ray", ignore_errors=True)
        if not self._keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _reread_authentication() -> None:
    """Ray reads the mode and the token once, when it is imported, which may have been long ago; it has no public way."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def usable_cpus() -> int:
    """CPUs that this process may use: of its SLURM task, or of its affinity mask, never simply the node's."""
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    return int(cpus) if cpus else len(os.sched_getaffinity(0))


def _private_folder() -> tuple[Path, int]:
    """A new folder with a short path, and the descriptor of its lock."""
    for parent in dict.fromkeys([tempfile.gettempdir(), "/tmp"]):
        longest = len(parent) + 1 + len(PREFIX) + 8 + _SESSION_PART
        if longest <= LONGEST_SOCKET_PATH and os.access(parent, os.W_OK):
            _remove_leftovers(Path(parent))
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            lock = os.open(folder / "new-lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new-lock").rename(folder / "lock")  # from here on others see it, and see it locked
            return folder, lock
    room = LONGEST_SOCKET_PATH - _SESSION_PART - len(PREFIX) - 9
    raise RayStartError(
        f"TMPDIR={tempfile.gettempdir()} is too long for Ray's sockets, and /tmp cannot be written: "
        f"set TMPDIR to a folder whose path has at most {room} bytes"
    )


def _remove_leftovers(parent: Path) -> None:
    """Remove this user's folders whose driver is gone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / "lock", os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Ray installs a SIGTERM handler that drains the node; the process keeps its own, or exits through ``finally``."""
    try:
        before = signal.getsignal(signal.SIGTERM)
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread: there was no handler to replace
            default = before in (signal.SIG_DFL, None)
            signal.signal(signal.SIGTERM, _exit_on_signal if default else before)


def _exit_on_signal(signum: int, _: object) -> None:
    sys.exit(128 + signum)
