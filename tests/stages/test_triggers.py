"""Files by which people ask a running training to save or to stop; neither changes a bit of what it becomes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from engines.checkpoint import StateStore, read_state
from tests.support.jobs import ROOT, finish, start
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.plan import StageSpec, write_plan
from workflow.campaign.triggers import SAVE, STOP, Triggers
from workflow.manifest import read_manifest
from workflow.rl.metrics import METRICS_FILE, read_metrics
from workflow.stages.runner import STOPPED_BY_USER

STEPS = 80


def prepare(folder: Path) -> tuple[Path, StageSpec]:
    """The drill's PPO run in one long segment, up to its first step."""
    text = (ROOT / "configs/campaign/drill.yaml").read_text().replace("segments: 3", "segments: 1")
    folder.mkdir()
    (folder / "drill.yaml").write_text(text)
    options = {
        "campaign": str(folder / "drill.yaml"),
        "site": "local",
        "set": f"algorithm.steps={STEPS} checkpoint.retain=all",
    }
    plan, _ = plan_campaign(read_options(options), ROOT)
    path = write_plan(plan, folder / "results/drill")
    (path.parent / "ppo").mkdir()
    for stage in ("convert", "sft"):
        finish(folder, path, stage, plan.runs["ppo"].stages[stage])
    return path, plan.stages[plan.runs["ppo"].stages["train"]]


def until(process, met: Callable[[], bool]) -> None:
    while not met():
        assert process.is_alive(), "the job ended before what was waited for"
        time.sleep(0.002)


def steps_done(folder: Path, spec: StageSpec) -> int:
    return max((line["step"] for line in read_metrics(folder / spec.folder / METRICS_FILE)), default=0)


def test_a_run_that_is_saved_killed_stopped_and_continued_is_the_undisturbed_run(tmp_path):
    path, spec = prepare(tmp_path / "whole")
    finish(tmp_path / "whole", path, "train", spec.id, STEPS)
    expected = read_state(tmp_path / "whole" / spec.output_folder(STEPS))

    folder = tmp_path / "asked"
    path, spec = prepare(folder)
    store, save, stop = (
        StateStore(folder / spec.folder),
        path.parent / "ppo" / SAVE,
        path.parent / "ppo" / STOP,
    )
    process = start(folder, path, "train", spec.id, STEPS)
    until(process, lambda: steps_done(folder, spec) >= 2)
    save.touch()
    until(process, lambda: not save.exists())
    process.kill()
    process.join()
    saved = read_state(store.newest())["step"]
    assert 2 <= saved < STEPS

    process = start(folder, path, "train", spec.id, STEPS)
    resumed = steps_done(folder, spec)  # the first start came further than its last state
    until(process, lambda: steps_done(folder, spec) > max(resumed, saved + 2))
    stop.touch()
    process.join()
    assert process.exitcode == STOPPED_BY_USER
    stopped = read_state(store.newest())["step"]
    assert saved < stopped < STEPS
    said = (folder / spec.log(STEPS)).read_text()
    assert f"the state after step {stopped} is saved; stopped by {stop}; to go on, rm {stop} and run" in said
    finish(folder, path, "train", spec.id, STEPS, expected=STOPPED_BY_USER)  # the file is still there
    assert not (folder / spec.failure(STEPS)).exists()

    stop.unlink()
    finish(folder, path, "train", spec.id, STEPS)
    assert read_state(folder / spec.output_folder(STEPS)) == expected
    attempts = read_manifest(folder / spec.manifest(STEPS)).attempts
    assert [attempt.end for attempt in attempts] == ["killed", "stopped", "published"]
    assert [attempt.first_step for attempt in attempts[1:]] == [saved + 1, stopped + 1]


def test_a_stage_of_two_runs_stops_when_both_are_stopped_and_saves_when_either_asks(tmp_path):
    plan, _ = plan_campaign(read_options({"campaign": "drill", "site": "local"}), ROOT)
    shared = plan.stages[plan.runs["ppo"].stages["sft"]]
    triggers = Triggers.of(plan, tmp_path, shared)
    for run in ("ppo", "grpo"):
        (tmp_path / run).mkdir()
    assert not triggers.save_asked
    (tmp_path / "grpo" / SAVE).touch()
    assert triggers.save_asked
    triggers.saved()
    assert not triggers.save_asked
    (tmp_path / "grpo" / STOP).touch()
    assert not triggers.stop_asked
    assert Triggers.of(plan, tmp_path, plan.stages[plan.runs["grpo"].stages["train"]]).stop_asked
    (tmp_path / "ppo" / STOP).touch()
    assert triggers.stop_asked
    assert all(str(tmp_path / run / STOP) in triggers.way_on for run in ("ppo", "grpo"))


def test_a_stage_of_no_run_is_never_stopped(tmp_path):
    plan, _ = plan_campaign(read_options({"campaign": "drill", "site": "local"}), ROOT)
    alone = plan.model_copy(update={"runs": {}})
    assert not Triggers.of(alone, tmp_path, next(iter(plan.stages.values()))).stop_asked
