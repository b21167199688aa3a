"""Stages as jobs: a process each, forked so that none imports torch again."""

from __future__ import annotations

import os
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch._dynamo

from tests.support.processes import fork
from workflow.stages.runner import PUBLISHED, run

ROOT = Path(__file__).parents[2]


def start(folder: Path, plan: Path, stage: str, key: str, step: int | None = None) -> BaseProcess:
    """A job of the workflow that runs in ``folder``."""

    def job() -> None:
        torch.set_num_threads(1)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(ROOT)  # of the processes that Ray starts
        os._exit(run(stage, plan, key, step))

    return fork(job)


def finish(
    folder: Path, plan: Path, stage: str, key: str, step: int | None = None, expected: int = PUBLISHED
) -> None:
    """A job from start to end, which must be ``expected``."""
    process = start(folder, plan, stage, key, step)
    process.join()
    assert process.exitcode == expected
