"""A run that is cut anew half-way: what is published stays, byte for byte, and the weights are those of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path

from engines.checkpoint import read_state
from tests.support.jobs import ROOT, finish
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.pace import SIGNAL_SLACK, measured_pace
from workflow.campaign.plan import Plan, StageSpec, write_plan
from workflow.campaign.segments import note_cuts
from workflow.cluster.executor import warning_of
from workflow.manifest import read_manifest, verify


def plan_of(segments: int | str, recut: bool = False) -> tuple[Plan, Path, StageSpec]:
    """The drill, cut into so many segments, as the campaign's head would plan it."""
    text = (ROOT / "configs/campaign/drill.yaml").read_text().replace("segments: 3", f"segments: {segments}")
    Path("drill.yaml").write_text(text)
    options = read_options({"campaign": "drill.yaml", "site": "local", "recut": recut})
    plan, _ = plan_campaign(options, ROOT)
    return plan, write_plan(plan, Path("results/drill")), plan.stages[plan.runs["ppo"].stages["train"]]


def begin(plan: Plan, path: Path) -> None:
    """What a head does first, and the stages before training."""
    note_cuts(plan)
    for stage in ("convert", "sft"):
        finish(Path.cwd(), path, stage, plan.runs["ppo"].stages[stage])


def test_half_a_run_cut_anew_is_the_uninterrupted_run(tmp_path, monkeypatch):
    for name in ("whole", "recut"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    plan, path, whole = plan_of(1)
    begin(plan, path)
    finish(Path.cwd(), path, "train", whole.id, 6)
    expected = read_state(Path(whole.output_folder(6)))

    monkeypatch.chdir(tmp_path / "recut")
    plan, path, spec = plan_of(3)
    assert (spec.identity, spec.cuts) == (whole.identity, [2, 4, 6])
    begin(plan, path)
    finish(Path.cwd(), path, "train", spec.id, 2)
    published = Path(spec.manifest(2)).read_bytes()
    pace = measured_pace(spec)
    assert pace.start > 0
    assert warning_of(spec) == max(2 * SIGNAL_SLACK, pace.warning)

    plan, path, spec = plan_of("auto", recut=True)
    assert spec.cuts == [2, 6]  # no limit of time on this host
    note_cuts(plan)
    assert plan_of("auto")[2].cuts == [2, 6]
    evaluated = {plan.stages[id].inputs["model"].step for id in plan.runs["ppo"].stages["evaluate"]}
    assert evaluated == {None, 2, 6}
    finish(Path.cwd(), path, "train", spec.id, 2)  # nothing to do
    finish(Path.cwd(), path, "train", spec.id, 6)
    found = read_state(Path(spec.output_folder(6)))
    assert found == expected
    assert Path(spec.manifest(2)).read_bytes() == published
    (attempt,) = read_manifest(Path(spec.manifest(6))).attempts
    assert (attempt.first_step, attempt.last_step) == (3, 6)
    assert verify(Path(spec.manifest(6))).problems == []
