"""What two results have in common: their weights, optimizer states, curves and samples. Loads no framework."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from engines.checkpoint.store import RELEASED_FILE
from engines.checkpoint.verify import read_state
from workflow.compare.pairs import Pair, Result
from workflow.compare.tensors import Apart, apart, folder_tensors, role_tensors
from workflow.manifest import check_files, is_released
from workflow.rl.metrics import METRICS_FILE, SFT_CURVE_FILE, read_metrics, without_timing

EQUAL, CLOSE, DIFFERENT, UNKNOWN = "equal", "close", "different", "unknown"

SMALL = 1e-4
"""Metrics of a curve that never reach it are compared as parts of it: what measures rounding differs by all of itself."""


@dataclass(frozen=True)
class Finding:
    """One part of two results."""

    part: str
    """weights, optimizer, curve, samples, files; or result, where one side has none."""
    verdict: str
    """equal (bit for bit), close (within the tolerance), different; unknown when one side's bytes were released."""
    difference: float | None = None
    """Largest relative one, where it is a number."""
    note: str = ""

    def __str__(self) -> str:
        number = "" if not self.difference else f" {self.difference:.1e}"
        return f"{self.verdict}{number}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class Comparison:
    """A pair and what was found."""

    pair: Pair
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return all(finding.verdict != DIFFERENT for finding in self.findings)

    def record(self) -> dict[str, Any]:
        """JSON."""
        sides = {
            side: None if result is None else _side(result)
            for side, result in (("a", self.pair.ours), ("b", self.pair.theirs))
        }
        # JSON has no infinity: where names or shapes differ there is no number.
        findings = [
            asdict(f) | {"difference": f.difference if f.difference not in (None, math.inf) else None}
            for f in self.findings
        ]
        return sides | {"passed": self.passed, "findings": findings}


def compare(pair: Pair, tolerance: float | None = None) -> Comparison:
    """Compare two results: bit for bit, or numbers to within a relative ``tolerance``. Samples are equal or not."""
    if pair.ours is None or pair.theirs is None:
        only = "A" if pair.theirs is None else "B"
        return Comparison(pair, [Finding("result", DIFFERENT, note=f"only in {only}")])
    damaged = [
        problem
        for result in (pair.ours, pair.theirs)
        for problem in check_files(result.path.parent, result.manifest)
    ]
    if damaged:
        return Comparison(pair, [Finding("files", DIFFERENT, note=problem) for problem in damaged])
    if pair.ours.manifest.stage == "train":
        findings = [*_states(pair.ours, pair.theirs, tolerance)]
    else:
        findings = [*_models(pair.ours, pair.theirs, tolerance)]
    findings += _curves(pair.ours, pair.theirs, tolerance)
    return Comparison(pair, findings)


def _side(result: Result) -> dict[str, Any]:
    manifest = result.manifest
    return {
        "manifest": str(result.path),
        "stage": manifest.stage,
        "step": manifest.step,
        "id": manifest.id,
        "learning_identity": manifest.learning_identity,
        "backends": manifest.backends,
        "device": manifest.device.computed,
        "world_size": manifest.world_size,
        "layout": manifest.layout.model_dump(),
    }


def _states(ours: Result, theirs: Result, tolerance: float | None) -> Iterator[Finding]:
    """Training states: weights and optimizer of every role, and the digest of all samples so far."""
    folders = [result.path.parent for result in (ours, theirs)]
    states = [_description(folder) for folder in folders]
    if any(is_released(folder) for folder in folders):
        same = ours.manifest.files == theirs.manifest.files
        note = "by the digests of released bytes" if same else "released bytes, and other digests"
        verdict = EQUAL if same else UNKNOWN if tolerance is not None else DIFFERENT
        yield from (Finding(part, verdict, note=note) for part in ("weights", "optimizer"))
    else:
        for part, prefix in (("weights", "model."), ("optimizer", "optimizer.")):
            sides = [_of_roles(folder, state, prefix) for folder, state in zip(folders, states, strict=True)]
            yield _judged(part, apart(*sides), tolerance)
    seen = [state["trainer"]["samples_digest"] for state in states]
    count = states[0]["trainer"]["samples_seen"]
    yield Finding("samples", EQUAL if seen[0] == seen[1] else DIFFERENT, note=f"{count} sampled")


def _of_roles(folder: Path, state: dict[str, Any], prefix: str) -> dict[str, numpy.ndarray]:
    """Of all roles, the tensors whose names begin with ``prefix``."""
    return {
        f"{role}.{name}": tensor
        for role, entry in state["roles"].items()
        for name, tensor in role_tensors(folder, entry, prefix).items()
    }


def _description(folder: Path) -> dict[str, Any]:
    if is_released(folder):
        return json.loads((folder / RELEASED_FILE).read_text(encoding="utf-8"))
    return read_state(folder)


def _models(ours: Result, theirs: Result, tolerance: float | None) -> Iterator[Finding]:
    """Stages that publish a model (its weights) or an evaluation (its answers)."""
    files = [{name: result.path.parent / name for name in result.manifest.files} for result in (ours, theirs)]
    weights = [[path for path in side.values() if path.suffix == ".safetensors"] for side in files]
    if any(weights):
        yield _judged("weights", apart(*map(folder_tensors, weights)), tolerance)
    if all("samples.jsonl" in side for side in files):
        answers = [side["samples.jsonl"].read_text(encoding="utf-8").splitlines() for side in files]
        other = sum(a != b for a, b in zip(*answers, strict=False)) + abs(len(answers[0]) - len(answers[1]))
        note = f"{other} of {len(answers[0])} differ" if other else f"{len(answers[0])} answers"
        yield Finding("samples", DIFFERENT if other else EQUAL, note=note)


def _judged(part: str, found: Apart, tolerance: float | None) -> Finding:
    if found.unequal == 0:
        return Finding(part, EQUAL, 0.0, f"{found.tensors} tensors")
    close = tolerance is not None and found.largest <= tolerance
    note = f"{found.unequal} of {found.tensors} tensors, most {found.where}"
    return Finding(part, CLOSE if close else DIFFERENT, found.largest, note)


def _curves(ours: Result, theirs: Result, tolerance: float | None) -> Iterator[Finding]:
    curves = [_curve(result) for result in (ours, theirs)]
    if None in curves or curves == [{}, {}]:
        return
    steps = [list(curve) for curve in curves]
    if steps[0] != steps[1]:
        odd = sorted(set(steps[0]) ^ set(steps[1])) or "another order"
        yield Finding("curve", DIFFERENT, math.inf, f"steps that only one side has: {odd}")
        return
    if curves[0] == curves[1]:
        yield Finding("curve", EQUAL, 0.0, f"{len(curves[0])} steps")
        return
    largest, where = 0.0, ""
    for name in sorted({name for curve in curves for line in curve.values() for name in line}):
        values = [[line.get(name, math.nan) for line in curve.values()] for curve in curves]
        scale = max((abs(value) for value in values[1] if math.isfinite(value)), default=0.0)
        scale = max(scale, SMALL)
        for step, a, b in zip(steps[0], *values, strict=True):
            difference = 0.0 if a == b or (a != a and b != b) else abs(a - b) / scale
            difference = math.inf if math.isnan(difference) else difference
            if difference > largest:
                largest, where = difference, f"{name} of step {step}"
    close = tolerance is not None and largest <= tolerance
    yield Finding("curve", CLOSE if close else DIFFERENT, largest, f"most {where}")


def _curve(result: Result) -> dict[int, dict[str, Any]] | None:
    """The metrics of every step up to the result; None for stages that have no curve."""
    name = {"train": METRICS_FILE, "sft": SFT_CURVE_FILE}.get(result.manifest.stage)
    if name is None:
        return None
    folder = result.path.parent.parent if result.manifest.stage == "train" else result.path.parent
    last = math.inf if result.manifest.step is None else result.manifest.step
    lines = read_metrics(folder / name)
    return {line["step"]: without_timing(line) for line in lines if line["step"] <= last}
