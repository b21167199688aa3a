"""Every advantage estimator against a slow reference of its formula, and what all of them promise."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rl.samples import Sequence, batches, pack, unpack, with_foreign_text
from workflow.campaign.objectives import ADVANTAGES
from workflow.campaign.schema import AlgorithmConfig
from workflow.rl.advantages import EPSILON, whiten

ROWS = {row.name: row for row in ADVANTAGES}


def config_of(name, **values):
    return AlgorithmConfig(name="test", advantage=name, samples_per_prompt=8, **values)


def estimate(sequences, config):
    """Advantages of each sequence, token by token."""
    fields = config.estimator.load()(pack(sequences), config)
    assert set(fields) == ({"advantages", "returns"} if config.estimator.critic else {"advantages"})
    assert all(field.dtype == torch.float32 and torch.isfinite(field).all() for field in fields.values())
    return unpack(fields["advantages"], sequences)


# ---- slow references: plain Python over plain lists, one sequence at a time ------------------------------------------


def alive(sequences, group=None):
    return [s for s in sequences if s.steps and (group is None or s.group == group)]


def spread_of(sequences, group):
    scores = [s.score for s in alive(sequences, group)]
    return statistics.stdev(scores) if len(scores) > 1 else 0.0


def by_response(formula):
    """From a sample's advantage to its tokens'; 0 where the group has nothing to compare."""

    def slow(sequences, config):
        result = []
        for s in sequences:
            compared = s.steps and spread_of(sequences, s.group) > EPSILON
            advantage = formula(s, alive(sequences, s.group), sequences, config) if compared else 0.0
            result.append([advantage * m for m in s.mask])
        return result

    return slow


def normalized(advantage, s, sequences, config):
    return advantage / (spread_of(sequences, s.group) + EPSILON) if config.normalize_by_std else advantage


@by_response
def slow_grpo(s, group, sequences, config):
    return normalized(s.score - statistics.mean(o.score for o in group), s, sequences, config)


@by_response
def slow_rloo(s, group, sequences, config):
    return s.score - statistics.mean(o.score for o in group if o is not s)


@by_response
def slow_opo(s, group, sequences, config):
    return s.score - sum(len(o.steps) * o.score for o in group) / sum(len(o.steps) for o in group)


@by_response
def slow_gpg(s, group, sequences, config):
    everyone = alive(sequences)
    able = [o for o in everyone if spread_of(sequences, o.group) > EPSILON]
    return len(everyone) / len(able) * (s.score - statistics.mean(o.score for o in group))


@by_response
def slow_pass_at_k(s, group, sequences, config):
    k = min(config.pass_k, len(group))
    others = [o for o in group if o is not s]
    added = [
        max(s.score, *(o.score for o in rest)) - max(o.score for o in rest)
        for rest in itertools.combinations(others, k - 1)
    ]
    return normalized(statistics.mean(added), s, sequences, config)


def slow_whiten(advantages, sequences):
    chosen = [a[t] for a, s in zip(advantages, sequences, strict=True) for t in s.steps]
    if len(chosen) < 2:
        return [[0.0] * len(s.mask) for s in sequences]
    mean, deviation = statistics.mean(chosen), statistics.stdev(chosen)
    return [
        [(a - mean) / (deviation + EPSILON) * m for a, m in zip(row, s.mask, strict=True)]
        for row, s in zip(advantages, sequences, strict=True)
    ]


def slow_baseline(sequences, config):
    centred = by_response(lambda s, group, *_: s.score - statistics.mean(o.score for o in group))
    return slow_whiten(centred(sequences, config), sequences)


def slow_returns(s, gamma):
    """The definition: sum over later loss tokens, discounted by how many lie in between."""
    returns = [0.0] * len(s.mask)
    for i, t in enumerate(s.steps):
        returns[t] = sum(gamma**k * s.fields["rewards"][u] for k, u in enumerate(s.steps[i:]))
    return returns


def slow_reinforce_plus_plus(sequences, config):
    return slow_whiten([slow_returns(s, config.gamma) for s in sequences], sequences)


def slow_remax(sequences, config):
    return [[(g - s.baseline) * m for g, m in zip(slow_returns(s, 1), s.mask, strict=True)] for s in sequences]  # fmt: skip


def slow_gae(sequences, config):
    """A_t = sum_k (gamma lambda)^k delta_{t+k} over loss tokens."""
    result = []
    for s in sequences:
        values, advantages = s.fields["old_values"], [0.0] * len(s.mask)
        for i, t in enumerate(s.steps):
            for k, u in enumerate(s.steps[i:]):
                following = values[s.steps[i + k + 1]] if i + k + 1 < len(s.steps) else 0.0
                delta = s.fields["rewards"][u] + config.gamma * following - values[u]
                advantages[t] += (config.gamma * config.gae_lambda) ** k * delta
        result.append(advantages)
    return slow_whiten(result, sequences) if config.normalize_by_std else result


SLOW = {
    "gae": slow_gae,
    "grpo": slow_grpo,
    "rloo": slow_rloo,
    "opo": slow_opo,
    "gpg": slow_gpg,
    "pass_at_k": slow_pass_at_k,
    "reinforce_plus_plus": slow_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": slow_baseline,
    "remax": slow_remax,
}
every = pytest.mark.parametrize("name", ROWS)


@st.composite
def cases(draw, name):
    """A batch and a configuration for the estimator ``name``."""
    values = {key: draw(st.floats(0, 1)) for key in ("gamma", "gae_lambda")}
    config = config_of(name, normalize_by_std=draw(st.booleans()), pass_k=draw(st.integers(2, 4)), **values)
    return draw(batches(("old_values",), dense=not config.estimator.compares)), config


def assert_close(found, expected):
    """Normalizing by a deviation that is almost nothing makes rounding large: absolute to the largest."""
    largest = max((abs(a) for row in expected for a in row), default=0.0)
    for left, right in zip(found, expected, strict=True):
        assert left == pytest.approx(right, rel=1e-3, abs=1e-3 * max(largest, 1e-2))


def test_every_estimator_has_a_reference():
    assert set(SLOW) == set(ROWS)


@every
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_an_estimator_is_its_formula(name, data):
    sequences, config = data.draw(cases(name))
    assert_close(estimate(sequences, config), SLOW[name](sequences, config))


@every
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_packing_order_padding_and_rejected_rows_change_nothing(name, data):
    """Rows in any order, with tokens around and in between that the policy did not write, and rows without a loss token."""
    sequences, config = data.draw(cases(name))
    expected = estimate(sequences, config)
    order = data.draw(st.permutations(range(len(sequences))))
    changed, kept = [], []
    for i in order:
        s = sequences[i]
        at = data.draw(st.integers(1, len(s.mask)))
        changed.append(with_foreign_text(s, at))
        kept.append([t if t < at else t + 2 for t in range(len(s.mask))])
    rejected = Sequence([0, 0], {"rewards": [0.0, 0.0], "old_values": [9.0, 9.0]}, group=0, baseline=9.0)
    found = estimate([*changed, rejected], config)
    assert found.pop() == [0.0, 0.0]
    assert_close([[row[t] for t in places] for row, places in zip(found, kept, strict=True)], [expected[i] for i in order])  # fmt: skip
    assert all(a == 0 for row, s in zip(found, changed, strict=True) for a, m in zip(row, s.mask, strict=True) if not m)  # fmt: skip


def responses(*scores, groups=None, lengths=None):
    """Samples of so many loss tokens (2), with these scores."""
    result = []
    for i, score in enumerate(scores):
        steps = lengths[i] if lengths else 2
        rewards = [0.0] * steps + ([score] if steps else [0.0])
        mask = [0, *[1] * steps]
        fields = {"rewards": rewards if steps else [0.0], "old_values": [0.0] * len(mask)}
        result.append(Sequence(mask, fields, groups[i] if groups else 0, 0.0, score if steps else 0.0))
    return result


def of_responses(name, sequences, **values):
    return [row[-1] for row in estimate(sequences, config_of(name, **values))]


COMPARING = pytest.mark.parametrize("name", [row.name for row in ADVANTAGES if row.compares])


@COMPARING
def test_groups_of_one_and_of_equal_scores_get_nothing(name):
    assert of_responses(name, responses(0.7, 0.1, 0.1, 0.1, groups=[0, 1, 1, 1])) == [0, 0, 0, 0]


@COMPARING
def test_a_rejected_sample_leaves_its_groups_statistics(name):
    sequences = responses(1.0, 0.0, 5.0, 0.0, lengths=[1, 2, 0, 3])
    with_rejected = of_responses(name, sequences)
    without = of_responses(name, [sequences[i] for i in (0, 1, 3)])
    assert [with_rejected[i] for i in (0, 1, 3)] == pytest.approx(without)
    assert with_rejected[2] == 0


def test_rejection_in_numbers():
    found = of_responses("grpo", responses(1.0, 0.0, 5.0, 0.0, lengths=[1, 1, 0, 1]))
    assert found == pytest.approx([1.154699, -0.577349, 0, -0.577349], abs=1e-5)


def test_formulas_in_numbers():
    two = responses(1.0, 0.0, 0.0, 5.0, 3.0, groups=[7, 7, 7, 2, 2])
    assert of_responses("grpo", two) == pytest.approx(
        [1.154699, -0.577349, -0.577349, 0.707106, -0.707106], abs=1e-5
    )
    assert of_responses("grpo", two, normalize_by_std=False) == pytest.approx(
        [2 / 3, -1 / 3, -1 / 3, 1, -1], abs=1e-6
    )
    assert of_responses("rloo", two) == pytest.approx([1, -0.5, -0.5, 2, -2])
    assert of_responses("opo", responses(1.0, 0.0, lengths=[1, 3])) == pytest.approx([0.75, -0.25])
    alike = responses(1.0, 0.0, 1.0, 1.0, groups=[0, 0, 1, 1])
    assert of_responses("gpg", alike) == pytest.approx([1, -1, 0, 0])
    best = responses(0.0, 1.0, 0.0, 0.0)
    assert of_responses("pass_at_k", best, pass_k=4, normalize_by_std=False) == pytest.approx([0, 1, 0, 0])


def test_credit_passes_over_tokens_that_the_policy_did_not_write():
    rewards, values = [0.0, 0, 0, 0, 0, 1], [9.0, 0.5, 0.4, 9.0, 9.0, 0.2]
    sequence = Sequence([0, 1, 1, 0, 0, 1], {"rewards": rewards, "old_values": values}, baseline=0.25)
    (found,) = estimate([sequence], config_of("gae", normalize_by_std=False))
    assert found == pytest.approx([0, 0.5, 0.6, 0, 0, 0.8])
    assert estimate([sequence], config_of("remax"))[0] == [0, 0.75, 0.75, 0, 0, 0.75]


@every
def test_a_reward_that_would_be_lost_is_an_error(name):
    with pytest.raises(ValueError, match="rewards must be 0"):
        estimate([Sequence([0, 1], {"rewards": [1.0, 0.0], "old_values": [0.0, 0.0]})], config_of(name))


def test_returns_are_advantages_before_whitening_and_values():
    sequences = [Sequence([0, 1, 1], {"rewards": [0.0, 0.0, 1.0], "old_values": [9.0, 0.5, 0.25]})]
    config = config_of("gae")
    fields = config.estimator.load()(pack(sequences), config)
    assert fields["returns"].tolist() == [0, 1, 1]
    assert fields["advantages"].tolist() == pytest.approx([0, -1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-4)


def test_whitened_advantages():
    mask = torch.tensor([1.0, 0, 1, 1])
    whitened = whiten(torch.tensor([1.0, 99, 2, 3]), mask)
    torch.testing.assert_close(whitened, torch.tensor([-1.0, 0, 0, 1]))
    assert whiten(torch.tensor([5.0, 5.0]), torch.ones(2)).tolist() == [0, 0]
    assert whiten(torch.tensor([5.0]), torch.ones(1)).tolist() == [0]
