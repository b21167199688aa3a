"""What passes between stages: a result is published by its manifest, written last, and read by those that start from it.

Loads no framework.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from workflow.campaign.code import source_commit, source_root
from workflow.campaign.identity import by_content
from workflow.campaign.paths import cut
from workflow.campaign.plan import InputRef, Plan, StageSpec
from workflow.campaign.stages import STAGES
from workflow.manifest import (
    MANIFEST,
    TWIN,
    DeviceSeconds,
    InputRecord,
    Manifest,
    ManifestError,
    check_files,
    describe_files,
    is_released,
    read_manifest,
    write_manifest,
)
from workflow.stages.provenance import hardware, package_versions, timestamp

if TYPE_CHECKING:
    from workflow.stages.runner import StageContext, StageResult

WITHDRAWN = "withdrawn.json"
"""Name of the manifest of a result whose bytes were found damaged."""


Source = tuple[InputRef, Path, Manifest]
"""Something that a stage starts from: its reference, its folder and its manifest."""


class StageRefused(RuntimeError):
    """The stage must not run on what it was given."""


def published(spec: StageSpec, output: Path) -> Manifest | None:
    """The manifest of this very stage when it and its files are intact; its first name is restored from the second."""
    for path in (output / MANIFEST, output / TWIN):
        try:
            manifest = read_manifest(path)
        except ManifestError:
            continue
        if manifest.identity == spec.identity and not check_files(output, manifest):
            if path.name == TWIN:
                _give_first_name(output)
                # Of a start that could not give it: a result, and no failure.
                Path(spec.failure(manifest.step)).unlink(missing_ok=True)
            return manifest
    return None


def _give_first_name(output: Path) -> None:
    temporary = output / f".{MANIFEST}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    os.link(output / TWIN, temporary)
    temporary.rename(output / MANIFEST)


def read_input(plan: Plan, name: str, ref: InputRef, path: Path) -> Manifest:
    """The manifest at ``path`` of the input ``name``, whose files were hashed again.

    Raises:
        StageRefused: it is another stage's, its bytes were released, or they are damaged; in the last case it is withdrawn.
        ManifestError: there is none.
    """
    manifest = read_manifest(path)
    source = plan.stages[ref.id]
    if manifest.identity != source.identity or manifest.step != ref.step:
        raise StageRefused(f"input {name!r}: {path} is of another stage than planned")
    problems = check_files(path.parent, manifest)
    if is_released(path.parent):  # looked at last: it may have happened while the files were hashed
        raise StageRefused(
            f"input {name!r}: the bytes of {path.parent} were released; remove that folder and run again to compute it anew"
        )
    if problems:
        withdraw(path.parent)
        raise StageRefused(
            f"input {name!r}: {problems[0]}; its manifest is withdrawn, so run the same command again to compute it anew"
        )
    return manifest


def withdraw(folder: Path) -> None:
    """Set the manifest of a damaged result aside, both of its names: it is no success any more. Its bytes stay."""
    (folder / TWIN).unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # another reader was faster
        (folder / MANIFEST).rename(folder / WITHDRAWN)


def publish(plan: Plan, context: StageContext, result: StageResult) -> None:
    """Write the manifest of ``result``, last of all, and give it its first name."""
    spec, stage = context.spec, STAGES[context.spec.stage]
    spent = context.attempts.device_seconds(spec.world_size)
    manifest = plan.manifest_of(
        spec,
        step=context.step,
        config=by_content(cut(spec.config, stage.reads)),
        inputs=_input_records(context),
        files=describe_files(context.output, result.files),
        steps_planned=result.steps_planned,
        steps_done=result.steps_done,
        seeds=result.seeds,
        packages=package_versions(),
        hardware=hardware(),
        git_commit=source_commit(source_root()),
        attempts=context.attempts.all(),
        device_seconds=spent
        if result.device_seconds is None
        else DeviceSeconds(used=result.device_seconds, lost=spent.lost),
        metrics=result.metrics,
        extra=result.extra,
        created=timestamp(),
    )
    write_manifest(context.output / TWIN, manifest)
    _give_first_name(context.output)


def _input_records(context: StageContext) -> dict[str, InputRecord]:
    """The inputs, and for training the state at which the segment before this one ended."""
    spec = context.spec
    sources = {
        name: (ref, context.input_path(name), context.inputs[name]) for name, ref in spec.inputs.items()
    }
    if context.before is not None:
        sources["state"] = context.before
    return {
        name: InputRecord(
            stage=manifest.stage,
            id=ref.id,
            step=ref.step,
            manifest=os.path.relpath(folder / MANIFEST, context.output),
            digest=manifest.digest,
        )
        for name, (ref, folder, manifest) in sources.items()
    }


def segment_before(spec: StageSpec, step: int | None) -> Source | None:
    """Training: the reference, folder and manifest of the state at which the segment before this one ended.

    Its files are not hashed: they may be released, and training verifies the state that it goes on from.
    """
    earlier = [cut for cut in spec.cuts if cut < (step or 0)]
    if not earlier:
        return None
    folder = Path(spec.output_folder(earlier[-1]))
    return InputRef(id=spec.id, step=earlier[-1]), folder, read_manifest(folder / MANIFEST)
