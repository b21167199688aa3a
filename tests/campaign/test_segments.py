"""Where trainings are cut: proposals that fit their jobs, cuts that stay, new cuts that keep what is published."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.config import ConfigError
from tests.support.fake_campaign import fake_campaign, tell_pace
from workflow.campaign.code import source_root
from workflow.campaign.head import HEAD_LOCK, plan_campaign, read_options, recut
from workflow.campaign.lock import FolderLock, LockHeld
from workflow.campaign.pace import (
    SIGNAL_SLACK,
    Pace,
    estimated_pace,
    measured_pace,
    warning_for,
)
from workflow.campaign.segments import note_cuts, propose
from workflow.campaign.site import SiteConfig

ROOT = source_root()
HOUR = 3600
SECONDS = st.floats(0.01, 1000, allow_nan=False)


def site_of(walltime: str | None) -> SiteConfig:
    return SiteConfig(name="here", scheduler="slurm", devices={"cpu": {"walltime": walltime}})


def plan_of(**options):
    return plan_campaign(read_options({"campaign": "drill", "site": "local", **options}), ROOT)[0]


def train_of(plan, run="ppo"):
    return plan.stages[plan.runs[run].stages["train"]]


def campaign(folder: Path, segments: int | str) -> str:
    file = folder / "cut.yaml"
    text = (ROOT / "configs/campaign/drill.yaml").read_text()
    file.write_text(text.replace("segments: 3", f"segments: {segments}").replace("name: drill", "name: cut"))
    return str(file)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """The drill with everything published, nothing of it measured."""
    monkeypatch.chdir(tmp_path)
    fake_campaign(tmp_path, campaign="drill", site="local")
    return train_of(plan_of())


def test_the_warning_leaves_time_for_a_step_and_a_slow_save():
    assert warning_for(0) == SIGNAL_SLACK
    assert warning_for(45.5, step_seconds=30) == 91 + 30 + SIGNAL_SLACK


@pytest.fixture(scope="module")
def long_training():
    return train_of(plan_of(set="algorithm.steps=60"))


@settings(deadline=None)
@given(
    step=SECONDS,
    first=SECONDS,
    save=SECONDS,
    start=SECONDS,
    hours=st.integers(1, 72),
    begin=st.integers(0, 60),
)
def test_every_proposed_segment_is_done_when_its_job_would_be_warned(
    long_training, step, first, save, start, hours, begin
):
    spec = long_training
    pace = Pace(start, max(first, step), step, save, "measured", measured=True)
    site = site_of(f"{hours}:00:00")
    try:
        cuts = propose(spec, site, pace, begin).cuts
    except ConfigError:
        assert start + pace.slowest_step + save + pace.warning > 0.9 * hours * HOUR
        return
    assert cuts == sorted(set(cuts))
    assert cuts[-1:] == ([spec.steps] if begin < spec.steps else [])
    for first_step, last_step in zip([begin, *cuts], cuts, strict=False):
        trained = pace.slowest_step + (last_step - first_step - 1) * step
        assert start + trained + save <= hours * HOUR - pace.warning


def test_steps_that_fit_no_job_are_refused_when_measured_and_tried_when_guessed():
    spec = train_of(plan_of())
    slow = {"start": 60, "slowest_step": 7200, "step": 7200, "save": 10, "source": "told"}
    with pytest.raises(ConfigError, match=r"site.devices.cpu.walltime=01:00:00 .* the slowest took 7200 s"):
        propose(spec, site_of("01:00:00"), Pace(**slow, measured=True))
    assert propose(spec, site_of("01:00:00"), Pace(**slow, measured=False)).cuts == [1, 2, 3, 4, 5, 6]
    assert propose(spec, site_of(None), Pace(**slow, measured=True)).cuts == [6]


def test_more_work_is_estimated_to_take_longer_and_estimates_say_so():
    plain, larger = (
        train_of(plan_of(set=words))
        for words in ("", "algorithm.prompts_per_step=8 rollout.max_new_tokens=32")
    )
    one, two = estimated_pace(plain, 10**6), estimated_pace(larger, 10**6)
    assert two.step > 2 * one.step
    assert not one.measured
    assert "estimated" in str(one)


def test_the_pace_is_that_of_the_training_itself_else_of_one_with_as_much_work(published):
    assert measured_pace(published) is None
    tell_pace(published, 2, mean=5.0, slowest=9.0)
    tell_pace(published, 4, mean=4.0, save=3.0)
    pace = measured_pace(published)
    assert (pace.step, pace.slowest_step, pace.save) == (5.0, 9.0, 3.0)
    assert pace.source == "measured in 2 published segments of this training"
    other = train_of(plan_of(seed=1))
    assert measured_pace(other).step == 5.0
    assert "of other trainings" in measured_pace(other).source
    assert measured_pace(train_of(plan_of(set="algorithm.prompts_per_step=8"))) is None


def test_auto_cuts_by_what_is_measured_and_the_same_command_keeps_the_cuts(published, tmp_path):
    options = {"campaign": campaign(tmp_path, "auto"), "set": "site.devices.cpu.walltime=01:00:00", "seed": 1}
    guessed = plan_of(**options)
    assert train_of(guessed).cuts == [6]
    tell_pace(published, 2, mean=800.0)
    slow = plan_of(**options)
    assert train_of(slow).cuts == [2, 4, 6]
    assert train_of(slow, "grpo").cuts == [6]  # nothing is known of it yet
    assert train_of(slow).identity == train_of(guessed).identity
    note_cuts(slow)
    tell_pace(published, 2, mean=1100.0)
    assert train_of(plan_of(**options)).cuts == [2, 4, 6]
    assert train_of(plan_of(**options, recut=True)).cuts == [1, 2, 3, 4, 5, 6]
    assert train_of(plan_of(**options)).cuts == [2, 4, 6]  # planning notes nothing


def test_new_cuts_keep_every_published_step_and_are_kept_themselves(published, tmp_path):
    for step in (4, 6):
        Path(published.manifest(step)).unlink()
    options = {"campaign": campaign(tmp_path, 6)}
    assert train_of(plan_of(**options, recut=True)).cuts == [2, 3, 4, 5, 6]
    options = {"campaign": campaign(tmp_path, "auto")}
    again = plan_of(**options, recut=True)
    assert train_of(again).cuts == [2, 6]
    assert train_of(again).identity == published.identity
    assert train_of(again, "grpo").cuts == [2, 4, 6]  # all of it is published
    note_cuts(again)
    assert plan_of(**options).text == again.text
    note_cuts(plan_of(**options))
    head = Path("results", HEAD_LOCK)
    head.write_text('{"host": "elsewhere", "pid": 1, "started": "1"}')
    with pytest.raises(LockHeld):
        recut(read_options({"site": "local", "campaign": campaign(tmp_path, 6)}), ROOT)
    head.unlink()
    recut(read_options({"site": "local", "campaign": campaign(tmp_path, 6)}), ROOT)
    assert train_of(plan_of(campaign=campaign(tmp_path, 6))).cuts == [2, 3, 4, 5, 6]
    # Asked for another number of segments, it is cut as if for the first time.
    assert train_of(plan_of(campaign=campaign(tmp_path, 2))).cuts == [3, 6]


def test_the_segment_that_somebody_works_on_ends_where_it_was_to_end(published, tmp_path):
    for step in (4, 6):
        Path(published.manifest(step)).unlink()
    options = {"campaign": campaign(tmp_path, 3)}
    note_cuts(plan_of(**options))
    options = {"campaign": campaign(tmp_path, "auto"), "recut": True}
    assert train_of(plan_of(**options)).cuts == [2, 6]
    lock = FolderLock(Path(published.folder))
    lock.path.write_text('{"host": "elsewhere", "pid": 1, "started": "1"}')
    assert train_of(plan_of(**options)).cuts == [2, 4, 6]
