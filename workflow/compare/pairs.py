"""Which results of two folders belong together, and why two do not. Loads no framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow.campaign.identity import without_execution
from workflow.campaign.paths import ABSENT
from workflow.campaign.stages import STAGES
from workflow.campaign.view import find_manifests
from workflow.manifest import Manifest, ManifestError, read_manifest


class NotComparable(RuntimeError):
    """Two results of different learning identities; the message says in which config paths they differ."""


@dataclass(frozen=True)
class Result:
    """A published result."""

    path: Path
    """Of its manifest."""
    manifest: Manifest

    @property
    def key(self) -> tuple[str, str, int | None]:
        """Equal for results that should have learnt the same."""
        return self.manifest.stage, self.manifest.learning_identity, self.manifest.step

    @property
    def cut(self) -> int | None:
        """The step of the training state that it is, or was made of."""
        model = self.manifest.inputs.get("model")
        return model.step if self.manifest.step is None and model is not None else self.manifest.step

    @property
    def training(self) -> str | None:
        """Learning identity of the training that it is a cut of, or evaluates at a cut."""
        if self.manifest.stage == "train":
            return self.manifest.learning_identity
        if self.manifest.stage != "evaluate" or self.cut is None:
            return None
        try:
            return read_manifest(self.path.parent / self.manifest.inputs["model"].manifest).learning_identity
        except ManifestError:
            return None

    @property
    def name(self) -> str:
        """For people."""
        step = "" if self.manifest.step is None else f" step {self.manifest.step}"
        return f"{self.manifest.stage} {self.manifest.slug}{step}"


@dataclass(frozen=True)
class Pair:
    """Two results of one learning identity; one of them is missing where only the other side has it."""

    ours: Result | None
    theirs: Result | None
    cut_elsewhere: bool = False
    """One is missing because that side was not cut at its step, and where a run is cut is no part of what it learns."""

    @property
    def identities(self) -> tuple[str, str] | None:
        """Both numeric identities: all states of two trainings have the same ones."""
        if self.ours is None or self.theirs is None:
            return None
        return self.ours.manifest.identity, self.theirs.manifest.identity


def find_pairs(ours: Path, theirs: Path) -> list[Pair]:
    """Pair the results at two paths: manifests, their folders, runs or campaigns.

    Where several results of one side share a learning identity (layouts of one run), equal numeric identities go together first.
    Of a run that was cut differently, the states and evaluations at the cuts that both have are paired.

    Raises:
        ManifestError: nothing published is there.
        NotComparable: results of the same stage and step differ in what they learn.
    """
    left, right = _results(ours), _results(theirs)
    pairs, only_left, only_right = _matched(left, right)
    cuts_left, cuts_right = _cuts(left), _cuts(right)
    alone = [Pair(one, None, _cut_elsewhere(one, cuts_right)) for one in only_left]
    alone += [Pair(None, other, _cut_elsewhere(other, cuts_left)) for other in only_right]
    _refuse_other_learning([pair for pair in alone if not pair.cut_elsewhere])
    if not pairs:
        raise NotComparable(f"{ours} and {theirs}: no stage and step that both have")
    return pairs + alone


def _matched(left: list[Result], right: list[Result]) -> tuple[list[Pair], list[Result], list[Result]]:
    """What belongs together, and what is left of both sides."""
    pairs, left, right = [], list(left), list(right)
    for exact in (True, False):
        for one in list(left):
            for other in right:
                same = not exact or one.manifest.identity == other.manifest.identity
                if one.key == other.key and same:
                    pairs.append(Pair(one, other))
                    left.remove(one)
                    right.remove(other)
                    break
    return pairs, left, right


def _cuts(results: list[Result]) -> dict[str, set[int | None]]:
    """Training -> the steps of which one side has anything."""
    cuts: dict[str, set[int | None]] = {}
    for result in results:
        if training := result.training:
            cuts.setdefault(training, set()).add(result.cut)
    return cuts


def _cut_elsewhere(result: Result, cuts: dict[str, set[int | None]]) -> bool:
    """Whether the other side, which is cut at ``cuts``, has the result's training and none of it at the result's step."""
    steps = cuts.get(result.training or "", set())
    return bool(steps) and result.cut not in steps


def _refuse_other_learning(alone: list[Pair]) -> None:
    """Two results of the same stage and step of which neither has a counterpart were to be compared with each other."""
    for one in (pair.ours for pair in alone if pair.ours):
        for other in (pair.theirs for pair in alone if pair.theirs):
            if (one.manifest.stage, one.cut) == (other.manifest.stage, other.cut):
                raise NotComparable("\n".join(why_different(one, other)))


def _results(path: Path) -> list[Result]:
    """All results there, those that several runs share once."""
    found = {manifest.resolve(): manifest for manifest in find_manifests(path)}
    return [Result(manifest, read_manifest(manifest)) for manifest in found.values()]


def why_different(ours: Result, theirs: Result) -> list[str]:
    """What makes two learning identities differ: config paths with both values, then the inputs', down to the first cause."""
    return [f"{ours.name} and {theirs.name} do not learn the same:", *_reasons(ours, theirs, "")]


def _reasons(ours: Result, theirs: Result, prefix: str) -> Iterator[str]:
    one, other = ours.manifest, theirs.manifest
    if one.stage != other.stage:
        yield f"  {prefix}stage: {one.stage} | {other.stage}"
        return
    if one.version != other.version:
        yield f"  {prefix}version of the stage: {one.version} | {other.version}"
    stage = STAGES[one.stage]
    left, right = (dict(_leaves(without_execution(found.config, stage))) for found in (one, other))
    for path in sorted(left.keys() | right.keys()):
        if left.get(path, ABSENT) != right.get(path, ABSENT):
            shown = [str(side.get(path, "absent")) for side in (left, right)]
            yield f"  {prefix}{path}: {shown[0]} | {shown[1]}"
    for name in sorted((one.inputs.keys() | other.inputs.keys()) - {"state"}):
        a, b = one.inputs.get(name), other.inputs.get(name)
        if a is None or b is None:
            yield f"  {prefix}input {name!r}: {a.stage if a else 'absent'} | {b.stage if b else 'absent'}"
            continue
        if a.step != b.step:
            yield f"  {prefix}input {name!r}: step {a.step} | {b.step}"
        try:
            sources = [
                Result(path, read_manifest(path))
                for path in (ours.path.parent / a.manifest, theirs.path.parent / b.manifest)
            ]
        except ManifestError as error:
            yield f"  {prefix}input {name!r}: {error}"
            continue
        if sources[0].key[:2] != sources[1].key[:2]:
            yield from _reasons(*sources, f"{prefix}input {name!r}: ")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
