"""Giving up the bytes of training states that nobody needs any more. Loads no framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from engines.checkpoint.store import StateStore
from workflow.campaign.lock import RELEASE_LOCK, FolderLock
from workflow.campaign.plan import CURRENT, RESULTS, Plan, PlanError, StageSpec, read_plan
from workflow.cluster.states import job_is_final
from workflow.manifest import MANIFEST, TWIN


def release_states(plan: Plan, train: StageSpec) -> list[int]:
    """Release the published states of ``train`` that no campaign's retention policy keeps and whose readers have all published.

    Returns the steps that were released. Those inside a segment are the training's own, which may be at work there. Waits for
    another process that is at it: it may have looked before this one published, and of the last two readers one has to see
    that no other is left.
    """
    lock = FolderLock(Path(train.folder), RELEASE_LOCK, job_is_final)
    for _ in lock.wait():
        pass
    try:
        plans = [known for known in [plan, *other_plans(plan)] if train.id in known.stages]
        policies = {known.stages[train.id].config["checkpoint"]["retain"] for known in plans}
        needed = {step for known in plans for step in needed_steps(known, train)}
        folder = Path(train.folder)
        return StateStore(folder).retain(*policies, keep=needed, of=published_steps(folder).__contains__)
    finally:
        lock.release()


def other_plans(plan: Plan) -> Iterator[Plan]:
    """What other campaigns here show: runs of several campaigns may share a training and cut it differently."""
    for link in RESULTS.glob(f"*/{CURRENT}"):
        if (path := link.resolve()).name != f"plan-{plan.digest}.json":
            with suppress(PlanError):  # of another version of the code: it plans anew before it goes on
                yield read_plan(path)


def needed_steps(plan: Plan, train: StageSpec) -> set[int]:
    """Steps of ``train`` whose states a stage of the plan has still to read: also the next segment of the training itself."""
    read = {
        ref.step
        for spec in plan.stages.values()
        for ref in spec.inputs.values()
        if ref.id == train.id and ref.step is not None and not Path(spec.manifest()).exists()
    }
    own = plan.stages[train.id]
    return read | {cut for cut, following in pairwise(own.cuts) if not Path(own.manifest(following)).exists()}


def published_steps(folder: Path) -> set[int]:
    """Steps at which segments of a training ended, of whatever campaign: how a run is cut is no part of what it is."""
    manifests = [path for name in (MANIFEST, TWIN) for path in folder.glob(f"step*/{name}")]
    return {int(path.parent.name.removeprefix("step")) for path in manifests}
