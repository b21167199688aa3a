"""Ends what a Ray driver leaves behind, however the driver ended. Runs as a process of its own, standard library only.

Ray's agents outlive a driver that was killed. They cannot be found by parent (they were orphaned), group or
environment (they overwrite it), but each of them writes its log below the driver's private folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.5
LONGEST_S = 20.0


def start(folder: Path) -> subprocess.Popen:
    """Watch this process, from a session of its own, so that a Ctrl-C meant for the driver passes it by."""
    command = [sys.executable, "-I", "-S", __file__, str(folder), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def stop(reaper: subprocess.Popen) -> None:
    """Let the reaper do its work now, and wait for it."""
    reaper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        reaper.wait(LONGEST_S + 5)


def main() -> None:
    """Wait until the driver closes the pipe or is gone; end its Ray; when it is gone, remove its folder too."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):  # meant for the driver
        signal.signal(number, signal.SIG_IGN)
    folder, driver = Path(sys.argv[1]), int(sys.argv[2])
    own_command = _read(driver, "cmdline")
    while os.getppid() == driver and not select.select([sys.stdin], [], [], POLL_S)[0]:
        pass
    deadline = time.monotonic() + LONGEST_S
    while (found := _users(folder, driver, own_command)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    if os.getppid() != driver:
        shutil.rmtree(folder, ignore_errors=True)


def _users(folder: Path, driver: int, own_command: bytes) -> list[int]:
    """Processes that have a file below ``folder`` open, but for the driver and its forks (they have its command line)."""
    prefixes = tuple(f"{folder / part}/" for part in ("ray", "logs"))
    users = []
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        if pid in (driver, os.getpid()) or _read(pid, "cmdline") == own_command:
            continue
        with contextlib.suppress(OSError):
            if any(str(entry.readlink()).startswith(prefixes) for entry in (process / "fd").iterdir()):
                users.append(pid)
    return users


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
