"""What a drill would say of results, steps and starts that are not in order, and of what is left."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.fake_campaign import fake_campaign
from workflow.campaign.lock import FolderLock
from workflow.campaign.plan import CURRENT, StageSpec, read_plan
from workflow.campaign.view import write_view
from workflow.compare import Comparison
from workflow.drill.campaign import Campaign
from workflow.drill.checks import _leftovers, _locks, _results, start_problems, step_problems
from workflow.manifest import Attempt, FileRecord, Verification, read_manifest, write_manifest


@pytest.fixture
def train(tmp_path) -> StageSpec:
    """A training of the drill, in order."""
    plan = read_plan(fake_campaign(tmp_path, campaign="drill"))
    spec = plan.stages[plan.runs["grpo"].stages["train"]]
    write_starts(tmp_path, spec, [(cut, 1, 10.0 * cut, 5.0, "published") for cut in spec.cuts])
    assert [*step_problems(tmp_path, spec), *start_problems(tmp_path, spec)] == []
    return spec


def write_starts(folder: Path, spec: StageSpec, starts: list[tuple[int, int, float, float, str]]) -> None:
    lines = []
    for segment, number, begun, seconds, end in starts:
        lines.append({"segment": segment, "number": number, "begun": begun})
        lines.append({"segment": segment, "number": number, "end": end, "seconds": seconds})
    (folder / spec.folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def steps_of(folder: Path, spec: StageSpec) -> tuple[Path, list[str]]:
    path = folder / spec.folder / "metrics.jsonl"
    return path, path.read_text().splitlines(keepends=True)


def test_a_lost_step_a_doubled_one_and_another_order_are_found(tmp_path, train):
    path, lines = steps_of(tmp_path, train)
    for wrong in (lines[:2] + lines[3:], lines[:3] + lines[2:], lines[::-1], lines[:-1], []):
        path.write_text("".join(wrong))
        (problem,) = step_problems(tmp_path, train)
        assert "not 1 to 6, each once" in problem
    path.write_text("".join(lines))
    assert [*step_problems(tmp_path, train)] == []


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (["published", "published"], "the last one and no other has published"),
        (["published", "killed"], "the last one and no other has published"),
        (["killed"], "the last one and no other has published"),
        ([], "the last one and no other has published"),
        (["killed", "stopped", "published"], None),
    ],
)
def test_exactly_one_start_has_published(tmp_path, train, ends, told):
    path = tmp_path / train.manifest(2)
    attempts = [Attempt(number=n, end=end, seconds=1) for n, end in enumerate(ends, 1)]
    write_manifest(path, read_manifest(path).model_copy(update={"attempts": attempts}))
    found = [*start_problems(tmp_path, train)]
    assert len(found) == (told is not None)
    assert told is None or told in found[0]


def test_a_gap_in_the_numbers_is_found(tmp_path, train):
    path = tmp_path / train.manifest(4)
    attempts = [Attempt(number=1, end="killed", seconds=1), Attempt(number=3, end="published", seconds=1)]
    write_manifest(path, read_manifest(path).model_copy(update={"attempts": attempts}))
    (problem,) = start_problems(tmp_path, train)
    assert "numbered [1, 3]" in problem


def note(folder: Path, spec: StageSpec, **entry: object) -> None:
    with (folder / spec.folder / "attempts.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def test_what_is_computed_and_published_a_second_time_is_found_unless_a_fault_has_damaged_it(tmp_path, train):
    note(tmp_path, train, segment=2, number=1, end="withdrawn")
    note(tmp_path, train, segment=2, number=2, begun=100.0)
    note(tmp_path, train, segment=2, number=2, end="published", seconds=5.0)
    path = tmp_path / train.manifest(2)
    attempts = [Attempt(number=n, end=end, seconds=1) for n, end in ((1, "withdrawn"), (2, "published"))]
    write_manifest(path, read_manifest(path).model_copy(update={"attempts": attempts}))
    assert [*start_problems(tmp_path, train, {path.parent})] == []
    for damaged in (set(), {path.parent.with_name("step000004")}):
        (problem,) = start_problems(tmp_path, train, damaged)
        assert (
            "to step 2: start 1 had published, nothing has damaged that, and it was computed again" in problem
        )


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ((0.0, 5.0, "stopped"), (5.0, 5.0, "published"), False),
        ((0.0, 5.0, "stopped"), (4.0, 5.0, "published"), True),
        # Killed: how long it lived is what its log tells, no more.
        ((0.0, 5.0, "killed"), (5.0, 5.0, "published"), False),
        ((0.0, 5.0, "killed"), (4.0, 5.0, "published"), True),
        ((0.0, 5.0, "published"), (4.0, 0.0, "killed"), True),
        ((0.0, 50.0, "published"), (4.0, 5.0, "stopped"), True),
    ],
)
def test_two_starts_at_a_time_are_found(tmp_path, train, first, second, together):
    write_starts(tmp_path, train, [(2, 1, *first), (2, 2, *second)])
    found = [*start_problems(tmp_path, train)]
    assert len(found) == together
    assert not together or "two starts worked at the same time: start 2 of the segment to 2" in found[0]


def test_a_start_that_was_killed_without_a_word_counts_from_when_it_began(tmp_path, train):
    write_starts(tmp_path, train, [(2, 1, 0.0, 5.0, "published")])
    note(tmp_path, train, segment=4, number=1, begun=6.0)
    assert [*start_problems(tmp_path, train)] == []
    note(tmp_path, train, segment=6, number=1, begun=3.0)
    (problem,) = start_problems(tmp_path, train)
    assert "start 1 of the segment to 6 began meanwhile" in problem


def test_a_start_that_began_twice_is_found(tmp_path, train):
    write_starts(tmp_path, train, [(2, 1, 0.0, 5.0, "stopped"), (2, 1, 6.0, 5.0, "published")])
    (problem,) = start_problems(tmp_path, train)
    assert "start 1 of the segment to 2 began twice" in problem


def test_bytes_that_only_their_digest_tells_apart_are_found(tmp_path, monkeypatch):
    """All that is compared part by part is equal, and what is published is not."""
    monkeypatch.setattr("workflow.drill.checks.compare", Comparison)
    monkeypatch.setattr("workflow.drill.checks.verify", lambda *paths: Verification())
    reference, disturbed = Campaign(tmp_path / "reference", []), Campaign(tmp_path / "disturbed", [])
    for campaign in (reference, disturbed):
        campaign.folder.mkdir()
        monkeypatch.chdir(campaign.folder)
        path = fake_campaign(Path(), campaign="drill")
        path.with_name(CURRENT).symlink_to(path.name)
        plan = read_plan(path)
        for name in plan.runs:
            write_view(plan, path, name)
    assert [*_results(disturbed, reference, plan)] == []
    spec = plan.stages[plan.runs["grpo"].stages["train"]]
    path = disturbed.folder / spec.manifest(4)
    files = {"state.json": FileRecord(bytes=10, sha256="cd" * 32)}
    write_manifest(path, read_manifest(path).model_copy(update={"files": files}))
    (problem,) = _results(disturbed, reference, plan)
    assert "step 4: its published files differ" in problem
    # But for a file that tells by which commit: somebody may work in the folder meanwhile.
    whole = read_manifest(reference.folder / spec.manifest(4))
    card = {"export/README.md": FileRecord(bytes=10, sha256="cd" * 32)}
    write_manifest(path, whole.model_copy(update={"files": whole.files | card}))
    assert [*_results(disturbed, reference, plan)] == []


def test_what_is_left_is_found(tmp_path):
    """A process, and the files of what was interrupted."""
    campaign = Campaign(tmp_path, [])
    stage = tmp_path / "results/store/train/a-run-0123abcd"
    stage.mkdir(parents=True)
    assert [*_leftovers(campaign)] == []
    (stage / ".step000002.0a1b").mkdir()
    (stage / "failure-step000002.json").write_text("{}")
    assert [*_leftovers(campaign)] == [
        "results/store/train/a-run-0123abcd/.step000002.0a1b is left",
        "results/store/train/a-run-0123abcd/failure-step000002.json is left",
    ]


def test_a_process_that_is_left_and_one_that_has_its_lock_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("workflow.drill.checks.LEAVING", 0.1)
    sleeping = subprocess.Popen(["sleep", "600"], cwd=tmp_path)
    try:
        (problem,) = _leftovers(Campaign(tmp_path, []))
        assert problem == f"process {sleeping.pid} is left: sleep 600"
        with FolderLock(
            tmp_path / "results/store/train/a-run-0123abcd"
        ):  # of this process, which works elsewhere
            problem, _ = _leftovers(Campaign(tmp_path, []))
        assert problem == f"train a-run-0123abcd: process {os.getpid()} still holds its lock"
    finally:
        sleeping.kill()
        sleeping.wait()


@pytest.mark.parametrize(("last", "left"), [("published results/store/train", True), ("step 2", False)])
def test_only_a_start_that_was_killed_leaves_its_lock(tmp_path, last, left):
    stage = tmp_path / "results/store/train/a-run-0123abcd"
    stage.mkdir(parents=True)
    (stage / "lock.json").write_text("{}")
    (stage / "log-step000002.txt").write_text(f"1 INFO baton: start 1 of train a-run\n2 INFO baton: {last}\n")
    found = [*_locks(Campaign(tmp_path, []))]
    assert found == (["results/store/train/a-run-0123abcd/lock.json is left"] if left else [])
