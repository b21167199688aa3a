"""Where a run is cut, and what is killed, changes nothing: real stages in real processes, compared bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

from engines.checkpoint import read_state
from engines.checkpoint.verify import STATE_FILE
from tests.support.jobs import ROOT, finish, start
from tests.support.processes import ray_ranks
from workflow.campaign.build import make_plan
from workflow.campaign.plan import CURRENT, Plan, StageSpec, write_plan
from workflow.campaign.schema import CampaignOptions
from workflow.manifest import check_files, read_manifest, verify
from workflow.rl.metrics import read_metrics, without_timing
from workflow.stages.publication import withdraw
from workflow.stages.runner import OWN_ERROR, PUBLISHED, STOPPED

COMMON = [
    "model=micro-qwen3",
    "data.train_size=20",  # 8 prompts a step: steps go across the borders of epochs
    "data.heldout_size=16",
    "sft.steps=3",
    "sft.batch_size=8",
    "sft.demonstrations=16",
    "algorithm.steps=6",
    "algorithm.prompts_per_step=8",
    "algorithm.samples_per_prompt=4",
    "algorithm.mini_batch_size=16",
    "algorithm.epochs=2",
    "algorithm.shuffle=true",
    "algorithm.lr=1e-3",
    "algorithm.optimizer.scheduler.name=cosine",
    "rollout.max_new_tokens=8",
    "evaluate.problems=16",
    "reward.kind=function",
    "reward.function=tests.support.rewards:share_of_digits",
]
RUNS = {
    "ppo": [
        "algorithm=ppo",
        "algorithm.kl.place=reward",
        "algorithm.kl.adaptive=true",
        "algorithm.kl.horizon=100",
        "algorithm.critic_warmup_steps=1",
        "algorithm.gae_lambda=0.95",
    ],
    "grpo": ["algorithm=grpo", "algorithm.kl.place=loss", "algorithm.entropy_coefficient=0.01"],
}


def make(folder: Path, segments: int, *options: str) -> tuple[Plan, Path]:
    """A plan of both runs in ``folder``; how it is cut is no part of any identity."""
    campaign = {"name": "cuts", "segments": segments, "common": [*COMMON, *options], "runs": RUNS}
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump(campaign))
    plan, _ = make_plan(CampaignOptions(campaign=str(path)), ROOT)
    return plan, write_plan(plan, folder)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder in which everything before training is done."""
    folder = tmp_path_factory.mktemp("prepared")
    plan, path = make(folder, 1)
    stages = plan.runs["ppo"].stages
    finish(folder, path, "convert", stages["convert"])
    finish(folder, path, "sft", stages["sft"])
    return folder


def workspace(prepared: Path, folder: Path, segments: int, *options: str) -> tuple[Plan, Path]:
    shutil.copytree(prepared / "results", folder / "results")
    return make(folder, segments, *options)


def wait_for_step(spec: StageSpec, folder: Path, step: int, process) -> float:
    """Return as soon as ``step`` is noted; seconds in which the process saves it or begins the next, and cannot end.

    A first step is no measure of that: it takes many times as long as those that follow.
    """
    while True:
        for line in read_metrics(folder / spec.folder / "metrics.jsonl"):
            if line["step"] >= step:
                return min(line["seconds"], 0.05)
        assert process.is_alive(), "the job ended before it could be killed"
        time.sleep(0.002)


def content(folder: Path, spec: StageSpec) -> dict:
    """All that training has become: every bit of the last state, and a digest of all that was ever sampled."""
    state = read_state(folder / spec.output_folder(6))
    return {"files": state["files"], "trainer": state["trainer"], "roles": state["roles"]}


def same_curve(one: Path, other: Path) -> list[dict]:
    """The metrics of both folders, which differ in times only."""
    curves = [
        [without_timing(line) for line in read_metrics(path)]
        for path in (one / "metrics.jsonl", other / "metrics.jsonl")
    ]
    assert curves[0] == curves[1]
    return curves[0]


@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.parametrize("name", list(RUNS))
def test_cut_and_killed_equals_uninterrupted(prepared, tmp_path, name, asynchronous):
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    plan, path = workspace(prepared, whole, 1)
    uninterrupted = plan.stages[plan.runs[name].stages["train"]]
    finish(whole, path, "train", uninterrupted.id, 6)
    assert [folder.name for folder in (whole / uninterrupted.folder).glob("step*")] == ["step000006"]

    saving = ("checkpoint.save_every=1", f"checkpoint.asynchronous={asynchronous}")
    plan, path = workspace(prepared, pieces, 3, *saving)
    spec = plan.stages[plan.runs[name].stages["train"]]
    assert (spec.identity, spec.cuts) == (uninterrupted.identity, [2, 4, 6])
    victim, moment = random.choice(spec.cuts), random.random()
    for cut in spec.cuts:
        if cut == victim:
            process = start(pieces, path, "train", spec.id, cut)
            time.sleep(moment * wait_for_step(spec, pieces, cut - 1, process))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
        finish(pieces, path, "train", spec.id, cut)
        manifest = read_manifest(pieces / spec.manifest(cut))
        assert (manifest.steps_planned, manifest.steps_done) == (2, 2)

    found, expected = content(pieces, spec), content(whole, uninterrupted)
    assert found == expected, f"killed in the segment to step {victim}, {moment} after its first step"
    shutil.rmtree(pieces / spec.output_folder(2))  # computed anew, it changes nothing of what comes after it
    finish(pieces, path, "train", spec.id, 2)
    assert content(pieces, spec) == expected
    lineage = verify(pieces / spec.manifest(6))  # three segments, sft, convert
    assert (lineage.manifests, lineage.problems) == (5, [])
    # Another campaign cuts it elsewhere: it finds what is there, and gives up nothing that this one has still to evaluate.
    (pieces / "results" / "cuts").mkdir()
    (pieces / "results" / "cuts" / CURRENT).symlink_to(path)
    finish(pieces, make(pieces, 2)[1], "train", spec.id, 3)
    assert all((pieces / spec.output_folder(step) / STATE_FILE).exists() for step in (2, 3, 4, 6))
    assert set(expected["roles"]) == ({"actor", "critic"} if name == "ppo" else {"actor"})
    assert check_files(pieces / spec.output_folder(6), read_manifest(pieces / spec.manifest(6))) == []

    curve = same_curve(whole / uninterrupted.folder, pieces / spec.folder)
    assert [line["step"] for line in curve] == [1, 2, 3, 4, 5, 6]
    # While the critic warms up, the actor does not learn.
    assert ["actor/loss" in line for line in curve] == [name == "grpo"] + [True] * 5
    assert len({line["reward"] for line in curve}) > 3
    assert all(abs(line["rollout_ratio_max"] - 1) <= 1e-5 for line in curve)
    assert all(abs(line["rollout_ratio_min"] - 1) <= 1e-5 for line in curve)


def test_on_ray_too_a_killed_rank_and_a_killed_head_change_nothing(prepared, tmp_path):
    """Two fsdp2 ranks: one of them is killed in the first segment, the process that leads them in the second."""
    layout = [
        f"{role}.{word}"
        for role in ("actor", "critic", "reference")
        for word in ("engine=fsdp2", "engine.layout.data_parallel_size=2")
    ]
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    plan, path = workspace(prepared, whole, 1, *layout)
    uninterrupted = plan.stages[plan.runs["grpo"].stages["train"]]
    finish(whole, path, "train", uninterrupted.id, 6)

    saving = ("checkpoint.save_every=1", "checkpoint.asynchronous=true")
    plan, path = workspace(prepared, pieces, 2, *saving, *layout)
    spec = plan.stages[plan.runs["grpo"].stages["train"]]
    assert (spec.identity, spec.cuts, spec.layout.world_size) == (uninterrupted.identity, [3, 6], 2)
    moment = random.random()
    for cut, expected in ((3, OWN_ERROR), (6, -signal.SIGKILL)):
        process = start(pieces, path, "train", spec.id, cut)
        seconds = wait_for_step(spec, pieces, cut - 2, process)
        ranks = ray_ranks(process.pid)
        assert len(ranks) == 2
        time.sleep(moment * seconds)
        os.kill(random.choice(ranks) if expected == OWN_ERROR else process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == expected
        if expected == OWN_ERROR:
            failure = json.loads((pieces / spec.failure(cut)).read_text())
            assert (failure["class"], "died" in failure["message"]) == ("WorkerError", True)
        finish(pieces, path, "train", spec.id, cut)
    assert content(pieces, spec) == content(whole, uninterrupted), f"killed {moment} of a step after a step"
    same_curve(whole / uninterrupted.folder, pieces / spec.folder)
    ends = [[a.end for a in read_manifest(pieces / spec.manifest(cut)).attempts] for cut in spec.cuts]
    assert ends == [["error", "published"], ["killed", "published"]]


def test_a_published_state_that_was_damaged_is_passed_over_and_made_good(prepared, tmp_path):
    plan, path = workspace(prepared, tmp_path / "run", 3)
    folder, spec = tmp_path / "run", plan.stages[plan.runs["grpo"].stages["train"]]
    finish(folder, path, "train", spec.id, 2)
    state = folder / spec.output_folder(2)
    shards = state / "actor" / "rank00000.safetensors"
    whole = shards.read_bytes()
    shards.write_bytes(whole[:-1])
    finish(folder, path, "train", spec.id, 4)
    log = (folder / spec.log(4)).read_text()
    assert f"Damaged training state passed over: {spec.output_folder(2)}/actor/rank00000.safetensors" in log
    assert shards.read_bytes() == whole
    assert verify(folder / spec.manifest(4)).problems == []
    assert [line["step"] for line in read_metrics(folder / spec.folder / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_stop_request_saves_and_the_same_command_continues(prepared, tmp_path):
    plan, path = workspace(prepared, tmp_path / "stopped", 1)
    folder, spec = tmp_path / "stopped", plan.stages[plan.runs["grpo"].stages["train"]]
    process = start(folder, path, "train", spec.id, 6)
    wait_for_step(spec, folder, 2, process)
    process.terminate()
    process.join()
    assert process.exitcode == STOPPED
    (saved,) = (folder / spec.folder).glob("step*")
    assert 2 <= read_state(saved)["step"] < 6
    assert not (folder / spec.manifest(6)).exists()
    finish(folder, path, "train", spec.id, 6)
    attempts = read_manifest(folder / spec.manifest(6)).attempts
    assert [attempt.end for attempt in attempts] == ["stopped", "published"]
    assert attempts[1].first_step == attempts[0].last_step + 1


def test_behind_a_later_state_a_segment_is_stopped_and_goes_on_and_is_not_given_up(prepared, tmp_path):
    """Its first result goes while the next segment trains; then it is computed anew, in two starts."""
    plan, path = workspace(prepared, tmp_path / "run", 2, "checkpoint.save_every=1")
    folder, spec = tmp_path / "run", plan.stages[plan.runs["grpo"].stages["train"]]
    finish(folder, path, "train", spec.id, 3)
    first = read_manifest(folder / spec.manifest(3))
    process = start(folder, path, "train", spec.id, 6)
    wait_for_step(spec, folder, 4, process)
    withdraw(folder / spec.output_folder(3))
    process.join()
    assert process.exitcode == PUBLISHED
    assert read_manifest(folder / spec.manifest(6)).inputs["state"].digest == first.digest
    expected = content(folder, spec)

    shutil.rmtree(folder / spec.output_folder(3))
    process = start(folder, path, "train", spec.id, 3)
    state = folder / spec.folder / "step000001" / STATE_FILE
    while not state.exists():
        assert process.is_alive(), "the job ended before it could be stopped"
        time.sleep(0.002)
    process.terminate()
    process.join()
    assert process.exitcode == STOPPED
    finish(folder, path, "train", spec.id, 3)
    *_, stopped, last = read_manifest(folder / spec.manifest(3)).attempts
    assert (stopped.end, last.end) == ("stopped", "published")
    assert last.first_step == stopped.last_step + 1
    assert [step.name for step in sorted((folder / spec.folder).glob("step*"))] == [
        "step000003",
        "step000006",
    ]
    assert content(folder, spec) == expected


def test_evaluation_of_model_and_state(prepared, tmp_path):
    plan, path = workspace(prepared, tmp_path / "evaluated", 1)
    folder, stages = tmp_path / "evaluated", plan.runs["grpo"].stages
    finish(folder, path, "train", stages["train"], 6)
    before, after = stages["evaluate"]
    for key in (before, after):
        finish(folder, path, "evaluate", key)
        manifest = read_manifest(folder / plan.stages[key].manifest())
        metrics = manifest.metrics
        low, high = metrics["accuracy_ci95"]
        assert metrics["problems"] == 16
        assert 0 <= low <= metrics["accuracy"] <= high <= 1
        samples = (folder / plan.stages[key].folder / "samples.jsonl").read_text().splitlines()
        assert len(samples) == 16
        assert {"prompt", "answer", "response", "correct"} == set(json.loads(samples[0]))
        result = json.loads((folder / plan.stages[key].folder / "result.json").read_text())
        outcomes = result.pop("outcomes")
        assert (result, len(outcomes), sum(outcomes.values())) == (metrics, 16, metrics["correct"])
    texts = [(folder / plan.stages[key].folder / "samples.jsonl").read_text() for key in (before, after)]
    assert texts[0] != texts[1]
