"""``summary.json``: the outcome of every run, for programs."""

from __future__ import annotations

from typing import Any

from workflow.reporting.collect import Campaign, Run

MODEL_TYPE = "language_model"


def summarize(campaign: Campaign) -> dict[str, Any]:
    """``{"runs": [...]}``; all paths are relative to the folder from which the workflow runs.

    A run that failed has null where there is nothing to say, and ``failure``: stage, class, message and log.
    """
    return {"runs": [_summarize_run(run) for run in campaign.runs]}


def _summarize_run(run: Run) -> dict[str, Any]:
    train, start, final = run.train, run.start, run.final
    export = next((job for job in run.jobs if job.spec.stage == "export" and job.manifest), None)
    last = run.trained[-1] if run.trained else None
    summary = {
        "run": run.name,
        "algorithm": run.plan.algorithm,
        "seed": run.plan.seed,
        "model_type": MODEL_TYPE,
        "backend": train.backends.get("actor"),
        "device": train.device.computed,
        "world_size": train.world_size,
        "accuracy_sft": start.accuracy if start else None,
        "accuracy_final": final.accuracy if final else None,
        "accuracy_final_ci95": [final.low, final.high] if final else None,
        "steps_planned": train.steps,
        "steps_done": run.steps_done,
        "export": f"{export.spec.folder}/export" if export else None,
        "manifest": last.spec.manifest(last.step) if last else None,
    }
    if not run.complete:
        summary["failure"] = run.failures[0].to_json()
    return summary
