"""Nothing of a drill outlives it, whatever ends it: a process beside it waits for its end, and ends what it left.

A drill that is killed has no time to end its heads, which have sessions of their own, nor to unmount the small filesystems. The
keeper holds the other end of a pipe, which the kernel closes with the drill. ``python -m workflow.drill.keeper FOLDER``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from workflow.campaign.code import source_root
from workflow.drill.processes import end_all

ENOUGH = 60.0
"""Seconds in which a keeper is done."""


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Within it, and when this process dies within it, a keeper waits to end all that works in ``folder``."""
    keeper = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)],
        stdin=subprocess.PIPE,
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(source_root())},
        start_new_session=True,  # what interrupts the drill does not reach it
    )
    try:
        yield
    finally:
        keeper.stdin.close()
        keeper.wait(ENOUGH)


def tidy(folder: Path) -> None:
    """End every process that works in ``folder``, and unmount what is mounted there."""
    end_all(folder)
    for mount in mounts_in(folder):
        subprocess.run(("umount", "--lazy", str(mount)), check=False)


def mounts_in(folder: Path) -> list[Path]:
    """Where something is mounted below ``folder``, the innermost first."""
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    paths = [Path(_unescaped(line.split(" ")[1])) for line in lines]
    return sorted((path for path in paths if path != folder and path.is_relative_to(folder)), reverse=True)


def _unescaped(name: str) -> str:
    """The kernel writes blanks as ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)


def main() -> None:
    """Wait for the end of whoever holds the other end of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    tidy(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
