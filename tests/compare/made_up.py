"""Campaigns whose results were never computed: real plans and manifests, small files. To be altered and compared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from engines.checkpoint import StateStore
from engines.checkpoint.shards import Shard, write_shards
from tests.support.jobs import ROOT
from workflow.campaign.build import make_plan
from workflow.campaign.plan import Plan, StageSpec, write_plan
from workflow.campaign.schema import CampaignOptions
from workflow.campaign.view import write_view
from workflow.manifest import (
    MANIFEST,
    Hardware,
    InputRecord,
    Manifest,
    describe_files,
    read_manifest,
    write_manifest,
)

COMMON = ["model=micro-qwen3", "algorithm=grpo", "algorithm.steps=6", "checkpoint.retain=all"]


def made_up(folder: Path, *options: str, segments: int = 1, weight: float = 1.0, ranks: int = 1) -> Path:
    """A campaign of one run in ``folder``; returns the folder of the run.

    Args:
        weight: the first number of every state's tensors.
        ranks: files over which the tensors of a state are spread.
    """
    folder.mkdir(parents=True)
    path = folder / "campaign.yaml"
    values = {"name": "one", "segments": segments, "common": [*COMMON, *options], "runs": {"run": []}}
    path.write_text(yaml.safe_dump(values))
    plan, _ = make_plan(CampaignOptions(campaign=str(path)), ROOT)
    frozen = write_plan(plan, folder / "results" / "one")
    before = Path.cwd()
    os.chdir(folder)  # links are relative to where the workflow runs
    try:
        for spec in plan.stages.values():
            if spec.stage == "train":
                _train(plan, spec, weight, ranks)
            else:
                _publish(plan, spec)
        return folder / write_view(plan, frozen.relative_to(folder), "run").parent
    finally:
        os.chdir(before)


def rewrite(result: Path, change: Callable[[Path], None]) -> None:
    """Let ``change`` alter the files in the folder of a result, which is then published anew."""
    change(result)
    manifest = read_manifest(result / MANIFEST)
    names = [name for name in manifest.files if (result / name).exists()]
    write_manifest(result / MANIFEST, manifest.model_copy(update={"files": describe_files(result, names)}))


def put(path: Path, **values: Any) -> None:
    """Change values of a JSON object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _train(plan: Plan, spec: StageSpec, weight: float, ranks: int) -> None:
    lines = [{"step": step, "reward": step / 8, "seconds": 1.0} for step in range(1, spec.steps + 1)]
    Path(spec.folder).mkdir(parents=True)
    (Path(spec.folder) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    store = StateStore(Path(spec.folder))
    for step in spec.cuts:
        whole = torch.tensor([weight, *range(1, 8)]) * step
        role = store.begin(step) / "actor"
        size = len(whole) // ranks
        indexes = [
            write_shards(role, rank, _blocks(whole, rank * size, size), {"scheduler_step": step})
            for rank in range(ranks)
        ]
        trainer = {
            "steps_done": step,
            "samples_seen": 8 * step,
            "samples_digest": f"{step}",
            "kl": {"coefficient": 0.5},
        }
        path = store.commit(step, trainer, {"actor": indexes})
        write_manifest(path / MANIFEST, _manifest(plan, spec, path, step))


def _blocks(whole: torch.Tensor, first: int, size: int) -> Mapping[str, Shard]:
    return {
        name: Shard(whole[first : first + size].clone(), (first,), tuple(whole.shape))
        for name in ("model.w", "optimizer.w.exp_avg")
    }


def _publish(plan: Plan, spec: StageSpec) -> None:
    folder = Path(spec.folder)
    files = {
        "evaluate": {
            "samples.jsonl": json.dumps({"response": "1 2"}) + "\n",
            "result.json": json.dumps(
                {
                    "accuracy": 0.5,
                    "tasks": {"sorting": {"accuracy": 0.5}},
                    "outcomes": {"a": True, "b": False},
                }
            ),
        },
        "megatron": {
            "megatron/release/block0.distcp": "bytes",
            "megatron/README.md": "made",
            "megatron/conversion.json": "{}",
        },
        "export": {"export/README.md": "made", "export/config.json": "{}"},
    }.get(spec.stage, {"model/config.json": "{}", "model/tokenizer.json": "{}"})
    if spec.stage == "sft":
        files |= {"loss.jsonl": '{"step": 1, "nll": 1.0}\n'}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if spec.stage in ("convert", "sft", "export"):
        weights = folder / ("export" if spec.stage == "export" else "model") / "model.safetensors"
        save_file({"w": torch.ones(4)}, weights)
    write_manifest(folder / MANIFEST, _manifest(plan, spec, folder, None))


def _manifest(plan: Plan, spec: StageSpec, folder: Path, step: int | None) -> Manifest:
    sources = {name: plan.stages[ref.id].manifest(ref.step) for name, ref in spec.inputs.items()}
    inputs = {
        name: InputRecord(
            stage=plan.stages[ref.id].stage,
            id=ref.id,
            step=ref.step,
            manifest=os.path.relpath(sources[name], folder),
            digest=read_manifest(Path(sources[name])).digest,
        )
        for name, ref in spec.inputs.items()
    }
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return plan.manifest_of(
        spec,
        step=step,
        inputs=inputs,
        files=describe_files(folder, sorted(path.relative_to(folder) for path in found)),
        steps_planned=spec.steps,
        steps_done=spec.steps,
        hardware=Hardware(cpu="An imaginary processor"),
        created="2026-11-02T10:00:00+00:00",
    )
