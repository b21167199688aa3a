"""A training whose segments have different layouts learns what one layout learns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from engines.config import ConfigError
from tests.support.jobs import ROOT, finish
from workflow.campaign.build import make_plan
from workflow.campaign.plan import Plan, write_plan
from workflow.campaign.schema import CampaignOptions
from workflow.cli import app
from workflow.manifest import read_manifest
from workflow.rl.metrics import METRICS_FILE, read_metrics

COMMON = [
    *("model=micro-qwen3", "model.architecture.num_key_value_heads=2", "data.train_size=32"),
    *("data.heldout_size=8", "evaluate.problems=8", "sft.steps=2", "sft.batch_size=8"),
    *("sft.demonstrations=16", "rollout.max_new_tokens=8", "algorithm=grpo", "algorithm.steps=3"),
    *("algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=4", "algorithm.mini_batch_size=16"),
    *("algorithm.entropy_coefficient=0.01", "checkpoint.retain=all", "actor.engine=megatron"),
    "actor.engine.layout.tensor_parallel_size=2",
    *("reward.kind=function", "reward.function=tests.support.rewards:share_of_digits"),
]
RELAY = "actor.relay=[{after: 1, layout: {pipeline_parallel_size: 2}}, {after: 2, layout: {data_parallel_size: 2}}]"


def planned(folder: Path, segments: int = 1, relay: str = RELAY, further: Sequence[str] = ()) -> Plan:
    common = [*COMMON, *further]
    runs = {"unchanged": [], "relay": [relay]}
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump({"name": "layouts", "segments": segments, "common": common, "runs": runs}))
    return make_plan(CampaignOptions(campaign=str(path)), ROOT)[0]


def test_segments_of_other_layouts_learn_the_same(tmp_path):
    plan = planned(tmp_path)
    frozen = write_plan(plan, tmp_path / "results" / "layouts")
    for name in ("convert", "sft", "train"):
        for run in ("unchanged", "relay"):
            spec = plan.stages[plan.runs[run].stages[name]]
            for step in spec.cuts or [None]:
                finish(tmp_path, frozen, name, spec.id, step)
    specs = [plan.stages[plan.runs[run].stages["train"]] for run in ("unchanged", "relay")]
    manifests = [read_manifest(tmp_path / specs[1].manifest(step)) for step in (1, 2, 3)]
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    assert [[getattr(m.layout, size) for size in sizes] for m in manifests] == [
        [2, 1, 1],
        [1, 2, 1],
        [1, 1, 2],
    ]
    curves = [read_metrics(tmp_path / spec.folder / METRICS_FILE) for spec in specs]
    for ours, theirs in zip(*curves, strict=True):
        assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], rel=1e-6)
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=5e-6)
    output = tmp_path / "compared.json"
    last = [str(tmp_path / spec.output_folder(3)) for spec in specs]
    CliRunner().invoke(app, ["compare", *last, "--tolerance", "1e-5", "--output", str(output)])
    found = {f["part"]: f["verdict"] for f in json.loads(output.read_text())["pairs"][0]["findings"]}
    # Close and not equal: the layouts were really others, which add up in another order.
    assert (found["samples"], found["weights"], found["optimizer"]) == ("equal", "close", "close")

    # The state at a change of layout is lost: the job after it takes the lost step in the layout that it had.
    folder = tmp_path / specs[1].folder
    shutil.rmtree(folder / "step000003")
    for shard in (folder / "step000002").rglob("*.safetensors"):
        shard.unlink()
    finish(tmp_path, frozen, "train", specs[1].id, 3)
    assert read_manifest(tmp_path / specs[1].manifest(3)).files == manifests[2].files
    assert list((folder / "step000002").rglob("*.safetensors"))


def test_a_relay_is_placement_and_cuts_where_it_changes(tmp_path):
    plan = planned(tmp_path, segments=1)
    unchanged, relay = (plan.stages[plan.runs[run].stages["train"]] for run in ("unchanged", "relay"))
    assert unchanged.identity != relay.identity
    assert unchanged.learning_identity == relay.learning_identity
    assert (unchanged.cuts, relay.cuts) == ([3], [1, 2, 3])
    assert [relay.at(step).layout_text for step in (1, 2, 3)] == ["tp2", "pp2", "dp2"]


@pytest.mark.parametrize(
    ("relay", "told"),
    [
        ("actor.relay=[{after: 3, layout: {}}]", "algorithm.steps=3"),
        ("actor.relay=[{after: 2, layout: {}}, {after: 1, layout: {}}]", "later than the one before"),
        ("actor.relay=[{after: 1, layout: {tensor_parallel_size: 3}}]", "tensor_parallel_size=3"),
        ("critic.relay=[{after: 1, layout: {}}]", "has no effect"),
    ],
)
def test_what_cannot_be_is_refused_while_planning(tmp_path, relay, told):
    with pytest.raises(ConfigError, match=told):
        planned(tmp_path, relay=relay)
