"""Work that falls into independent blocks, shared by forked processes that import nothing anew.

The processes are fresh: what this one has imported is there, what it computes stays untouched. Each keeps what it prepared for its
first block, and reports the most memory that it took above that.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

Prepared = TypeVar("Prepared")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 25
_prepared: Any = None


def share(
    ranks: int,
    prepare: Callable[[], Prepared],
    work: Callable[[Prepared, int], Result],
    blocks: Sequence[int],
    done: Callable[[int], None] = lambda block: None,
) -> tuple[list[Result], int]:
    """Call ``work(prepare(), block)`` for every block on ``ranks`` processes.

    Args:
        prepare: called once in each process; picklable, like ``work``.
        done: told in this process when a block is done.

    Returns:
        The results in the order of ``blocks``, and the most bytes that a process took above what it had prepared.

    Raises:
        Exception: the first that ``prepare`` or ``work`` raised; what was not begun is not begun any more.
        BrokenProcessPool: a process died.
    """
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(ranks, len(blocks)), context, _enter) as pool:
        futures = {pool.submit(_call, prepare, work, block): block for block in blocks}
        try:
            for future in as_completed(futures):
                future.result()
                done(futures[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    results = [future.result() for future in futures]
    return [result for result, _ in results], max((peak for _, peak in results), default=0)


def _enter() -> None:
    """In the new process: end with the parent, and leave signals to it.

    Memory of one block serves the next: to take it from the system anew costs as much as what is done with it.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        libc.mallopt(setting, _KEPT_BYTES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _call(
    prepare: Callable[[], Prepared], work: Callable[[Prepared, int], Result], block: int
) -> tuple[Result, int]:
    global _prepared
    if _prepared is None:
        _prepared = (prepare(), _reset_peak())
    prepared, base = _prepared
    return work(prepared, block), _status("VmHWM") - base


def _reset_peak() -> int:
    """Forget the process's highest use of memory; returns its present one, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{os.getpid()}/status has no {field}")
