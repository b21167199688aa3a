"""Every stage gives the result that its version stands for: golden.json holds it, from tiny runs on a CPU.

A result is reused wherever its identity is the same, and the source is no part of an identity, the stage's version is. So
whoever changes a result raises the version in workflow/campaign/stages.py, and stores the new numbers:
``python -m tests.stages.test_golden``. What is sampled and counted is compared exactly, what is computed to the digits on
which kinds of CPU agree.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from engines.checkpoint import read_state
from engines.dist_checkpoint import DistCheckpoint
from tests.support.jobs import ROOT, finish
from workflow.campaign.build import make_plan
from workflow.campaign.plan import Plan, StageSpec, write_plan
from workflow.campaign.schema import CampaignOptions
from workflow.campaign.stages import STAGES
from workflow.manifest import read_manifest
from workflow.rl.metrics import METRICS_FILE, SFT_CURVE_FILE, read_metrics
from workflow.stages.conversion_record import RELEASE

GOLDEN = Path(__file__).with_name("golden.json")
LEFT_OUT = ("seconds", "per_second", "clip_fraction")
"""Parts of the names of metrics that tell times, or count what lies on one side of a threshold: one more with the last bit."""
CAMPAIGN = {
    "name": "golden",
    "segments": 1,
    "common": [
        "model=micro-qwen3",
        "data=arithmetic",
        "data.train_size=24",
        "data.heldout_size=16",
        "data.wrong_share=0.25",
        "sft.steps=6",
        "sft.lr=1e-2",
        "sft.batch_size=8",
        "sft.demonstrations=16",
        "algorithm.steps=3",
        "algorithm.prompts_per_step=4",
        "algorithm.samples_per_prompt=4",
        "algorithm.mini_batch_size=8",
        "algorithm.epochs=2",
        "rollout.max_new_tokens=8",
        "evaluate.problems=16",
        "reward.kind=function",
        "reward.function=tests.support.rewards:share_of_digits",
    ],
    "runs": {
        "ppo": ["algorithm=ppo", "algorithm.kl.place=reward"],
        "grpo": [
            "algorithm=grpo",
            "algorithm.kl.place=loss",
            "algorithm.entropy_coefficient=0.01",
            "conversion.megatron=true",
        ],
    },
}


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What each stage gives: run in ``folder``, told in a few numbers."""
    (folder / "campaign.yaml").write_text(yaml.safe_dump(CAMPAIGN))
    plan, _ = make_plan(CampaignOptions(campaign=str(folder / "campaign.yaml")), ROOT)
    path = write_plan(plan, folder)
    specs = list(plan.stages.values())
    for spec in [spec for stage in STAGES for spec in specs if spec.stage == stage]:
        finish(folder, path, spec.stage, spec.id, *spec.cuts)
    return {stage: _of_stage(plan, folder, stage) for stage in STAGES}


def _of_stage(plan: Plan, folder: Path, stage: str) -> dict[str, Any]:
    specs = {spec.slug: spec for spec in plan.stages.values() if spec.stage == stage}
    return {
        "identities": {slug: spec.identity for slug, spec in specs.items()},
        "numbers": {slug: _numbers(folder, spec) for slug, spec in specs.items()},
    }


def _numbers(folder: Path, spec: StageSpec) -> dict[str, Any]:
    step = spec.cuts[-1] if spec.cuts else None
    output = folder / spec.output_folder(step)
    numbers: dict[str, Any] = {
        path.relative_to(output).as_posix(): {
            name: float(tensor.double().norm()) for name, tensor in sorted(load_file(path).items())
        }
        for path in sorted(output.rglob("*.safetensors"))
    }
    for path in sorted((folder / spec.folder).glob("*.jsonl")):
        if path.name in (METRICS_FILE, SFT_CURVE_FILE):
            numbers[path.name] = [
                {k: v for k, v in line.items() if not any(part in k for part in LEFT_OUT)}
                for line in read_metrics(path)
            ]
    if spec.stage == "train":
        numbers["trainer"] = {
            key: value for key, value in read_state(output)["trainer"].items() if key not in ("run", "cursor")
        }
    if spec.stage == "megatron":
        checkpoint = DistCheckpoint(output / "megatron" / RELEASE)
        numbers["tensors"] = {
            key: float(checkpoint.read(key).double().norm()) for key in sorted(checkpoint.tensors)
        }
    if spec.stage == "evaluate":
        numbers["result"] = read_manifest(output / "manifest.json").metrics
        samples = (output / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        numbers["responses"] = [json.loads(line)["response"] for line in samples]
    return numbers


def differences(stored: Any, found: Any, where: str = "") -> list[str]:
    """One line for each place at which ``found`` is not what was stored; a further metric makes no other result."""
    if (METRICS_FILE in where or SFT_CURVE_FILE in where) and isinstance(stored, dict):
        found = {name: value for name, value in found.items() if name in stored}
    if isinstance(stored, dict) and isinstance(found, dict) and stored.keys() == found.keys():
        return [line for key in stored for line in differences(stored[key], found[key], f"{where}/{key}")]
    if isinstance(stored, list) and isinstance(found, list) and len(stored) == len(found):
        return [
            line
            for i, pair in enumerate(zip(stored, found, strict=True))
            for line in differences(*pair, f"{where}/{i}")
        ]
    if isinstance(stored, float):
        stored = pytest.approx(stored, rel=1e-4, abs=1e-5)
    return [] if found == stored else [f"{where}: stored {stored}, found {found}"]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The results of this source."""
    return results(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_gives_what_its_version_stands_for(stage: str, found) -> None:
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))[stage]
    assert stored["identities"] == found[stage]["identities"], (
        f"{stage} has a new identity (a version, or a key of the configuration), under which nothing is stored yet: "
        "python -m tests.stages.test_golden"
    )
    lines = differences(stored["numbers"], found[stage]["numbers"])
    assert not lines, _told(stage, lines)


def _told(stage: str, lines: list[str]) -> str:
    return (
        f"{stage} gives another result, and results of its version are reused: raise the stage's version in "
        "workflow/campaign/stages.py, then python -m tests.stages.test_golden\n" + "\n".join(lines[:10])
    )


def store() -> None:
    """Write golden.json; a result that changed under the same identity is refused."""
    old = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        new = results(Path(folder))
    for stage, result in new.items():
        if old.get(stage, {}).get("identities") == result["identities"] and (
            lines := differences(old[stage]["numbers"], result["numbers"])
        ):
            sys.exit(_told(stage, lines))
    GOLDEN.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    store()
