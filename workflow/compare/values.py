"""Curves and records of two results: numbers by a tolerance, the rest exactly, times and speeds not at all. Loads no framework."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from workflow.campaign.paths import ABSENT
from workflow.compare.findings import DIFFERENT, EQUAL, NOT_COMPARED, Finding, measured
from workflow.compare.pairs import Result
from workflow.rl.metrics import METRICS_FILE, SFT_CURVE_FILE, read_metrics, without_timing

SMALL = 1e-4
"""Numbers that never reach it are compared as parts of it: what measures rounding differs by all of itself. Not so learning rates,
which are as small as that and no measurement."""


def compare_records(
    part: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float | None
) -> Finding:
    """Two JSON objects, however deep."""
    left, right = dict(_leaves(ours)), dict(_leaves(theirs))
    unequal, largest, where = 0, 0.0, ""
    names = sorted(left.keys() | right.keys())
    for name in names:
        one, other = left.get(name, ABSENT), right.get(name, ABSENT)
        if type(one) is type(other) and one == other:
            continue
        unequal += 1
        difference = _relative(one, other)
        if difference > largest or not where:
            largest, where = difference, ".".join(name)
    if not unequal:
        return Finding(part, EQUAL, 0.0, f"{len(names)} values")
    return measured(part, largest, tolerance, f"{unequal} of {len(names)} values, most {where}")


def _leaves(value: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that holds no others by the names on the way to it, but for those that are a time or a speed."""
    inside = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(inside, Mapping) or not inside:
        yield name, value
        return
    for key, held in inside.items():
        if isinstance(held, Mapping) or without_timing({str(key): held}):
            yield from _leaves(held, (*name, str(key)))


def _relative(one: Any, other: Any) -> float:
    """Infinite for what is no measurement: counts are equal or not."""
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other)):
        return math.inf
    if isinstance(one, int) and isinstance(other, int):
        return math.inf
    return abs(one - other) / max(abs(other), SMALL)


def compare_curves(ours: Result, theirs: Result, tolerance: float | None) -> Iterator[Finding]:
    """The metrics of all steps up to the results; nothing for stages that have no curve."""
    name = {"train": METRICS_FILE, "sft": SFT_CURVE_FILE}.get(ours.manifest.stage)
    if name is None:
        return
    curves = [_curve(result, name) for result in (ours, theirs)]
    if not all(curves):
        lacking = " and ".join(side for side, curve in zip("AB", curves, strict=True) if not curve)
        yield Finding("curve", NOT_COMPARED, note=f"no steps in {name} of {lacking}")
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
    for metric in sorted({metric for curve in curves for line in curve.values() for metric in line}):
        values = [[line.get(metric, math.nan) for line in curve.values()] for curve in curves]
        floor = 0.0 if metric.rpartition("/")[2] == "lr" else SMALL
        scale = max((abs(value) for value in values[1] if math.isfinite(value)), default=0.0)
        for step, a, b in zip(steps[0], *values, strict=True):
            difference = _part_of(max(scale, floor), a, b)
            if difference > largest:
                largest, where = difference, f"{metric} of step {step}"
    yield measured("curve", largest, tolerance, f"most {where}")


def _part_of(scale: float, a: float, b: float) -> float:
    """How far two values of a curve are apart, as a part of ``scale``."""
    if a == b or (a != a and b != b):
        return 0.0
    difference = abs(a - b) / scale if scale else math.inf
    return math.inf if math.isnan(difference) else difference


def _curve(result: Result, name: str) -> dict[int, dict[str, Any]]:
    folder = result.path.parent.parent if result.manifest.stage == "train" else result.path.parent
    last = math.inf if result.manifest.step is None else result.manifest.step
    lines = read_metrics(folder / name)
    return {line["step"]: without_timing(line) for line in lines if line["step"] <= last}
