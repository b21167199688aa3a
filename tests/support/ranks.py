"""Real ranks for tests: forked processes that meet in a file, so torch is imported once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DTensor imports it on first use, for seconds: better once, before forking
import torch.distributed as dist

from engines.training.process_group import init_process_group
from tests.support.processes import fork

torch.set_num_threads(1)  # here too: a pool of threads does not survive a fork


class RankFailed(AssertionError):
    """A rank raised or died; the message holds its traceback. ``errors`` maps ranks to (exception name, message)."""

    def __init__(self, message: str, errors: dict[int, tuple[str, str]]) -> None:
        super().__init__(message)
        self.errors = errors


class RanksStuck(AssertionError):
    """The ranks did not finish in time; they were killed."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60, device: str = "cpu"
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` fresh processes of one group; returns their results by rank.

    On accelerators each rank has its own; this process must not have used them.

    Raises:
        RankFailed: a rank raised (the first traceback is in the message) or died.
        RanksStuck: no end after ``timeout`` seconds, e.g. a deadlock.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], []
        for rank in range(world_size):
            receive, send = multiprocessing.Pipe(duplex=False)
            arguments = (rank, world_size, Path(folder) / "store", timeout, device, send, function, args)
            ranks.append(fork(_rank, *arguments))
            send.close()
            pipes.append(receive)
        try:
            return _collect(ranks, pipes, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank(
    rank: int,
    world_size: int,
    store: Path,
    timeout: float,
    device: str,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    init_process_group(device, rank, world_size, dist.FileStore(str(store), world_size), timeout)
    try:
        answer = ("result", function(*args))
    except BaseException as error:  # reported to the parent, whatever it is
        answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
    # Plain pickle: torch's own reducer would share tensors through files that die with this process.
    pipe.send_bytes(pickle.dumps(answer))
    if answer[0] == "result":
        time.sleep(
            timeout
        )  # until the parent ends it: its end would break what a slower rank still has to receive


def _collect(ranks: list[Any], pipes: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    answers: dict[int, Any] = {}
    failed_at = None
    while len(answers) < len(ranks):
        # After one failure the others get a moment to fail too, then they count as stuck in a collective.
        end = deadline if failed_at is None else min(deadline, failed_at + 5)
        ready = wait(
            [pipes[rank] for rank in range(len(ranks)) if rank not in answers], max(0, end - time.monotonic())
        )
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                answers[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ranks[rank].join()
                answers[rank] = ("error", ("Died", f"exit code {ranks[rank].exitcode}", "(no traceback)"))
            if answers[rank][0] == "error" and failed_at is None:
                failed_at = time.monotonic()
    errors = {rank: value for rank, (kind, value) in answers.items() if kind == "error"}
    if errors:
        first = next(iter(errors))  # in time: the others may have failed because of it
        stuck = (
            f"; ranks without an answer: {stuck}"
            if (stuck := sorted(set(range(len(ranks))) - answers.keys()))
            else ""
        )
        raise RankFailed(
            f"rank {first} of {len(ranks)} failed{stuck}\n{errors[first][1]}\n{errors[first][2]}",
            {rank: value[:2] for rank, value in errors.items()},
        )
    if len(answers) < len(ranks):
        raise RanksStuck(
            f"ranks {sorted(set(range(len(ranks))) - answers.keys())} not finished after {timeout} s"
        )
    return [answers[rank][1] for rank in range(len(ranks))]
