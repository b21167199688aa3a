"""Forked processes."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from tests.support.processes import fork


class _Finalised:
    """Garbage that only the collector finds, and that says where it was destroyed."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.itself = self

    def __del__(self) -> None:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_garbage_is_destroyed_where_it_was_made(tmp_path):
    log = tmp_path / "log"
    gc.disable()
    try:
        _Finalised(log)
        process = fork(gc.collect)
    finally:
        gc.enable()
    process.join()
    gc.collect()
    assert log.read_text().split() == [str(os.getpid())]
