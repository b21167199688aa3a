"""The metrics file of a training stage: one JSON line per step, and no step twice, whatever was killed in between."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workflow.manifest import write_text

METRICS_FILE, SFT_CURVE_FILE = "metrics.jsonl", "loss.jsonl"
"""Names of such files in the folders of the stages train and sft."""

TIMING = ("seconds", "tokens_per_second")
"""What no two computations of one step have in common: metrics whose names hold one of these."""


class MetricsLog:
    """The lines at ``path``, in the order of the steps. A step that is done again replaces its line; nothing else ever goes.

    So what a killed start wrote after its last state is replaced step by step, and a segment that is computed anew takes
    away nothing of the segments after it.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lines = {json.loads(line)["step"]: line for line in _complete_lines(path)}
        self._rewrite()  # without what a kill cut off

    def append(self, metrics: dict[str, Any]) -> None:
        """Add one step's line, durably."""
        step, last = metrics["step"], max(self._lines, default=0)
        self._lines[step] = metrics_line(metrics)
        if step <= last:
            self._rewrite()
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(self._lines[step])
            file.flush()
            os.fsync(file.fileno())

    def _rewrite(self) -> None:
        write_text(self._path, "".join(line for _, line in sorted(self._lines.items())))


def metrics_line(metrics: dict[str, Any]) -> str:
    """One line of a metrics file. NaN and infinities, which JSON does not have, are null."""
    return json.dumps({k: v if _is_finite(v) else None for k, v in metrics.items()}, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines; the last one may be cut off where a process was killed. Numbers that are not finite are left out."""
    lines = [json.loads(line) for line in _complete_lines(path)]
    return [{k: v for k, v in line.items() if v is not None and _is_finite(v)} for line in lines]


def without_timing(line: dict[str, Any]) -> dict[str, Any]:
    """What a step learnt and measured, without how long it took."""
    return {name: value for name, value in line.items() if not any(word in name for word in TIMING)}


def _complete_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [
        line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


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
