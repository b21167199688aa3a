"""A run's folder for people: links to its stages in the store, and ``run.json``. Loads no framework."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from workflow.campaign.plan import CURRENT, Plan, PlanError, RunPlan, read_plan
from workflow.manifest import MANIFEST, ManifestError, write_json

RUN_FILE = "run.json"


def write_view(plan: Plan, plan_path: Path, name: str) -> Path:
    """Link the stages of run ``name`` into its folder beside the plan and write ``run.json``; returns its path.

    Raises:
        PlanError: the plan has no such run.
    """
    if name not in plan.runs:
        raise PlanError(f"the plan of campaign {plan.campaign!r} has no run {name!r}")
    run = plan.runs[name]
    folder = plan_path.parent / name
    folder.mkdir(parents=True, exist_ok=True)
    for link in folder.iterdir():
        if link.is_symlink():
            link.unlink()  # of another plan's stages
    stages: list[dict[str, Any]] = []
    for id, link in _link_names(plan, run).items():
        spec = plan.stages[id]
        (folder / link).symlink_to(os.path.relpath(spec.folder, folder), target_is_directory=True)
        for step in spec.cuts or [None]:
            manifest = os.path.relpath(spec.manifest(step), folder)
            stages.append({"stage": spec.stage, "id": id, "step": step, "manifest": manifest})
    path = folder / RUN_FILE
    write_json(
        path,
        {
            "format": 1,
            "campaign": plan.campaign,
            "run": name,
            "algorithm": run.algorithm,
            "seed": run.seed,
            "plan": os.path.relpath(plan_path, folder),
            "overrides": run.overrides,
            "stages": stages,
        },
    )
    return path


def _link_names(plan: Plan, run: RunPlan) -> dict[str, str]:
    """Stage id -> name of its link; an evaluation is named after what it evaluated: evaluate-sft, evaluate-step000020."""
    names = {value: key for key, value in run.stages.items() if isinstance(value, str)}
    for key, ids in run.stages.items():
        for id in ids if isinstance(ids, list) else []:
            model = plan.stages[id].inputs["model"]
            names[id] = f"{key}-{names[model.id] if model.step is None else f'step{model.step:06d}'}"
    return names


def view_manifests(path: Path) -> list[Path]:
    """The manifests that a ``run.json`` lists.

    Raises:
        ManifestError: it is missing or no such record.
    """
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
        return [path.parent / entry["manifest"] for entry in stages]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{path}: no record of a run ({type(error).__name__}: {error})") from None


def find_manifests(path: Path) -> list[Path]:
    """The manifests that ``path`` stands for: one result, one run, or all runs of a campaign's current plan.

    Raises:
        ManifestError: nothing of that kind is there.
    """
    if path.is_file() and path.name == MANIFEST:
        return [path]
    if (path / MANIFEST).is_file():
        return [path / MANIFEST]
    if (path / RUN_FILE).is_file():
        return view_manifests(path / RUN_FILE)
    if (path / CURRENT).exists():
        names = _run_names((path / CURRENT).resolve())
        return [manifest for run in names for manifest in view_manifests(path / run / RUN_FILE)]
    raise ManifestError(
        f"{path}: no {MANIFEST}, {RUN_FILE} or {CURRENT} there; give a result, a run or a campaign"
    )


def _run_names(plan: Path) -> list[str]:
    """Of the runs of a plan, also of one that another version of the code made: its results can be looked at all the same."""
    try:
        return list(json.loads(plan.read_text(encoding="utf-8"))["runs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{plan}: not a plan ({type(error).__name__}: {error})") from None


def main() -> int:
    """Parse the command line and write one view."""
    parser = argparse.ArgumentParser(prog="python -m workflow.campaign.view", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--run", required=True)
    options = parser.parse_args()
    try:
        write_view(read_plan(options.plan), options.plan, options.run)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
