"""The helper that runs real ranks says what went wrong on them, and never waits for ever."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailed, RanksStuck, run_ranks


def _add_up() -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def test_results_come_by_rank() -> None:
    assert run_ranks(3, _add_up) == [(0, 3.0), (1, 3.0), (2, 3.0)]


def _fail_on_the_second() -> None:
    if dist.get_rank() == 1:
        raise ValueError("number 42")
    dist.barrier()


def test_a_failure_brings_its_traceback_and_does_not_wait_for_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match="number 42") as caught:
        run_ranks(2, _fail_on_the_second, timeout=60)
    assert "_fail_on_the_second" in str(caught.value)
    assert caught.value.errors[1] == ("ValueError", "number 42")
    assert time.monotonic() - started < 30


def _die() -> None:
    os._exit(9)


def test_a_death_is_a_failure() -> None:
    with pytest.raises(RankFailed, match="exit code 9"):
        run_ranks(1, _die)


def _wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.barrier()


def test_a_deadlock_ends_in_seconds() -> None:
    with pytest.raises(RanksStuck, match=r"ranks \[0, 1\] not finished after 2 s"):
        run_ranks(2, _wait_for_nobody, timeout=2)
