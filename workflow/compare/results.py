"""What two results have in common: their weights, optimizer states, curves, answers and other files. Loads no framework."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.checkpoint.store import RELEASED_FILE
from engines.checkpoint.verify import read_state
from engines.model_folder import INDEX
from workflow.compare.findings import DIFFERENT, EQUAL, NOT_COMPARED, Finding, measured, worst
from workflow.compare.pairs import Pair, Result
from workflow.compare.tensors import Apart, Tensor, apart, folder_tensors, role_tensors
from workflow.compare.values import compare_curves, compare_records
from workflow.manifest import check_files, is_released
from workflow.rl.metrics import SFT_CURVE_FILE

SAMPLES_FILE, RESULT_FILE = "samples.jsonl", "result.json"
"""What the stage evaluate publishes; the stage itself loads a framework."""
READ = (".safetensors", INDEX, SFT_CURVE_FILE, SAMPLES_FILE, RESULT_FILE)
"""Ends of the names of files that are compared by what they say. In which file a tensor lies is no part of the result."""
PROVENANCE = ("README.md", "conversion.json")
"""Files that say how and by what a result was made: a model card, the record of a conversion."""


@dataclass(frozen=True)
class Comparison:
    """A pair and what was found."""

    pair: Pair
    findings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Of all parts: equal, close, not compared (not as a whole), different."""
        return worst(self.findings)

    def record(self) -> dict[str, Any]:
        """JSON."""
        sides = {
            side: None if result is None else _side(result)
            for side, result in (("a", self.pair.ours), ("b", self.pair.theirs))
        }
        return sides | {"verdict": self.verdict, "findings": [found.record() for found in self.findings]}


def compare(pair: Pair, tolerance: float | None = None) -> Comparison:
    """Compare two results: bit for bit, or numbers to within a relative ``tolerance``. Samples are equal or not."""
    if pair.ours is None or pair.theirs is None:
        return Comparison(pair, [_alone(pair)])
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
        findings = [*_published(pair.ours, pair.theirs, tolerance)]
    findings += compare_curves(pair.ours, pair.theirs, tolerance)
    return Comparison(pair, findings)


def uncompared(found: Sequence[Comparison]) -> list[Comparison]:
    """Pairs that were not compared as a whole, and that no other pair of the same two trainings (a later state) speaks for."""
    pairs = [one for one in found if one.pair.identities]
    whole = {one.pair.identities for one in pairs if one.verdict != NOT_COMPARED}
    return [one for one in pairs if one.verdict == NOT_COMPARED and one.pair.identities not in whole]


def passed(found: Sequence[Comparison]) -> bool:
    """Whether nothing differs, and of everything that both sides have something was compared as a whole."""
    return all(one.verdict != DIFFERENT for one in found) and not uncompared(found)


def summary(found: Sequence[Comparison]) -> str:
    """All of it in a sentence."""
    judged = [one for one in found if one.verdict != NOT_COMPARED]
    different = sum(one.verdict == DIFFERENT for one in judged)
    parts = [f"{len(judged)} results compared"]
    if judged:
        parts[0] += f": {different} differ" if different else ": none differs"
    if partly := sum(one.verdict == NOT_COMPARED and one.pair.identities is not None for one in found):
        parts.append(f"{partly} not compared as a whole")
    never = {one.pair.identities: one.pair.ours.manifest for one in uncompared(found)}
    parts += [f"nothing speaks for all of {one.stage} {one.slug}" for one in never.values()]
    if elsewhere := sum(one.pair.cut_elsewhere for one in found):
        parts.append(f"{elsewhere} on one side only, where the other was not cut")
    return "; ".join(parts)


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


def _alone(pair: Pair) -> Finding:
    has, lacks = ("A", "B") if pair.theirs is None else ("B", "A")
    if not pair.cut_elsewhere:
        return Finding("result", DIFFERENT, note=f"only in {has}")
    step = (pair.ours or pair.theirs).cut
    return Finding("result", NOT_COMPARED, note=f"only in {has}: {lacks} was not cut at step {step}")


def _states(ours: Result, theirs: Result, tolerance: float | None) -> Iterator[Finding]:
    """Training states: weights and optimizer of every role, the counters, and the digest of all samples so far."""
    folders = [result.path.parent for result in (ours, theirs)]
    states = [_description(folder) for folder in folders]
    if any(is_released(folder) for folder in folders):
        yield from _released(*states, tolerance)
    else:
        for part, prefix in (("weights", "model."), ("optimizer", "optimizer.")):
            sides = [_of_roles(folder, state, prefix) for folder, state in zip(folders, states, strict=True)]
            yield _judged(part, apart(*sides), tolerance)
    seen = [state["trainer"].pop("samples_digest") for state in states]
    count = states[0]["trainer"]["samples_seen"]
    yield Finding("samples", EQUAL if seen[0] == seen[1] else DIFFERENT, note=f"{count} sampled")
    yield compare_records("counters", *map(_counters, states), tolerance)


def _released(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float | None) -> Iterator[Finding]:
    """Weights and optimizer of which only digests are left: equal ones say that bits are equal.

    Others say that bits differ where both sides put the same blocks of tensors into the same files; they never say by how much.
    """
    same_blocks = _blocks(ours) == _blocks(theirs)
    if same_blocks and ours["files"] == theirs["files"]:
        verdict, note = EQUAL, "by the digests of released bytes"
    elif same_blocks and tolerance is None:
        verdict, note = DIFFERENT, "released bytes, and both together have other digests"
    else:
        verdict = NOT_COMPARED
        note = f"released bytes, and {'other digests' if same_blocks else 'other blocks or types of tensors'}"
    yield from (Finding(part, verdict, note=note) for part in ("weights", "optimizer"))


def _blocks(state: dict[str, Any]) -> dict[str, Any]:
    return {role: entry["tensors"] for role, entry in state["roles"].items()}


def _counters(state: dict[str, Any]) -> dict[str, Any]:
    """What a state holds besides tensors."""
    return state["trainer"] | {role: entry["scalars"] for role, entry in state["roles"].items()}


def _of_roles(folder: Path, state: dict[str, Any], prefix: str) -> dict[str, Tensor]:
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


def _published(ours: Result, theirs: Result, tolerance: float | None) -> Iterator[Finding]:
    """Stages that publish a model (its weights) or an evaluation (its answers); what else they publish has a digest."""
    sides = (ours, theirs)
    weights = [[path for path in _paths(side) if path.suffix == ".safetensors"] for side in sides]
    if any(weights):
        yield _judged("weights", apart(*map(folder_tensors, weights)), tolerance)
    if ours.manifest.stage == "evaluate":
        yield from _evaluations(*(side.path.parent for side in sides), tolerance)
        return
    names = [name for name in sorted(ours.manifest.files.keys() | theirs.manifest.files) if _is_opaque(name)]
    if not any(weights) or (names and tolerance is None):
        yield _files(names, ours, theirs, tolerance)


def _paths(result: Result) -> list[Path]:
    return [result.path.parent / name for name in result.manifest.files]


def _evaluations(ours: Path, theirs: Path, tolerance: float | None) -> Iterator[Finding]:
    """The answers that are shown, the outcome of every problem, and the metrics of all."""
    answers = [(side / SAMPLES_FILE).read_text(encoding="utf-8").splitlines() for side in (ours, theirs)]
    other = sum(a != b for a, b in zip(*answers, strict=False)) + abs(len(answers[0]) - len(answers[1]))
    note = f"{other} of {len(answers[0])} differ" if other else f"{len(answers[0])} answers"
    yield Finding("samples", DIFFERENT if other else EQUAL, note=note)
    results = [json.loads((side / RESULT_FILE).read_text(encoding="utf-8")) for side in (ours, theirs)]
    outcomes = [result.pop("outcomes") for result in results]
    problems = outcomes[0].keys() | outcomes[1].keys()
    other = sum(outcomes[0].get(problem) is not outcomes[1].get(problem) for problem in problems)
    note = f"{other} of {len(problems)} differ" if other else f"{len(problems)} problems"
    yield Finding("outcomes", DIFFERENT if other else EQUAL, note=note)
    yield compare_records("metrics", *results, tolerance)


def _files(names: list[str], ours: Result, theirs: Result, tolerance: float | None) -> Finding:
    """Digests of files that nothing else reads. They do not say by how much numbers differ."""
    if not names:
        return Finding("files", NOT_COMPARED, note="nothing that could be compared")
    other = [name for name in names if ours.manifest.files.get(name) != theirs.manifest.files.get(name)]
    if not other:
        return Finding("files", EQUAL, note=f"{len(names)} files, by their digests")
    verdict = DIFFERENT if tolerance is None else NOT_COMPARED
    return Finding(
        "files", verdict, note=f"other digests of {len(other)} of {len(names)} files, first {other[0]}"
    )


def _is_opaque(name: str) -> bool:
    return Path(name).name not in PROVENANCE and not name.endswith(READ)


def _judged(part: str, found: Apart, tolerance: float | None) -> Finding:
    if found.unequal == 0:
        return Finding(part, EQUAL, 0.0, f"{found.tensors} tensors")
    note = f"{found.unequal} of {found.tensors} tensors, most {found.where}"
    return measured(part, found.largest, tolerance, note)
