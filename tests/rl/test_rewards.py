import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.config import ConfigError, parse
from workflow.campaign.schema import DataConfig, RewardConfig
from workflow.data import Problem, UserFunctionError, load_problems
from workflow.rl.rewards import Rewarder, placed_share

DATA = parse(
    DataConfig,
    {
        "name": "test",
        "train_size": 4,
        "heldout_size": 4,
        "tasks": [{"name": "number_sorting", "options": {"min_numbers": 4, "max_numbers": 4}}],
    },
)
WORDS = Problem("Which?", "one two three four")


def score(problem, response, finished=True, **reward):
    rewarder = Rewarder(parse(RewardConfig, reward), DATA)
    scores = rewarder.score([problem], [response], [finished], key=0)
    return scores.rewards[0], scores.correct[0]


# Users' own functions, named below as "tests.rl.test_rewards:...".
def shortest_wins(response: str, problem: Problem) -> float:
    return 1 / (1 + abs(len(response) - len(problem.answer)))


def broken(response: str, problem: Problem) -> float:
    return 1 / 0


def not_a_number(response: str, problem: Problem) -> float:
    return math.nan


def no_reward(response: str, problem: Problem) -> None:
    return None


def test_verifier():
    problem = load_problems(DATA, "train")[0]
    assert score(problem, problem.answer.replace("'", '"')) == (1.0, True)
    assert score(problem, "[1, 2]") == (0.0, False)


def test_exact():
    assert score(WORDS, " one two three four\n", kind="exact") == (1.0, True)
    assert score(WORDS, "one two three", kind="exact") == (0.0, False)


def test_regex():
    pattern = r"answer is ([\w ]+)\."
    assert score(WORDS, "The answer is one two three four.", kind="regex", pattern=pattern) == (1.0, True)
    assert score(WORDS, "The answer is three.", kind="regex", pattern=pattern) == (0.0, False)
    assert score(WORDS, "one two three four", kind="regex", pattern=pattern) == (0.0, False)
    assert score(WORDS, "no", kind="regex", pattern="(yes)?no") == (0.0, False)


@pytest.mark.parametrize(("pattern", "message"), [("(", "no regular expression"), ("x+", "has no group")])
def test_bad_patterns(pattern, message):
    with pytest.raises(ConfigError, match=message):
        score(WORDS, "x", kind="regex", pattern=pattern)


def test_function():
    name = "tests.rl.test_rewards:shortest_wins"
    assert score(WORDS, "x" * 18, kind="function", function=name) == (1.0, True)
    assert score(WORDS, "x" * 17, kind="function", function=name) == (0.5, False)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "broken",
            r"test_rewards:broken' on problem \w{12} \('Which\?'\): ZeroDivisionError",
        ),
        ("not_a_number", "returned nan"),
        ("no_reward", "TypeError"),
        ("missing", "cannot be imported"),
        ("DATA", "not callable"),
    ],
)
def test_a_users_mistake_is_named(function, message):
    with pytest.raises(UserFunctionError, match=message):
        score(WORDS, "x", kind="function", function=f"tests.rl.test_rewards:{function}")
    with pytest.raises(UserFunctionError, match="write it as module:function"):
        score(WORDS, "x", kind="function", function=function)


def test_partial_credit():
    half = {"kind": "exact", "partial_credit": 0.4}
    assert score(WORDS, "one two three four", **half) == (1.0, True)
    assert score(WORDS, "one three two four", **half) == (pytest.approx(0.4 * 2 / 4), False)
    assert score(WORDS, "one two three four five six", **half) == (pytest.approx(0.4 * 4 / 6), False)
    assert score(Problem("?", "1234"), "1934", **half) == (pytest.approx(0.4 * 3 / 4), False)


@given(st.text(), st.text())
def test_placed_share_is_a_share(response, answer):
    assert 0 <= placed_share(response, answer) <= 1


def test_a_response_that_was_cut_off_is_wrong():
    assert score(WORDS, WORDS.answer, finished=False, kind="exact") == (0.0, False)
    assert score(WORDS, WORDS.answer, finished=False, kind="exact", partial_credit=0.4) == (0.4, False)


@pytest.mark.parametrize(("room", "penalty"), [(9, 0), (4, 0), (3, 0.125), (1, 0.375), (0, 0.5)])
def test_overlong_penalty(room, penalty):
    """DAPO, equation 13, with L_max - L_cache = max_new_tokens - buffer."""
    rewarder = Rewarder(
        parse(RewardConfig, {"kind": "exact", "overlong": {"buffer": 4, "penalty": 0.5}}), DATA
    )
    scores = rewarder.score([WORDS], [WORDS.answer], [room > 0], key=0, room=[room])
    assert scores.rewards == [float(room > 0) - penalty]
    assert scores.correct == [room > 0]


def test_without_a_buffer_nothing_is_taken_off():
    assert Rewarder(parse(RewardConfig, {"kind": "exact"}), DATA).score(
        [WORDS], [WORDS.answer], [True], key=0, room=[0]
    ).rewards == [1.0]


def test_shuffled_control_permutes_rewards_and_leaves_accuracy():
    problems = [Problem(str(i), str(i)) for i in range(64)]
    responses = [str(i) if i % 2 else "x" for i in range(64)]

    def scores(key, **reward):
        rewarder = Rewarder(parse(RewardConfig, {"kind": "exact", **reward}), DATA)
        return rewarder.score(problems, responses, [True] * 64, key)

    plain, shuffled = scores(1), scores(1, shuffled=True)
    assert shuffled.correct == plain.correct
    assert sorted(shuffled.rewards) == sorted(plain.rewards)
    assert shuffled.rewards != plain.rewards
    assert shuffled == scores(1, shuffled=True)
    assert shuffled != scores(2, shuffled=True)


def test_fields_belong_to_their_kind():
    for reward in ({"kind": "regex"}, {"pattern": "(x)"}, {"kind": "function"}, {"function": "a:b"}):
        with pytest.raises(ConfigError, match="belongs to kind="):
            parse(RewardConfig, reward)
