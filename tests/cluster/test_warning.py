"""A job is warned early enough for the saves that were measured, and before any was, for the size of its state."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.config import ConfigError, LayoutConfig
from tests.support.fake_campaign import fake_campaign, tell_pace
from workflow.campaign.code import source_root
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.pace import SAVED_BYTES, SIGNAL_SLACK
from workflow.campaign.plan import Leg
from workflow.campaign.site import load_site
from workflow.cluster.executor import WARNING_SECONDS, StageJobs, warning_of
from workflow.cluster.placement import place_stage
from workflow.cluster.stage_job import StageCommand

ROOT = source_root()


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_campaign(tmp_path, campaign="drill", site="mini")
    return plan_campaign(read_options({"campaign": "drill", "site": "mini"}), ROOT)[0]


def train_of(plan, run="grpo"):
    return plan.stages[plan.runs[run].stages["train"]]


def test_the_measured_save_and_step_reach_sbatch(plan):
    spec = train_of(plan)
    assert warning_of(spec) == WARNING_SECONDS
    tell_pace(spec, 2, mean=20.0, slowest=40.0, save=300.0)
    assert warning_of(spec) == 2 * 300 + 40 + SIGNAL_SLACK
    Path(spec.manifest(4)).unlink()
    jobs = StageJobs(load_site("mini", ROOT / "configs"), Path("results"), ROOT, print, None, None)
    job = jobs.start(spec, 4, StageCommand({}, []))
    assert "#SBATCH --signal=B:USR2@700\n" in jobs.request(job).text("")


def test_of_a_training_that_has_not_saved_yet_the_size_of_its_state_tells(plan):
    spec = train_of(plan).model_copy(update={"forecast_bytes": int(3 * 400 * SAVED_BYTES)})
    ranks = spec.world_size
    assert warning_of(spec) == 2 * 400 // ranks + SIGNAL_SLACK
    assert warning_of(plan.stages[plan.runs["grpo"].stages["sft"]]) == WARNING_SECONDS


def test_a_save_that_takes_longer_than_a_job_is_refused(plan):
    tell_pace(train_of(plan), 2, mean=1.0, save=3000.0)
    site = load_site("mini", ROOT / "configs")
    with pytest.raises(ConfigError, match="the state takes too long to save for so short a job"):
        place_stage(train_of(plan), site, output=Path("log"), warning_seconds=warning_of(train_of(plan)))


def test_every_segment_has_a_place_or_the_campaign_is_refused_before_its_first_job(plan):
    jobs = StageJobs(load_site("mini", ROOT / "configs"), Path("results"), ROOT, print, None, None)
    jobs.check(plan.stages.values())
    spec = train_of(plan)
    later = Leg(after=2, layout=LayoutConfig(data_parallel_size=64), world_size=64)
    with pytest.raises(ConfigError, match=r"a layout of 64 ranks needs 32 nodes"):
        jobs.check([spec.model_copy(update={"relay": [later]})])
