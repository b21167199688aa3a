"""States whose bytes are given up: never while somebody has to read them, and told before anything starts when somebody would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
import yaml

from engines.checkpoint import StateStore
from engines.checkpoint.shards import write_shards
from tests.support.fake_campaign import ROOT, fake_campaign
from workflow.campaign.build import make_plan
from workflow.campaign.plan import CURRENT, read_plan
from workflow.campaign.released import check_released
from workflow.campaign.schema import CampaignOptions
from workflow.manifest import MANIFEST, TWIN
from workflow.stages.retention import release_states


def save_states(folder: Path, steps) -> None:
    for step in steps:
        store = StateStore(folder)
        index = write_shards(store.begin(step) / "actor", 0, {"weight": torch.ones(3)}, {})
        store.commit(step, {}, {"actor": [index]})


def give_states(train, steps, unpublished=()) -> None:
    """Have states of ``steps`` where the invented campaign has manifests; ``unpublished`` are inside segments."""
    manifests = {step: Path(train.manifest(step)).read_text() for step in train.cuts}
    shutil.rmtree(train.folder)
    save_states(Path(train.folder), [*steps, *unpublished])
    for step in steps:
        Path(train.folder, f"step{step:06d}", MANIFEST).write_text(manifests.get(step, "{}"))


def training(plan, run="grpo"):
    return plan.stages[plan.runs[run].stages["train"]]


def test_a_changed_evaluation_of_released_states_is_refused_with_the_remedy(project):
    plan = read_plan(fake_campaign(project.folder, campaign="drill"))
    check_released(plan)
    for run in plan.runs:
        train = training(plan, run)
        give_states(train, train.cuts)
        assert release_states(plan, train) == [2, 4]
    check_released(plan)  # nobody reads them any more
    reader = next(Path(spec.manifest()) for spec in plan.stages.values() if "step000002" in spec.name)
    reader.rename(reader.with_name(TWIN))  # and the workflow engine took its job for failed
    check_released(plan)
    reader.with_name(TWIN).rename(reader)
    before = sorted(Path("results/store").rglob("*"))
    words = ["--config", "campaign=drill", "set=evaluate.problems=16"]
    code, output = project.run(*words)
    assert code != 0
    gone = [training(plan, run).output_folder(step) for run in plan.runs for step in (2, 4)]
    assert f"rm -r {' '.join(sorted(gone))}" in output
    assert "checkpoint.retain=all" in output
    assert sorted(Path("results/store").rglob("*")) == before
    for folder in gone:
        shutil.rmtree(folder)
    changed, _ = make_plan(CampaignOptions(campaign="drill", set="evaluate.problems=16"), ROOT)
    assert training(changed).identity == training(plan).identity
    check_released(changed)
    code, output = project.run("--dry-run", *words)
    assert code == 0, output
    assert all(f"{folder}/manifest.json" in output for folder in gone)


@pytest.mark.parametrize("evaluated", [False, True])
def test_another_campaign_that_cuts_the_same_training_differently_keeps_its_states(
    tmp_path, monkeypatch, evaluated
):
    monkeypatch.chdir(tmp_path)
    drill = yaml.safe_load((ROOT / "configs/campaign/drill.yaml").read_text())
    Path("halves.yaml").write_text(yaml.safe_dump(drill | {"name": "halves", "segments": 2}))
    plans = []
    for campaign in ("drill", "halves.yaml"):
        path = fake_campaign(tmp_path, campaign=campaign)
        path.with_name(CURRENT).symlink_to(path.name)
        plans.append(read_plan(path))
    thirds, halves = plans
    train = training(thirds)
    assert (training(halves).folder, train.cuts, training(halves).cuts) == (train.folder, [2, 4, 6], [3, 6])
    give_states(train, [2, 3, 4, 6])
    reader = halves.runs["grpo"].stages["evaluate"][1]
    assert halves.stages[reader].inputs["model"].step == 3
    if not evaluated:
        Path(halves.stages[reader].manifest()).unlink()
    assert release_states(thirds, train) == ([2, 3, 4] if evaluated else [2, 4])


@pytest.mark.parametrize("other", ["checkpoint.retain=all", "checkpoint.retain=every:4", ""])
def test_what_another_campaign_means_to_keep_is_kept(tmp_path, monkeypatch, other):
    monkeypatch.chdir(tmp_path)
    plan = read_plan(fake_campaign(tmp_path, campaign="drill"))
    path = fake_campaign(tmp_path, campaign="drill", set=other)
    Path("results/other").mkdir()
    Path("results/other", CURRENT).symlink_to(path.resolve())
    train = training(plan)
    assert training(read_plan(path)).id == train.id
    give_states(train, train.cuts)
    expected = {"checkpoint.retain=all": [], "checkpoint.retain=every:4": [2], "": [2, 4]}
    assert release_states(plan, train) == expected[other]


def test_the_next_segment_is_a_reader(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = read_plan(fake_campaign(tmp_path, campaign="drill"))
    train = training(plan)
    give_states(train, train.cuts)
    Path(train.manifest(4)).rename(tmp_path / "of 4")
    assert release_states(plan, train) == []
    (tmp_path / "of 4").rename(train.manifest(4))
    assert release_states(plan, train) == [2, 4]


def test_states_inside_a_segment_are_those_of_the_training(tmp_path, monkeypatch):
    """It may be at work there: before the newest state, when it computes a segment anew, and after it."""
    monkeypatch.chdir(tmp_path)
    plan = read_plan(fake_campaign(tmp_path, campaign="drill"))
    train = training(plan)
    give_states(train, [2, 4], unpublished=[1, 3, 5])
    Path(train.output_folder(6)).mkdir()
    shutil.copy(train.manifest(4), train.manifest(6))
    assert release_states(plan, train) == [2]
    assert StateStore(Path(train.folder)).newest(at_most=1) is not None


def test_of_two_readers_that_publish_at_once_the_last_one_releases(tmp_path, monkeypatch):
    """One looks before the other has published and keeps the state; the other comes while the first is still at it."""
    monkeypatch.chdir(tmp_path)
    plan = read_plan(fake_campaign(tmp_path, campaign="drill"))
    train = training(plan)
    give_states(train, train.cuts)
    holding = (
        "from pathlib import Path; from workflow.campaign.lock import FolderLock\n"
        f"with FolderLock(Path({train.folder!r}), 'release.json'): print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", holding],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert other.stdout.readline() == "held\n"
    with ThreadPoolExecutor() as pool:
        released = pool.submit(release_states, plan, train)
        assert wait([released], timeout=1.5).not_done
        other.communicate("\n")
        assert released.result(timeout=60) == [2, 4]
