"""Processes below this one: forked ones, and those that the kernel lists."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


def children(root: int | None = None) -> list[tuple[int, str]]:
    """Process ids of all descendants, with their start times, so that a reused id is not mistaken for one."""
    parents, found = {}, []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = (int(fields[1]), fields[19])
    wanted = {root or os.getpid()}
    while new := {pid for pid, (parent, _) in parents.items() if parent in wanted} - wanted:
        wanted |= new
        found += [(pid, parents[pid][1]) for pid in new]
    return found


def ray_ranks(root: int) -> list[int]:
    """Process ids of the ranks of a worker group on Ray below process ``root``."""
    found = []
    for pid, _ in children(root):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if title.startswith("ray::RankActor"):
            found.append(pid)
    return found


def wait_until_gone(processes: Iterable[tuple[int, str]], timeout: float = 30) -> set[tuple[int, str]]:
    """Those of ``processes`` that still run after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while (alive := {p for p in processes if _is_running(*p)}) and time.monotonic() < deadline:
        time.sleep(0.2)
    return alive


def _is_running(pid: int, start_time: str) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return False
    return fields[19] == start_time and fields[0] != "Z"


def fork(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A started daemon process that runs ``target(*args)`` and shares what this one has imported.

    What is garbage here stays untouched there: destroying a process group that threads of this process serve would end
    the new process, which has no such threads.
    """
    process = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    gc.collect()
    gc.freeze()
    try:
        process.start()
    finally:
        gc.unfreeze()
    return process
