"""Blocks of work over forked processes."""

import functools
import multiprocessing
import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from engines.model_folder import ModelFolderError
from tests.support.processes import children, wait_until_gone
from workflow.stages.share import share


def number() -> list[int]:
    """What a process prepares: it remembers its blocks."""
    return []


def square(seen: list[int], block: int) -> tuple[int, int, int]:
    seen.append(block)
    return block**2, os.getpid(), len(seen)


def test_results_come_in_order_and_each_process_prepares_once() -> None:
    told = []
    results, _ = share(2, number, square, range(7), told.append)
    assert [value for value, _, _ in results] == [block**2 for block in range(7)]
    assert sorted(told) == list(range(7))
    processes = {pid for _, pid, _ in results}
    assert len(processes) <= 2
    assert os.getpid() not in processes
    assert sum(max(n for _, other, n in results if other == pid) for pid in processes) == 7


def touch(_: list[int], block: int) -> int:
    return len(bytearray(block))


def test_the_most_memory_is_told() -> None:
    _, peak = share(1, number, touch, [1_000, 64_000_000, 1_000])
    assert 60_000_000 <= peak < 80_000_000


def fail(_: list[int], block: int) -> int:
    if block == 1:
        raise ModelFolderError("block 1 is bad")
    return block


def die(_: list[int], block: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return block


def test_an_error_keeps_its_type_and_a_death_is_one() -> None:
    with pytest.raises(ModelFolderError, match="block 1 is bad"):
        share(2, number, fail, range(4))
    with pytest.raises(BrokenProcessPool):
        share(2, number, die, range(4))


def sleep(folder: Path, block: int) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(60)


def test_processes_end_with_the_one_that_shares(tmp_path: Path) -> None:
    arguments = (2, functools.partial(Path, tmp_path), sleep, range(2))
    parent = multiprocessing.get_context("fork").Process(target=share, args=arguments)
    parent.start()
    while len(list(tmp_path.iterdir())) < 2 and parent.is_alive():
        time.sleep(0.05)
    below = children(parent.pid)
    assert len(below) == 2
    parent.kill()
    parent.join()
    assert not wait_until_gone(below)
