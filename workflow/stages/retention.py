"""Giving up the bytes of training states that nobody needs any more. Loads no framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engines.checkpoint.store import StateStore
from workflow.campaign.lock import RELEASE_LOCK, FolderLock
from workflow.campaign.plan import CURRENT, RESULTS, Plan, PlanError, StageSpec, read_plan
from workflow.cluster.states import job_is_final


def release_states(plan: Plan, train: StageSpec) -> list[int]:
    """Release the states of ``train`` that its retention policy does not keep and whose readers have all published.

    Returns the steps that were released. Waits for another process that is at it: it may have looked before this one published,
    and of the last two readers one has to see that no other is left.
    """
    lock = FolderLock(Path(train.folder), RELEASE_LOCK, job_is_final)
    for _ in lock.wait():
        pass
    try:
        policy = train.config["checkpoint"]["retain"]
        needed = {step for known in [plan, *other_plans(plan)] for step in needed_steps(known, train)}
        return StateStore(Path(train.folder)).retain(policy, keep=needed)
    finally:
        lock.release()


def other_plans(plan: Plan) -> Iterator[Plan]:
    """What other campaigns here show: runs of several campaigns may share a training and cut it differently."""
    for link in RESULTS.glob(f"*/{CURRENT}"):
        if (path := link.resolve()).name != f"plan-{plan.digest}.json":
            with suppress(PlanError):  # of another version of the code: it plans anew before it goes on
                yield read_plan(path)


def needed_steps(plan: Plan, train: StageSpec) -> set[int]:
    """Steps of ``train`` whose states a stage of the plan has still to read."""
    return {
        ref.step
        for spec in plan.stages.values()
        for ref in spec.inputs.values()
        if ref.id == train.id and ref.step is not None and not Path(spec.manifest()).exists()
    }
