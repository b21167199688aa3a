"""Metrics for other tools, written from ``metrics.jsonl`` when the report is: a run that was cut or killed logs no step twice.

Each tracker's folder, ``<results>/<tracker>``, is written anew. Nothing is sent anywhere.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from workflow.campaign.schema import TrackingConfig
from workflow.reporting.collect import Campaign, Run


class TrackerMissing(RuntimeError):
    """A tracker was asked for whose package is not installed."""


def track(campaign: Campaign, folder: Path) -> list[Path]:
    """Write every run's metrics with the trackers that its ``tracking`` settings name; returns the folders.

    Raises:
        TrackerMissing: naming the setting and the package.
    """
    written = []
    for name, write in _TRACKERS.items():
        root = folder / name
        runs = [run for run in campaign.runs if getattr(TrackingConfig(**run.train.config["tracking"]), name)]
        if runs:
            shutil.rmtree(root, ignore_errors=True)
            written.append(root)
        for run in runs:
            if run.metrics or run.evaluations:
                root.mkdir(exist_ok=True)
                write(campaign, run, root)
    return written


def scalars(run: Run) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, metrics by name) of the whole run; held-out accuracy stands at the step after which it was measured."""
    steps: dict[int, dict[str, float]] = {
        line["step"]: {key: value for key, value in line.items() if key != "step"} for line in run.metrics
    }
    for evaluation in run.evaluations:
        steps.setdefault(evaluation.step, {}).update(
            {
                "heldout/accuracy": evaluation.accuracy,
                "heldout/accuracy_low": evaluation.low,
                "heldout/accuracy_high": evaluation.high,
            }
        )
    yield from sorted(steps.items())


def _tensorboard(campaign: Campaign, run: Run, root: Path) -> None:
    writer_module = _require("tensorboard", "tensorboard.summary.writer.event_file_writer", "tensorboard")
    event_module = importlib.import_module("tensorboard.compat.proto.event_pb2")
    summary_module = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    writer = writer_module.EventFileWriter(str(root / run.name))
    clock = campaign.finished_at.timestamp() - sum(line.get("seconds", 0.0) for line in run.metrics)
    for step, values in scalars(run):
        clock += values.get("seconds", 0.0)
        entries = [summary_module.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        summary = summary_module.Summary(value=entries)
        writer.add_event(event_module.Event(wall_time=clock, step=step, summary=summary))
    writer.close()


def _wandb(campaign: Campaign, run: Run, root: Path) -> None:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    wandb = _require("wandb", "wandb", "wandb")
    session = wandb.init(
        mode="offline",
        dir=str(root),
        project=campaign.plan.campaign,
        name=run.name,
        id=f"{run.name}-{run.train.identity[:8]}",
        config=_parameters(run),
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, save_code=False),
    )
    for step, values in scalars(run):
        session.log(values, step=step)
    session.finish()


def _mlflow(campaign: Campaign, run: Run, root: Path) -> None:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = _require("mlflow", "mlflow", "mlflow")
    client = mlflow.MlflowClient(tracking_uri=root.resolve().as_uri())
    known = client.get_experiment_by_name(campaign.plan.campaign)
    experiment = known.experiment_id if known else client.create_experiment(campaign.plan.campaign)
    run_id = client.create_run(experiment, run_name=run.name).info.run_id
    for name, value in _parameters(run).items():
        client.log_param(run_id, name, value)
    for step, values in scalars(run):
        for name, value in values.items():
            # A metric is a file there, so "seconds" and "seconds/rollout" exclude each other.
            client.log_metric(run_id, name.replace("/", "."), value, step=step)
    client.set_terminated(run_id)


_TRACKERS: dict[str, Callable[[Campaign, Run, Path], None]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}


def _parameters(run: Run) -> dict[str, Any]:
    return {
        "algorithm": run.plan.algorithm,
        "seed": run.plan.seed,
        "identity": run.train.identity,
        "world_size": run.train.world_size,
        **{f"algorithm.{key}": str(value) for key, value in run.train.config.get("algorithm", {}).items()},
    }


def _require(setting: str, module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TrackerMissing(
            f"tracking.{setting}=true needs the package {package} ({error}): install it, or set tracking.{setting}=false"
        ) from error
