"""What a drill would say of steps and starts that are not in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.fake_campaign import fake_campaign
from workflow.campaign.plan import StageSpec, read_plan
from workflow.drill.checks import start_problems, step_problems
from workflow.manifest import Attempt, read_manifest, write_manifest


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
        (["withdrawn", "stopped", "published"], None),
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


def test_two_starts_at_a_time_and_a_start_that_began_twice_are_found(tmp_path, train):
    one_after_the_other = [(2, 1, 0.0, 5.0, "stopped"), (2, 2, 5.0, 5.0, "published")]
    write_starts(tmp_path, train, one_after_the_other)
    assert [*start_problems(tmp_path, train)] == []
    # Its result was damaged, and is made anew.
    with (tmp_path / train.folder / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"segment": 2, "number": 2, "end": "withdrawn"}) + "\n")
    assert [*start_problems(tmp_path, train)] == []
    write_starts(tmp_path, train, [(2, 1, 0.0, 5.0, "stopped"), (2, 2, 4.0, 5.0, "published")])
    (problem,) = start_problems(tmp_path, train)
    assert "two starts worked at the same time" in problem
    write_starts(tmp_path, train, [(2, 1, 0.0, 5.0, "stopped"), (2, 1, 6.0, 5.0, "published")])
    (problem,) = start_problems(tmp_path, train)
    assert "start 1 of the segment to 2 began twice" in problem
