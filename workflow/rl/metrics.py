"""The metrics file of a training stage: one JSON line per step, and no step twice, whatever was killed in between."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METRICS_FILE, SFT_CURVE_FILE = "metrics.jsonl", "loss.jsonl"
"""Names of such files in the folders of the stages train and sft."""


class MetricsLog:
    """Appends to ``path``, after cutting what lies beyond ``resumed_step``: those steps will be done again."""

    def __init__(self, path: Path, resumed_step: int):
        self._path = path
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_step]
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.rename(path)

    def append(self, metrics: dict[str, Any]) -> None:
        """Add one step's line."""
        with self._path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines; the last one may be cut off where a process was killed."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


class Stopwatch:
    """Seconds spent in named parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name``."""
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def total(self) -> float:
        """Seconds since the stopwatch was made."""
        return time.perf_counter() - self._started
