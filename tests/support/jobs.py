"""Stages as jobs: a process each, none of which imports torch again."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.process import BaseProcess
from pathlib import Path

from workflow.stages.runner import PUBLISHED, run

ROOT = Path(__file__).parents[2]
# Forked from a server that has imported much and done nothing: a copy of this process would inherit Ray's core, which
# another test may have started and which waits for ever for threads that the copy does not have.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "workflow.stages.train", "tests.support.jobs"])


def start(folder: Path, plan: Path, stage: str, key: str, step: int | None = None) -> BaseProcess:
    """A job of the workflow that runs in ``folder``."""
    process = CONTEXT.Process(target=_job, args=(folder, plan, stage, key, step))
    process.start()
    return process


def finish(
    folder: Path, plan: Path, stage: str, key: str, step: int | None = None, expected: int = PUBLISHED
) -> None:
    """A job from start to end, which must be ``expected``."""
    process = start(folder, plan, stage, key, step)
    process.join()
    assert process.exitcode == expected


def _job(folder: Path, plan: Path, stage: str, key: str, step: int | None) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(ROOT)  # of the processes that Ray starts
    os._exit(run(stage, plan, key, step))
