"""What a step says about itself: each metric against its definition over the whole batch, however that is packed."""

import math
import statistics

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engines.rollout.base import Response
from tests.rl.samples import batches, pack, with_foreign_text
from workflow.campaign.algorithm import KLConfig
from workflow.rl import measure
from workflow.rl.rewards import Scores

FIELDS = ("old_log_probs", "rollout_log_probs", "reference_log_probs", "old_values", "returns")
K1 = KLConfig(place="loss", estimator="k1")


def column(sequences, name):
    """The field on all loss tokens of the batch."""
    return [s.fields[name][t] for s in sequences for t in s.steps]


def definitions(sequences):
    """All metrics of a batch, from plain lists."""
    old, rollout, reference, values, returns = (column(sequences, name) for name in FIELDS)
    ratios = [math.exp(o - r) for o, r in zip(old, rollout, strict=True)]
    variance = statistics.pvariance(returns)
    residual = statistics.pvariance([r - v for r, v in zip(returns, values, strict=True)])
    return {
        "rollout_ratio_min": min(ratios),
        "rollout_ratio_max": max(ratios),
        "rejected": sum(not s.steps for s in sequences) / len(sequences),
        "reference_kl": statistics.mean(o - r for o, r in zip(old, reference, strict=True)),
        "explained_variance": 1 - residual / variance if variance > 0 else 0.0,
    }


def measured(sequences):
    batch = pack(sequences)
    return {**measure.rollout(batch), **measure.before_update(batch, K1)}


@settings(deadline=None, max_examples=25)
@given(batches(FIELDS), st.data())
def test_metrics_are_those_of_the_whole_batch_in_any_packing(sequences, data):
    assume(any(s.steps for s in sequences))
    expected, found = definitions(sequences), measured(sequences)
    assume(expected["explained_variance"] > -1e3)  # returns that are equal but for rounding
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
    order = data.draw(st.permutations(sequences))
    changed = measured([with_foreign_text(s, data.draw(st.integers(1, len(s.mask)))) for s in order])
    assert changed == pytest.approx(found, rel=1e-4, abs=1e-4)
    per_response = [sum(s.fields["old_log_probs"][t] - s.fields["reference_log_probs"][t] for t in s.steps) for s in sequences if s.steps]  # fmt: skip
    assert measure.response_divergence(pack(sequences), K1).tolist() == pytest.approx(per_response, abs=1e-5)


def test_samples_are_counted_as_they_are():
    responses = [Response([1, 2, 3], [0.0] * 3, True), Response([1], [0.0], False)]
    assert measure.samples(Scores([0.5, 1.0], [False, True]), responses) == {
        "reward": 0.75,
        "accuracy": 0.5,
        "response_length": 2,
        "response_length_max": 3,
        "finished": 0.5,
    }


def test_updates_are_means_over_all_that_was_counted():
    actor = {"entropy": (6.0, 4.0), "nothing": (0.0, 0.0)}
    assert measure.updates(actor, {"loss": (3.0, 2.0)}) == {"actor/entropy": 1.5, "critic/loss": 1.5}
