"""Giving up the bytes of training states that nobody needs any more. Loads no framework."""

from __future__ import annotations

from pathlib import Path

from engines.checkpoint.store import StateStore
from workflow.campaign.lock import FolderLock, LockHeld
from workflow.campaign.plan import Plan, StageSpec


def release_states(plan: Plan, train: StageSpec) -> list[int]:
    """Release the states of ``train`` that its retention policy does not keep and whose readers have all published.

    Returns the steps that were released. Does nothing while another process is at it.
    """
    lock = FolderLock(Path(train.folder), "release.json")
    try:
        with lock:
            policy = train.config["checkpoint"]["retain"]
            return StateStore(Path(train.folder)).retain(policy, keep=needed_steps(plan, train))
    except LockHeld:
        return []


def needed_steps(plan: Plan, train: StageSpec) -> set[int]:
    """Steps of ``train`` whose states a stage of the plan has still to read."""
    return {
        ref.step
        for spec in plan.stages.values()
        for ref in spec.inputs.values()
        if ref.id == train.id and ref.step is not None and not Path(spec.manifest()).exists()
    }
