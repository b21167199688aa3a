import hashlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow.rl.metrics import MetricsLog, read_metrics
from workflow.rl.order import DataCursor


def cursor(count, run="run"):
    return DataCursor(run, [hashlib.sha256(str(i).encode()).hexdigest() for i in range(count)])


@given(st.integers(1, 9), st.lists(st.integers(1, 20), max_size=8), st.integers(0, 7))
def test_every_epoch_has_every_problem_once_however_it_is_cut(problems, steps, restart):
    walking, taken = cursor(problems), []
    for number, count in enumerate(steps):
        if number == restart:
            state = json.loads(json.dumps(walking.state()))
            walking = cursor(problems)
            walking.load_state(state)
        taken += walking.take(count)
    assert taken == cursor(problems).take(sum(steps))
    for start in range(0, len(taken) - problems + 1, problems):
        assert sorted(taken[start : start + problems]) == list(range(problems))


def test_epochs_and_runs_differ():
    walking = cursor(50)
    first, second = walking.take(50), walking.take(50)
    assert first != second
    assert first != cursor(50, run="other").take(50)
    assert (walking.epoch, walking.position) == (1, 50)


def test_order_follows_the_problems_not_their_places():
    forwards, backwards = cursor(50), cursor(50)
    backwards.digests = forwards.digests[::-1]
    assert [forwards.digests[i] for i in forwards.take(70)] == [
        backwards.digests[i] for i in backwards.take(70)
    ]


def test_no_step_stands_twice_in_the_metrics_and_none_is_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3, 4):
        log.append({"step": step, "reward": 0.5})
    with path.open("a") as file:
        file.write('{"step": 5, "rew')  # killed while writing
    log = MetricsLog(path)
    for step in (2, 3):  # computed anew, while 4 stays published
        log.append({"step": step, "reward": 0.75})
    rewards = [(line["step"], line["reward"]) for line in read_metrics(path)]
    assert rewards == [(1, 0.5), (2, 0.75), (3, 0.75), (4, 0.5)]
    MetricsLog(path).append({"step": 5, "reward": 1.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append({"step": 1, "reward": 0.5, "grad_norm": math.nan, "ratio": -math.inf})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "reward": 0.5,
        "grad_norm": None,
        "ratio": None,
    }
    assert read_metrics(path) == [{"step": 1, "reward": 0.5}]
