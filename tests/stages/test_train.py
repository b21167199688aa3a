"""Where a run is cut, and what is killed, changes nothing: real stages in real processes, compared bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # DTensor imports it on first use, for seconds: better once, before forking
import yaml

from engines.checkpoint import read_state
from workflow.campaign.build import make_plan
from workflow.campaign.plan import Plan, StageSpec, write_plan
from workflow.campaign.schema import CampaignOptions
from workflow.data import Problem
from workflow.manifest import check_files, read_manifest
from workflow.rl.metrics import read_metrics
from workflow.stages.runner import PUBLISHED, STOPPED, run

ROOT = Path(__file__).parents[2]
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
    "reward.function=tests.stages.test_train:share_of_digits",
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


def share_of_digits(response: str, problem: Problem) -> float:
    """A reward that an untrained model can already earn."""
    return sum(map(str.isdigit, response)) / max(len(response), 1)


def make(folder: Path, segments: int, *options: str) -> tuple[Plan, Path]:
    """A plan of both runs in ``folder``; how it is cut is no part of any identity."""
    campaign = {"name": "cuts", "segments": segments, "common": [*COMMON, *options], "runs": RUNS}
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump(campaign))
    plan, _ = make_plan(CampaignOptions(campaign=str(path)), ROOT)
    return plan, write_plan(plan, folder)


def start(folder: Path, plan: Path, stage: str, key: str, step: int | None = None):
    """One job: a process of its own, forked so that it need not import torch again."""

    def job() -> None:
        torch.set_num_threads(1)
        os.chdir(folder)
        os._exit(run(stage, plan, key, step))

    process = multiprocessing.get_context("fork").Process(target=job)
    process.start()
    return process


def finish(*job, expected: int = PUBLISHED) -> None:
    process = start(*job)
    process.join()
    assert process.exitcode == expected


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
    """Return as soon as ``step`` is noted, at whatever the process does next; how many seconds the step took."""
    while True:
        for line in read_metrics(folder / spec.folder / "metrics.jsonl"):
            if line["step"] >= step:
                return line["seconds"]
        assert process.is_alive(), "the job ended before it could be killed"
        time.sleep(0.002)


def content(folder: Path, spec: StageSpec) -> dict:
    """All that training has become: every bit of the last state, and a digest of all that was ever sampled."""
    state = read_state(folder / spec.output_folder(6))
    return {"files": state["files"], "trainer": state["trainer"], "roles": state["roles"]}


@pytest.mark.parametrize("name", list(RUNS))
def test_cut_and_killed_equals_uninterrupted(prepared, tmp_path, name):
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    plan, path = workspace(prepared, whole, 1)
    uninterrupted = plan.stages[plan.runs[name].stages["train"]]
    finish(whole, path, "train", uninterrupted.id, 6)
    assert [folder.name for folder in (whole / uninterrupted.folder).glob("step*")] == ["step000006"]

    plan, path = workspace(prepared, pieces, 3, "checkpoint.save_every=1")
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
    assert set(expected["roles"]) == ({"actor", "critic"} if name == "ppo" else {"actor"})
    assert check_files(pieces / spec.output_folder(6), read_manifest(pieces / spec.manifest(6))) == []

    curves = [read_metrics(folder / spec.folder / "metrics.jsonl") for folder in (whole, pieces)]
    timing = ("seconds", "tokens_per_second")
    for lines in zip(*curves, strict=True):
        first, second = ({k: v for k, v in line.items() if not any(t in k for t in timing)} for line in lines)
        assert first == second
    assert [line["step"] for line in curves[1]] == [1, 2, 3, 4, 5, 6]
    # While the critic warms up, the actor does not learn.
    assert ["actor/loss" in line for line in curves[1]] == [name == "grpo"] + [True] * 5
    assert len({line["reward"] for line in curves[1]}) > 3
    assert all(abs(line["rollout_ratio_max"] - 1) <= 1e-5 for line in curves[1])
    assert all(abs(line["rollout_ratio_min"] - 1) <= 1e-5 for line in curves[1])


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
    texts = [(folder / plan.stages[key].folder / "samples.jsonl").read_text() for key in (before, after)]
    assert texts[0] != texts[1]
