"""Results side by side: equal, close, different, or not comparable at all."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from engines.checkpoint import StateStore, read_state
from engines.checkpoint.shards import Shard, write_shards
from tests.support.jobs import ROOT, finish
from workflow.campaign.build import make_plan
from workflow.campaign.plan import write_plan
from workflow.campaign.schema import CampaignOptions
from workflow.campaign.view import write_view
from workflow.cli import app
from workflow.compare.tensors import Tensor, apart, folder_tensors, role_tensors

COMMON = [
    *("model=micro-qwen3", "data.train_size=16", "data.heldout_size=8", "evaluate.problems=8"),
    *("sft.steps=2", "sft.batch_size=8", "sft.demonstrations=16", "rollout.max_new_tokens=8"),
    *(
        "algorithm=grpo",
        "algorithm.steps=2",
        "algorithm.prompts_per_step=8",
        "algorithm.samples_per_prompt=2",
    ),
    *("algorithm.mini_batch_size=16", "algorithm.entropy_coefficient=0.01"),
]


def compute(folder: Path, *options: str, without: Collection[str] = ("export",), segments: int = 1) -> Path:
    """A campaign of one run, computed in ``folder`` but for some stages; returns the folder of the run."""
    path = folder / "campaign.yaml"
    folder.mkdir()
    values = {"name": "one", "segments": segments, "common": [*COMMON, *options], "runs": {"run": []}}
    path.write_text(yaml.safe_dump(values))
    plan, _ = make_plan(CampaignOptions(campaign=str(path)), ROOT)
    frozen = write_plan(plan, folder / "results" / "one")
    run = plan.runs["run"]
    for stage in without:
        del run.stages[stage]
    for id in run.ids():
        for step in plan.stages[id].cuts or [None]:
            finish(folder, frozen, plan.stages[id].stage, id, step)
    before = Path.cwd()
    os.chdir(folder)  # links are relative to where the workflow runs
    try:
        return folder / write_view(plan, frozen.relative_to(folder), "run").parent
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    return compute(tmp_path_factory.mktemp("one") / "one")


@pytest.fixture(scope="module")
def in_pieces(tmp_path_factory) -> Path:
    """The same in small micro-batches: the same sums in another order."""
    folder = tmp_path_factory.mktemp("pieces") / "pieces"
    return compute(folder, "engine.dynamic_micro_batches=false", "engine.micro_batch_size=4")


def baton(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.output


def findings(folder: Path, *words: object) -> tuple[int, dict[tuple[str, str], dict]]:
    """Exit code, and the findings by stage and part."""
    code, output = baton("compare", *words, "--output", folder / "compared.json")
    assert (folder / "compared.json").exists(), output
    record = json.loads((folder / "compared.json").read_text())
    assert record["passed"] == (code == 0)
    found = {}
    for pair in record["pairs"]:
        side = pair["a"] or pair["b"]
        for finding in pair["findings"]:
            found[side["stage"], finding["part"]] = finding
    return code, found


def test_a_result_equals_itself_in_all_parts(one, tmp_path):
    shutil.copytree(one.parents[2], tmp_path / "copy", symlinks=True)
    code, found = findings(tmp_path, one, tmp_path / "copy" / "results" / "one" / "run")
    assert code == 0
    assert {key: finding["verdict"] for key, finding in found.items()} == dict.fromkeys(
        [
            *(("convert", "weights"), ("convert", "files")),
            *(("sft", part) for part in ("weights", "files", "curve")),
            *(("train", part) for part in ("weights", "optimizer", "samples", "counters", "curve")),
            *(("evaluate", part) for part in ("samples", "outcomes", "metrics")),
        ],
        "equal",
    )


def test_a_run_that_was_cut_equals_the_one_that_was_not(one, tmp_path):
    cut = compute(tmp_path / "cut", segments=2)
    code, output = baton("compare", one, cut)
    assert (code, "none differs; 2 on one side only" in output) == (0, True), output


def test_micro_batches_are_close_and_only_a_tolerance_lets_them_pass(one, in_pieces, tmp_path):
    code, found = findings(tmp_path, one, in_pieces)
    assert code == 1
    assert found["convert", "weights"]["verdict"] == "equal"
    for part in ("weights", "optimizer", "curve"):
        assert found["train", part]["verdict"] == "different"
        assert 0 < found["train", part]["difference"] < 1e-3
    assert found["train", "samples"]["verdict"] == "equal"
    code, found = findings(tmp_path, one, in_pieces, "--tolerance", "1e-3")
    assert code == 0
    assert found["train", "weights"]["verdict"] == "close"


def test_another_backend_learns_the_same(tmp_path):
    """What a parity report is made of; tests/stages/test_relay_of_layouts.py compares layouts."""
    folders = [
        compute(tmp_path / backend, "algorithm=ppo", f"engine={backend}", without=("evaluate", "export"))
        for backend in ("fsdp2", "megatron")
    ]
    code, found = findings(tmp_path, *folders, "--tolerance", "1e-3")
    parts = ("weights", "optimizer", "samples", "curve")
    assert [found["train", part]["verdict"] for part in parts] == ["close", "close", "equal", "close"], found
    assert code == 0
    assert max(found["train", part]["difference"] for part in ("weights", "optimizer")) < 1e-4


def test_one_result_can_be_compared_alone(one, in_pieces):
    states = [path / "train" / "step000002" for path in (one, in_pieces)]
    code, output = baton("compare", *states, "--tolerance", "1e-3")
    assert code == 0
    assert "1 results compared: none differs" in output


def test_other_learning_is_refused_with_the_paths_that_differ(one, tmp_path):
    options = ("seed=1", "sft.lr=1e-5", "engine.token_budget=512")
    other = compute(tmp_path / "other", *options, without=("train", "evaluate", "export"))
    code, output = baton("compare", one / "sft", other / "sft")
    assert code == 2
    assert "do not learn the same" in output
    assert "sft.lr: " in output
    assert "input 'model': seed: 0 | 1" in output
    assert "token_budget" not in output
    assert baton("compare", one, other)[0] == 2
    code, output = baton("compare", one, tmp_path)
    assert (code, "give a result, a run or a campaign" in output) == (2, True)


def test_a_difference_of_any_part_is_found(one, tmp_path):
    """Altered bytes, a step that is missing from the curve, a result that only one side has."""
    copy = tmp_path / "copy"
    shutil.copytree(one.parents[2], copy, symlinks=True)
    run = copy / "results" / "one" / "run"
    metrics = run / "train" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(True)[0])
    shard = run / "train" / "step000002" / "actor" / "rank00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, found = findings(tmp_path, one, run)
    assert code == 1
    assert any("its digest is not the published one" in finding["note"] for finding in found.values())
    state = one / "train" / "step000002" / "actor" / shard.name
    shard.write_bytes(state.read_bytes())
    code, found = findings(tmp_path, one, run)
    assert (code, found["train", "curve"]["note"]) == (1, "steps that only one side has: [2]")
    record = json.loads((run / "run.json").read_text())
    record["stages"] = [stage for stage in record["stages"] if stage["stage"] != "evaluate"]
    (run / "run.json").write_text(json.dumps(record))
    _, found = findings(tmp_path, one, run)
    assert found["evaluate", "result"]["note"] == "only in A"


def test_released_states_are_compared_by_their_digests(one, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(one.parents[2], copy, symlinks=True)
    state = copy / "results" / "one" / "run" / "train" / "step000002"
    (state / "state.json").rename(state / "released.json")
    shutil.rmtree(state / "actor")
    code, found = findings(tmp_path, one / "train" / "step000002", state)
    assert (code, found["train", "weights"]["verdict"]) == (0, "equal")
    assert "released" in found["train", "weights"]["note"]


def test_apart_counts_bits_and_measures_numbers():
    def tensors(**values):
        arrays = {name: numpy.array(value, "f4") for name, value in values.items()}
        return {name: Tensor("F32", partial(numpy.copy, array)) for name, array in arrays.items()}

    assert apart(tensors(a=[1, math.nan]), tensors(a=[1, math.nan])).unequal == 0
    signs = apart(tensors(a=[0.0, 1]), tensors(a=[-0.0, 1]))
    assert (signs.unequal, signs.largest, signs.where) == (1, 0.0, "a")
    assert apart(tensors(a=[1.5]), tensors(a=[1.0])).largest == 0.5
    assert apart(tensors(a=[math.nan]), tensors(a=[1.0])).largest == math.inf
    assert apart(tensors(a=[1.0], b=[1.0]), tensors(a=[1.0])).where == "b"
    assert apart(tensors(a=[[1.0]]), tensors(a=[1.0])).largest == math.inf
    # Beside a tensor of norm 1 one of norm 1e-9 is rounding; of another kind it is not.
    for name, measured in (("m.y.w", 1e-6), ("m.y.v", 1.0)):
        sides = [tensors(**{"m.x.w": [1.0], name: [x]}) for x in (2e-9, 1e-9)]
        assert apart(*sides).largest == pytest.approx(measured, rel=1e-3)
    # Nor is what another role holds, or what is infinite, a measure for it.
    for other in ([1e6], [math.inf]):
        sides = [tensors(**{"critic.w.exp_avg_sq": other, "actor.w.exp_avg_sq": [x]}) for x in (2.0, 1.0)]
        assert apart(*sides).largest == 1.0
    both = [tensors(**{"actor.a.w": [math.inf], "actor.b.w": [x]}) for x in (2.0, 1.0)]
    assert apart(*both).largest == 1.0
    # A count is another one or it is not.
    assert apart(tensors(**{"a.step": [999.0]}), tensors(**{"a.step": [1000.0]})).largest == math.inf


def test_shards_and_types_are_read_as_torch_reads_them(tmp_path):
    whole = torch.arange(24.0).reshape(6, 4)
    store = StateStore(tmp_path)
    folder = store.begin(1) / "actor"
    indexes = [
        write_shards(folder, rank, {"model.w": Shard(whole[low:high], (low, 0), (6, 4))}, {})
        for rank, (low, high) in enumerate([(0, 1), (1, 6), (6, 6)])
    ]
    path = store.commit(1, {}, {"actor": indexes})
    found = role_tensors(path, read_state(path)["roles"]["actor"], "model.")
    assert numpy.array_equal(found["model.w"].read(), whole.numpy())
    tensors = {
        "half": torch.randn(5).bfloat16(),
        "double": torch.randn(2, 3, dtype=torch.float64),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = folder_tensors([tmp_path / "model.safetensors"])
    for name, tensor in tensors.items():
        expected = tensor.float() if name == "half" else tensor
        assert numpy.array_equal(found[name].read(), expected.numpy()), name


def test_a_type_is_part_of_a_tensor(tmp_path):
    """Equal values of two types are not equal bits, and equal bytes of two types are not equal values."""

    def written(name: str, tensor: torch.Tensor) -> dict[str, Tensor]:
        save_file({"w": tensor}, tmp_path / name)
        return folder_tensors([tmp_path / name])

    values = torch.tensor([1.0, -2.0, 0.5])
    full, half = written("full", values), written("half", values.bfloat16())
    found = apart(half, full)
    assert (found.unequal, found.largest, found.where) == (1, 0.0, "w: BF16 | F32")
    assert apart(half, half).unequal == 0
    one, other = (
        written("one", values.to(torch.float8_e4m3fn)),
        written("other", values.to(torch.float8_e5m2)),
    )
    assert apart(one, one).unequal == 0
    alike = written("alike", values.to(torch.float8_e4m3fn).view(torch.float8_e5m2))
    assert apart(one, alike).largest == apart(one, other).largest == math.inf
    whole = written("whole", torch.tensor([1, -2, 0]))
    assert apart(whole, written("narrow", torch.tensor([1, -2, 0], dtype=torch.int8))).largest == math.inf
