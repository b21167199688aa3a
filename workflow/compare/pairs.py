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
    def name(self) -> str:
        """For people."""
        step = "" if self.manifest.step is None else f" step {self.manifest.step}"
        return f"{self.manifest.stage} {self.manifest.slug}{step}"


@dataclass(frozen=True)
class Pair:
    """Two results of one learning identity; one of them is missing where only the other side has it."""

    ours: Result | None
    theirs: Result | None


def find_pairs(ours: Path, theirs: Path) -> list[Pair]:
    """Pair the results at two paths: manifests, their folders, runs or campaigns.

    Where several results of one side share a learning identity (layouts of one run), equal numeric identities go together first.

    Raises:
        ManifestError: nothing published is there.
        NotComparable: results of the same stage and step differ in what they learn.
    """
    left, right = _results(ours), _results(theirs)
    pairs = []
    for exact in (True, False):
        for one in list(left):
            for other in right:
                same = not exact or one.manifest.identity == other.manifest.identity
                if one.key == other.key and same:
                    pairs.append(Pair(one, other))
                    left.remove(one)
                    right.remove(other)
                    break
    for one in left:
        for other in right:
            if (one.manifest.stage, one.manifest.step) == (other.manifest.stage, other.manifest.step):
                raise NotComparable("\n".join(why_different(one, other)))
    if not pairs:
        raise NotComparable(f"{ours} and {theirs}: no stage and step that both have")
    return pairs + [Pair(one, None) for one in left] + [Pair(None, other) for other in right]


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
