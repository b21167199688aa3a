"""Rollout correction and its metrics against slow references; dynamic sampling's choice of prompts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.rollout.base import Response
from tests.rl.samples import Sequence, batches, pack, unpack
from workflow.campaign.algorithm import CorrectionConfig, FilterConfig
from workflow.rl.correction import correct, importance_weights, mismatch
from workflow.rl.filtering import Samples, chosen_prompts, informative
from workflow.rl.rewards import Scores

FIELDS = ("old_log_probs", "rollout_log_probs")


def log_ratios(sequence):
    """log w of each loss token, from its definition."""
    old, rollout = (sequence.fields[name] for name in FIELDS)
    return [old[t] - rollout[t] for t in sequence.steps]


@settings(deadline=None, max_examples=25)
@given(batches(FIELDS), st.sampled_from(["token", "sequence"]), st.sampled_from(["truncate", "mask"]))
def test_weights_are_their_definition(sequences, weights, bound):
    config = CorrectionConfig(weights=weights, bound=bound, low=0.6, high=1.7)
    found = unpack(importance_weights(pack(sequences), config), sequences)
    for row, s in zip(found, sequences, strict=True):
        logs = log_ratios(s)
        for log, t in zip(logs, s.steps, strict=True):
            weight = math.exp(sum(logs) if weights == "sequence" else log)
            outside = bound == "mask" and not 0.6 <= weight <= 1.7
            assert row[t] == pytest.approx(0 if outside else min(weight, 1.7), rel=1e-5)


@settings(deadline=None, max_examples=25)
@given(batches(FIELDS), st.sampled_from(["mean", "product"]), st.randoms(use_true_random=False))
def test_rejection_takes_whole_responses_in_any_order(sequences, reject, random):
    config = CorrectionConfig(reject=reject, reject_low=0.5, reject_high=1.5)
    random.shuffle(sequences)
    batch = correct(pack(sequences), config)
    masks, rewards = (unpack(batch.tokens[name], sequences) for name in ("loss_mask", "rewards"))
    for mask, reward, s in zip(masks, rewards, sequences, strict=True):
        logs = log_ratios(s) or [0.0]
        ratio = math.exp(sum(logs) / (len(logs) if reject == "mean" else 1))
        kept = 0.5 <= ratio <= 1.5
        assert mask == [m * kept for m in s.mask]
        assert reward == [r * kept for r in s.fields["rewards"]]


@settings(deadline=None, max_examples=25)
@given(batches(FIELDS), st.sampled_from(["token", "sequence"]), st.sampled_from(["mean", "product"]))
def test_weights_and_rejection_go_together(sequences, weights, reject):
    """Weights are those of what was sampled, whatever is rejected; what is rejected does not depend on the weights."""
    bounds = {"low": 0.6, "high": 1.7, "reject_low": 0.5, "reject_high": 1.5}
    both = correct(pack(sequences), CorrectionConfig(weights=weights, reject=reject, **bounds))
    weighted = correct(pack(sequences), CorrectionConfig(weights=weights, **bounds))
    rejected = correct(pack(sequences), CorrectionConfig(reject=reject, **bounds))
    assert torch.equal(both.tokens["correction"], weighted.tokens["correction"])
    for name in ("loss_mask", "rewards"):
        assert torch.equal(both.tokens[name], rejected.tokens[name])
    assert both.tokens.keys() == {*rejected.tokens, "correction"}


def test_without_a_correction_nothing_is_added():
    batch = pack(example())
    assert correct(batch, CorrectionConfig()) is batch


def example():
    """A few sequences of different lengths."""
    generator = torch.Generator().manual_seed(0)
    return [
        Sequence(
            mask,
            {name: torch.randn(len(mask), generator=generator).tolist() for name in ("rewards", *FIELDS)},
        )
        for mask in ([0, 1, 1, 0, 1], [0, 0, 1], [0, 1])
    ]


def test_mismatch_metrics_are_those_of_the_whole_batch():
    sequences = example()
    logs = [log for s in sequences for log in log_ratios(s)]
    weights, n = [math.exp(log) for log in logs], len(logs)
    products = [math.exp(sum(log_ratios(s))) for s in sequences]
    assert mismatch(pack(sequences)) == pytest.approx(
        {
            "rollout_kl": -sum(logs) / n,
            "rollout_k3": sum(w - 1 - log for w, log in zip(weights, logs, strict=True)) / n,
            "rollout_difference": sum(map(abs, logs)) / n,
            "rollout_sequence_ratio_min": min(products),
            "rollout_sequence_ratio_max": max(products),
            "rollout_effective_samples": sum(weights) ** 2 / (n * sum(w * w for w in weights)),
        },
        rel=1e-5,
    )


def test_ratios_far_away_stay_finite():
    sequences = example()
    for s in sequences:
        s.fields["rollout_log_probs"] = [-1000.0] * len(s.mask)
    batch = pack(sequences)
    assert all(math.isfinite(value) for value in mismatch(batch).values())
    for weights in ("token", "sequence"):
        assert torch.isfinite(importance_weights(batch, CorrectionConfig(weights=weights))).all()


def samples(rewards):
    """Samples with these rewards; right are those of reward 1."""
    sequences = example()[:1] * len(rewards)
    return Samples(
        pack(sequences),
        [Response([1], [0.0], True) for _ in rewards],
        Scores(list(rewards), [r == 1 for r in rewards]),
    )


def test_a_prompt_is_informative_when_its_samples_differ():
    drawn = samples([0.0, 0.5, 0.5, 0.5, 1.0, 0.0])
    assert informative(drawn, 2, FilterConfig(by="reward")) == [True, False, True]
    assert informative(drawn, 2, FilterConfig(by="accuracy")) == [False, False, True]
    assert informative(samples([0.1 + 0.2, 0.3]), 2, FilterConfig(by="reward")) == [False]  # but for rounding


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_useful_prompts_come_first_and_keep_their_order(useful, data):
    wanted = data.draw(st.integers(1, len(useful)))
    chosen = chosen_prompts(useful, wanted)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == wanted
    assert sum(useful[i] for i in chosen) == min(sum(useful), wanted)


def test_selecting_samples_moves_everything_together():
    drawn = Samples.concatenate([samples([0.0, 1.0]), samples([0.5, 1.0])])
    picked = drawn.select([3, 0])
    assert (picked.scores.rewards, picked.scores.correct) == ([1.0, 0.0], [True, False])
    assert (len(drawn), len(picked), len(picked.batch)) == (4, 2, 2)
