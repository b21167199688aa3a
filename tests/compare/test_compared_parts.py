"""What of two results is compared, and what it means when something is not. The results are made up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.checkpoint.verify import self_digest
from tests.compare.made_up import made_up, put, rewrite
from tests.compare.test_compare import baton, findings
from workflow.compare import compare, find_pairs

STATE = "train/step000006"


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    return made_up(tmp_path_factory.mktemp("first") / "one")


def verdicts(ours: Path, theirs: Path, tolerance: float | None = None) -> dict[str, str]:
    """By part, of two single results."""
    (pair,) = find_pairs(ours, theirs)
    return {finding.part: finding.verdict for finding in compare(pair, tolerance).findings}


def altered(first: Path, copy: Path, result: str, change: Callable[[Path], None]) -> Path:
    """A copy of one result of the first run in which something was changed."""
    shutil.copytree(first / result, copy)
    rewrite(copy, change)
    return copy


def released(state: Path) -> None:
    """What retention leaves of a state."""
    (state / "state.json").rename(state / "released.json")
    shutil.rmtree(state / "actor")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"accuracy": 0.9}, {"metrics"}),
        ({"tasks": {"sorting": {"accuracy": 0.9}}}, {"metrics"}),
        ({"outcomes": {"a": True, "b": True}}, {"outcomes"}),
        ({"outcomes": {"a": True}}, {"outcomes"}),
        ({"seconds": 1.0, "tokens_per_second": 2.0}, set()),
    ],
)
def test_every_outcome_of_an_evaluation_counts_and_no_time_does(first, tmp_path, changes, parts):
    """Also those that are not among the first answers, which samples.jsonl shows."""
    result = "evaluate-step000006"
    other = altered(first, tmp_path / "other", result, lambda folder: put(folder / "result.json", **changes))
    found = verdicts(first / result, other)
    assert set(found) == {"samples", "outcomes", "metrics"}
    assert {part for part, verdict in found.items() if verdict != "equal"} == parts
    assert baton("compare", first / result, other)[0] == (1 if parts else 0)


def test_a_tolerance_is_for_metrics_and_not_for_outcomes(first, tmp_path):
    result = "evaluate-step000006"

    def change(folder: Path) -> None:
        put(folder / "result.json", accuracy=0.5001)

    other = altered(first, tmp_path / "other", result, change)
    assert verdicts(first / result, other)["metrics"] == "different"
    assert verdicts(first / result, other, 1e-3)["metrics"] == "close"
    rewrite(other, lambda folder: put(folder / "result.json", outcomes={"a": False, "b": True}))
    assert verdicts(first / result, other, 10.0)["outcomes"] == "different"


@pytest.mark.parametrize(
    ("result", "file", "differs"),
    [
        ("convert", "model/tokenizer.json", True),
        ("export", "export/config.json", True),
        ("export", "export/README.md", False),
    ],
)
def test_bit_for_bit_means_every_file_but_provenance(first, tmp_path, result, file, differs):
    other = altered(first, tmp_path / "other", result, lambda folder: (folder / file).write_text('{"a": 1}'))
    found = verdicts(first / result, other)
    assert (found["weights"], found["files"]) == ("equal", "different" if differs else "equal")
    assert "files" not in verdicts(first / result, other, 1e-3)


def test_files_that_nothing_can_read_are_compared_by_their_digests(tmp_path):
    run = made_up(tmp_path / "one", "conversion.megatron=true")
    result = run / "megatron"
    for tolerance in ([], ["--tolerance", "1e-3"]):
        assert baton("compare", result, result, *tolerance)[0] == 0
    assert verdicts(result, result) == {"files": "equal"}

    def make_again(folder: Path) -> None:
        (folder / "megatron" / "README.md").write_text("made elsewhere")
        put(folder / "megatron" / "conversion.json", packages={})

    other = altered(run, tmp_path / "other", "megatron", make_again)
    assert verdicts(result, other) == {"files": "equal"}
    rewrite(other, lambda folder: (folder / "megatron/release/block0.distcp").write_text("others"))
    assert verdicts(result, other) == {"files": "different"}
    code, output = baton("compare", result, other, "--tolerance", "1e-3")
    assert code == 1
    assert "0 results compared; 1 not compared as a whole; nothing speaks for all of megatron" in output


def test_a_result_of_which_nothing_was_compared_does_not_pass(tmp_path):
    run = made_up(tmp_path / "one", "conversion.megatron=true")

    def empty(folder: Path) -> None:
        shutil.rmtree(folder / "megatron" / "release")

    other = altered(run, tmp_path / "other", "megatron", empty)
    assert verdicts(other, other) == {"files": "not compared"}
    assert baton("compare", other, other)[0] == 1


@pytest.mark.parametrize(
    ("changes", "tolerated"),
    [
        ({"steps_done": 5}, "different"),
        ({"samples_seen": 49}, "different"),
        ({"kl": {"coefficient": 0.6}}, "close"),
    ],
)
def test_counters_are_part_of_a_state(first, tmp_path, changes, tolerated):
    """A count is equal or not, whatever the tolerance."""
    other = made_up(tmp_path / "one") / STATE
    state = json.loads((other / "state.json").read_text())
    del state["digest"]
    state["trainer"] |= changes
    state["digest"] = self_digest(state)
    rewrite(other, lambda folder: put(folder / "state.json", **state))
    found = verdicts(first / STATE, other)
    assert {part for part, verdict in found.items() if verdict == "different"} == {"counters"}
    assert verdicts(first / STATE, other, 0.5)["counters"] == tolerated


@pytest.mark.parametrize(("metric", "tolerated"), [("actor/lr", "different"), ("rollout_kl", "close")])
def test_learning_rates_are_compared_however_small_they_are(tmp_path, metric, tolerated):
    """What measures rounding, which is as small, is not."""
    sides = [made_up(tmp_path / name / "one") / STATE for name in "ab"]
    for side, value in zip(sides, (9e-7, 1e-6), strict=True):
        curve = side.parent / "metrics.jsonl"
        lines = [json.loads(line) | {metric: value} for line in curve.read_text().splitlines()]
        curve.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verdicts(*sides)["curve"] == "different"
    assert verdicts(*sides, 1e-2)["curve"] == tolerated


def test_a_curve_that_is_not_there_was_not_compared(first, tmp_path):
    """It lies beside the states, so a state's folder alone has none."""
    states = [shutil.copytree(first / STATE, tmp_path / name / "step000006") for name in "ab"]
    for ours, theirs, lacking in ((first / STATE, states[1], "B"), (*states, "A and B")):
        code, found = findings(tmp_path, ours, theirs)
        curve = found["train", "curve"]
        assert (code, curve["verdict"]) == (1, "not compared")
        assert curve["note"] == f"no steps in metrics.jsonl of {lacking}"
        assert found["train", "weights"]["verdict"] == "equal"


def test_released_states_with_other_digests_were_not_compared(first, tmp_path):
    """Numbers cannot be: a tolerance lets nothing pass of which nothing is known."""
    other = made_up(tmp_path / "one", weight=1.0001) / STATE
    code, found = findings(tmp_path, first / STATE, other, "--tolerance", "1e-2")
    assert (code, found["train", "weights"]["verdict"]) == (0, "close")
    released(other)
    assert verdicts(first / STATE, other)["weights"] == "different"
    code, found = findings(tmp_path, first / STATE, other, "--tolerance", "1e-2")
    assert (code, found["train", "samples"]["verdict"]) == (1, "equal")
    for part in ("weights", "optimizer"):
        assert found["train", part]["verdict"] == "not compared"
    output = baton("compare", first / STATE, other, "--tolerance", "1e-2")[1]
    assert "0 results compared; 1 not compared as a whole; nothing speaks for all of train" in output
    same = made_up(tmp_path / "same") / STATE
    released(same)
    code, found = findings(tmp_path, first / STATE, same, "--tolerance", "1e-2")
    assert (code, found["train", "weights"]["verdict"]) == (0, "equal")


def test_digests_of_another_layout_say_nothing(first, tmp_path):
    other = made_up(tmp_path / "one", ranks=2) / STATE
    assert set(verdicts(first / STATE, other).values()) == {"equal"}
    released(other)
    assert verdicts(first / STATE, other)["weights"] == "not compared"
    code, output = baton("compare", first / STATE, other)
    assert (code, "other blocks or types of tensors" in " ".join(output.split())) == (1, True)


def test_a_later_state_speaks_for_those_that_were_released(tmp_path):
    ours = made_up(tmp_path / "a" / "one", segments=3)
    theirs = made_up(tmp_path / "b" / "one", segments=3, weight=1.0001)
    for step in (2, 4):
        released(theirs / f"train/step{step:06d}")
    code, output = baton("compare", ours, theirs, "--tolerance", "1e-2")
    assert code == 0, output
    assert "none differs; 2 not compared as a whole" in output
    code, output = baton("compare", ours, theirs, "--tolerance", "1e-9")
    assert (code, "1 differ; 2 not compared as a whole" in output, "nothing speaks" in output) == (
        1,
        True,
        False,
    )
    released(theirs / STATE)
    assert baton("compare", ours, theirs, "--tolerance", "1e-2")[0] == 1


def test_runs_that_were_cut_differently_learn_the_same(tmp_path):
    """Neither cuts of one that the other lacks, nor the evaluations of the states there, are judged; the others are compared."""
    thirds = made_up(tmp_path / "thirds" / "one", segments=3)
    halves = made_up(tmp_path / "halves" / "one", segments=2)
    whole = made_up(tmp_path / "whole" / "one", segments=1)
    for ours, theirs, elsewhere in ((thirds, halves, 6), (halves, thirds, 6), (thirds, whole, 4)):
        code, output = baton("compare", ours, theirs)
        assert code == 0, output
        # convert, sft, its evaluation, the last state, its evaluation, the export
        told = f"6 results compared: none differs; {elsewhere} on one side only, where the other was not cut"
        assert told in output
    pairs = find_pairs(thirds, halves)
    alone = [compare(pair) for pair in pairs if pair.cut_elsewhere]
    notes = [(one.pair.ours or one.pair.theirs, one.findings[0].note) for one in alone]
    assert {(result.manifest.stage, note) for result, note in notes} == {
        (stage, note)
        for stage in ("train", "evaluate")
        for note in (
            *("only in A: B was not cut at step 2", "only in A: B was not cut at step 4"),
            "only in B: A was not cut at step 3",
        )
    }


def test_a_difference_at_a_common_cut_is_found(tmp_path):
    ours = made_up(tmp_path / "a" / "one", segments=3)
    theirs = made_up(tmp_path / "b" / "one", segments=2, weight=1.5)
    code, output = baton("compare", ours, theirs)
    assert code == 1
    assert "6 results compared: 1 differ;" in output


def test_an_evaluation_that_is_missing_at_a_common_cut_is_a_difference(tmp_path):
    ours = made_up(tmp_path / "a" / "one", segments=3)
    theirs = made_up(tmp_path / "b" / "one", segments=2)
    record = json.loads((theirs / "run.json").read_text())
    plan = json.loads((theirs / record["plan"]).read_text())
    last = [
        entry
        for entry in record["stages"]
        if entry["stage"] == "evaluate" and plan["stages"][entry["id"]]["inputs"]["model"]["step"] == 6
    ]
    assert len(last) == 1
    put(theirs / "run.json", stages=[entry for entry in record["stages"] if entry not in last])
    code, output = baton("compare", ours, theirs)
    assert (code, "1 differ" in output) == (1, True)


def test_other_cuts_do_not_hide_other_learning(tmp_path):
    ours = made_up(tmp_path / "a" / "one", segments=3)
    theirs = made_up(tmp_path / "b" / "one", "algorithm.lr=0.5", segments=2)
    code, output = baton("compare", ours, theirs)
    assert code == 2
    assert "algorithm.lr: " in output
    code, output = baton("compare", ours / "train/step000002", theirs / "train/step000003")
    assert (code, "no stage and step that both have" in output) == (2, True)
