"""Trackers: what they hold is what metrics.jsonl and the evaluations say, once, however often the report is written."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engines.config import ConfigError
from tests.support.fake_campaign import ROOT, fake_campaign
from workflow.campaign.head import plan_campaign
from workflow.campaign.plan import read_plan
from workflow.campaign.schema import CampaignOptions
from workflow.reporting.collect import collect
from workflow.reporting.trackers import TrackerMissing, scalars, track
from workflow.stages.report import main


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = fake_campaign(tmp_path)
    for _ in range(2):
        assert main(["--plan", str(plan)]) == 0
    train = next(
        spec for spec in read_plan(plan).stages.values() if spec.stage == "train" and "grpo" in spec.slug
    )
    lines = [json.loads(line) for line in Path(train.folder, "metrics.jsonl").read_text().splitlines()]
    logged = read_events(plan.parent / "tensorboard" / "grpo")
    assert len(list((plan.parent / "tensorboard" / "grpo").iterdir())) == 1
    assert [step for step, _ in logged["reward"]] == [line["step"] for line in lines]
    assert [value for _, value in logged["reward"]] == pytest.approx([line["reward"] for line in lines])
    assert [step for step, _ in logged["heldout/accuracy"]] == [0, *train.cuts]


@pytest.mark.parametrize(("tracker", "package"), [("wandb", "wandb"), ("mlflow", "mlflow")])
def test_missing_package_is_named(tmp_path: Path, monkeypatch, capsys, tracker: str, package: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    plan = fake_campaign(tmp_path, set=f"tracking.{tracker}=true")
    with pytest.raises(TrackerMissing, match=rf"tracking\.{tracker}=true needs the package {package}"):
        track(collect(read_plan(plan), plan), plan.parent)
    assert main(["--plan", str(plan)]) == 64
    assert package in capsys.readouterr().err
    assert (plan.parent / "report.html").exists()


def test_trackers_can_be_off(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = fake_campaign(tmp_path, set="tracking.tensorboard=false")
    assert track(collect(read_plan(plan), plan), plan.parent) == []
    assert not (plan.parent / "tensorboard").exists()


def test_continued_sft_has_its_evaluations(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = fake_campaign(tmp_path, controls=True)
    run = next(run for run in collect(read_plan(plan), plan).runs if run.name == "sft-continued")
    assert [step for step, _ in scalars(run)] == [0, run.train.steps]


def test_missing_package_is_refused_before_anything_starts(monkeypatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mlflow" else find_spec(name)
    )
    with pytest.raises(
        ConfigError, match=r"run 'ppo': tracking\.mlflow=True: the package mlflow is not installed"
    ):
        plan_campaign(CampaignOptions(campaign="drill", set="tracking.mlflow=true"), ROOT)
