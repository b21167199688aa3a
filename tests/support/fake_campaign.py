"""What a finished campaign leaves behind, made up: real plans and manifests, invented numbers. For tests of the report only."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection
from pathlib import Path

from engines.streams import stream_key
from workflow.campaign.build import make_plan
from workflow.campaign.pace import MEAN_STEP_SECONDS, SAVE_SECONDS, START_SECONDS, STEP_SECONDS
from workflow.campaign.plan import Plan, StageSpec, write_plan
from workflow.campaign.schema import CampaignOptions
from workflow.manifest import (
    Attempt,
    DeviceSeconds,
    FileRecord,
    Hardware,
    InputRecord,
    Manifest,
    read_manifest,
    write_json,
    write_manifest,
)

ROOT = Path(__file__).parents[2]
SECONDS = {"convert": 4.1, "sft": 12.3, "train": 21.0, "evaluate": 5.2, "export": 3.9}
LEVEL = {"sft": 0.664, "ppo": 0.93, "grpo": 0.958}


def fake_campaign(folder: Path, failing: Collection[str] = (), **options: object) -> Path:
    """Write a whole campaign below ``folder`` (the current folder of whoever reads it); returns the path of its plan.

    Args:
        failing: algorithms whose second training segment failed.
        options: of the campaign, such as ``controls=True``.
    """
    plan, _ = make_plan(CampaignOptions(**options), ROOT)
    minute = 0
    for spec in plan.stages.values():
        for step in spec.cuts or [None]:
            minute += 1
            algorithm = _algorithm(spec)
            if algorithm in failing and _lost(plan, spec, step):
                if step in spec.cuts[1:2]:
                    _write_failure(folder, spec, step)
                continue
            write_manifest(folder / spec.manifest(step), _manifest(plan, spec, step, minute))
        if spec.stage in ("sft", "train"):
            _write_metrics(
                folder, spec, limit=spec.cuts[0] + 7 if _algorithm(spec) in failing else spec.steps
            )
    return write_plan(plan, folder / "results" / plan.campaign)


def tell_pace(
    spec: StageSpec, step: int, mean: float, slowest: float = 0.0, save: float = 1.0, start: float = 30.0
) -> None:
    """Let the manifest of a training at ``step``, below the current folder, say how many seconds its parts took."""
    path = Path(spec.manifest(step))
    slowest = max(slowest, mean)
    extra = {START_SECONDS: start, STEP_SECONDS: slowest, MEAN_STEP_SECONDS: mean, SAVE_SECONDS: save}
    write_manifest(path, read_manifest(path).model_copy(update={"extra": extra}))


def _algorithm(spec: StageSpec) -> str:
    return next((name for name in ("ppo", "grpo") if f"-{name}" in spec.slug), "sft")


def _lost(plan: Plan, spec: StageSpec, step: int | None) -> bool:
    """Whether a manifest comes after the first segment."""
    if spec.stage == "train":
        return step != spec.cuts[0]
    return any(ref.step and _lost(plan, plan.stages[ref.id], ref.step) for ref in spec.inputs.values())


def _manifest(plan: Plan, spec: StageSpec, step: int | None, minute: int) -> Manifest:
    inputs = {
        name: InputRecord(
            stage=plan.stages[ref.id].stage,
            id=ref.id,
            step=ref.step,
            manifest="../elsewhere",
            digest=ref.id * 4,
        )
        for name, ref in spec.inputs.items()
    }
    seconds = SECONDS[spec.stage] * (1.6 if _algorithm(spec) == "ppo" else 1.0)
    return plan.manifest_of(
        spec,
        step=step,
        inputs=inputs,
        files={"state.json": FileRecord(bytes=10, sha256="ab" * 32)},
        steps_planned=spec.steps,
        steps_done=spec.steps,
        seeds={"seed": 0},
        packages={"python": "3.11.2", "torch": "2.13.0", "transformers": "5.18.0"},
        hardware=Hardware(cpu="An imaginary processor"),
        git_commit="0123456789abcdef0123456789abcdef01234567",
        attempts=[Attempt(number=1, first_step=1, last_step=step, end="published", seconds=seconds)],
        device_seconds=DeviceSeconds(used=seconds * spec.world_size),
        metrics=_stage_metrics(plan, spec),
        created=f"2026-11-02T10:{minute:02d}:00+00:00",
    )


def _stage_metrics(plan: Plan, spec: StageSpec) -> dict[str, object]:
    if spec.stage == "convert":
        return {"source": {"kind": "architecture", "model_type": "qwen3", "license": "Apache-2.0"}}
    return _evaluation(plan, spec) if spec.stage == "evaluate" else {}


def _evaluation(plan: Plan, spec: StageSpec) -> dict[str, object]:
    source = spec.inputs["model"]
    trained = plan.stages[source.id]
    accuracy = LEVEL["sft"] + (0.03 if "more" in trained.slug else 0.0)
    if source.step and not trained.config["reward"]["shuffled"]:
        share = 1 - math.exp(-3.5 * source.step / trained.steps)
        accuracy += (LEVEL[_algorithm(trained)] - LEVEL["sft"]) * share
    return {"accuracy": accuracy, "accuracy_ci95": [accuracy - 0.026, accuracy + 0.024], "problems": 1024}


def _write_metrics(folder: Path, spec: StageSpec, limit: int) -> None:
    draw = random.Random(stream_key(spec.identity))
    lines = []
    for step in range(1, limit + 1):
        done = 1 - math.exp(-3.5 * step / spec.steps)
        if spec.stage == "sft":
            lines.append(
                {"step": step, "nll": 2.1 * math.exp(-4 * step / spec.steps) + 0.4 + draw.gauss(0, 0.03)}
            )
            continue
        learns = not spec.config["reward"]["shuffled"]
        level = 0.55 + 0.38 * done * learns + draw.gauss(0, 0.02)
        line = {
            "step": step,
            "reward": level,
            "accuracy": level - 0.02,
            "response_length": 13 + draw.gauss(0, 0.1),
            "finished": min(1.0, 0.985 + draw.gauss(0, 0.004)),
            "actor/entropy": 0.42 - 0.25 * done * learns + draw.gauss(0, 0.01),
            "actor/approx_kl": abs(draw.gauss(0.0012, 0.0004)),
            "actor/clip_fraction_high": abs(draw.gauss(0.01, 0.004)),
            "actor/grad_norm": abs(draw.gauss(0.5, 0.1)),
            "tokens_per_second": draw.gauss(11000, 500),
            "seconds": draw.gauss(0.62, 0.03),
            "seconds/rollout": 0.31,
            "seconds/reward": 0.02,
            "seconds/old_log_probs": 0.06,
            "seconds/actor": 0.19,
            "seconds/sync": 0.01,
        }
        if _algorithm(spec) == "ppo":
            line |= {
                "explained_variance": done * 0.6 + draw.gauss(0, 0.03),
                "seconds/critic": 0.2,
                "seconds/values": 0.05,
            }
        lines.append(line)
    path = folder / spec.folder / ("loss.jsonl" if spec.stage == "sft" else "metrics.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _write_failure(folder: Path, spec: StageSpec, step: int) -> None:
    record = {
        "stage": spec.stage,
        "id": spec.id,
        "step": step,
        "class": "RewardError",
        "message": "reward.function='mine:score' on problem 1a2b3c: returned nan; the response was '<b>3 & 4</b>'",
        "log": spec.log(step),
        "last_lines": [
            "Traceback (most recent call last):",
            '  File "mine.py", line 3, in score',
            "ValueError",
        ],
        "created": "2026-11-02T10:09:00+00:00",
    }
    write_json(folder / spec.failure(step), record)
