"""Choosing tokens: keyed noise, inverse CDF, top-k, top-p."""

import math

import numpy as np
import pytest
import torch

from engines.rollout.base import RolloutError, SamplingParams
from engines.rollout.sampling import choose, uniforms
from engines.streams import stream_key

KEYS = [stream_key("test", i) for i in range(129)]


def noise(keys, position=0):
    return torch.from_numpy(uniforms(keys, position, 1))[:, 0]


def test_uniforms_are_splitmix64():
    # First outputs of the reference generator seeded with 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniforms([1234567], 0, 3)[0]
    assert got.tolist() == [(bits >> 11) / 2**53 for bits in expected]


def test_uniforms_depend_on_key_and_position_only():
    whole = uniforms(KEYS, 0, 40)
    assert np.array_equal(uniforms(KEYS[7:9], 30, 10), whole[7:9, 30:40])
    assert whole.min() >= 0
    assert whole.max() < 1
    assert abs(whole.mean() - 0.5) < 4 * math.sqrt(1 / 12 / whole.size)
    assert len(np.unique(whole)) == whole.size


@pytest.mark.parametrize("vocabulary", [5, 64, 257, 5003])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=3),
        SamplingParams(greedy=True),
    ],
)
def test_ids_do_not_depend_on_the_batch(vocabulary, params):
    logits = 3 * torch.randn(len(KEYS), vocabulary, generator=torch.Generator().manual_seed(0))
    ids, log_probs = choose(logits, noise(KEYS), params)
    for size in (1, 2, 3, 17, 64):
        for start in range(0, len(KEYS), size):
            rows = slice(start, start + size)
            some_ids, some_log_probs = choose(logits[rows], noise(KEYS[rows]), params)
            assert torch.equal(some_ids, ids[rows])
            assert torch.equal(some_log_probs, log_probs[rows])


def test_samples_follow_the_distribution():
    probs = torch.tensor([0.5, 0.25, 0.15, 0.09, 0.01])
    count = 20_000
    ids, log_probs = choose(
        probs.log().expand(count, -1),
        noise([stream_key("follow", i) for i in range(count)]),
        SamplingParams(),
    )
    share = torch.bincount(ids, minlength=5) / count
    assert ((share - probs).abs() <= 4 * (probs * (1 - probs) / count).sqrt()).all()
    assert torch.allclose(log_probs, probs.log()[ids], atol=1e-6)


def test_edges_of_the_unit_interval_give_tokens_with_weight():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    just_below_one = 1 - 2**-53
    ids, _ = choose(logits, torch.tensor([0.0, just_below_one], dtype=torch.float64), SamplingParams())
    assert ids.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("params", "support"),
    [
        (SamplingParams(top_k=2), {0, 2}),
        (SamplingParams(top_p=0.6), {0, 2}),
        (SamplingParams(top_p=0.4), {0}),
        (SamplingParams(top_k=3, top_p=0.86), {0, 2}),  # 0.75 of the 0.85 that top-k leaves is 88 %
        (SamplingParams(top_k=99, top_p=1.0), {0, 1, 2, 3, 4}),
    ],
)
def test_support_of_top_k_and_top_p(params, support):
    probs = torch.tensor([0.5, 0.10, 0.25, 0.09, 0.06])
    uniform = torch.linspace(0, 1 - 1e-9, 2000, dtype=torch.float64)
    ids, log_probs = choose(probs.log().expand(2000, -1), uniform, params)
    assert set(ids.tolist()) == support
    # Recorded log-probs are of the policy, not of what top-k and top-p leave.
    assert torch.allclose(log_probs, probs.log()[ids], atol=1e-6)


def test_log_probs_are_at_the_temperature():
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    ids, log_probs = choose(
        logits, torch.tensor([0.99], dtype=torch.float64), SamplingParams(temperature=2.0)
    )
    assert torch.allclose(log_probs, torch.log_softmax(logits / 2.0, -1)[:, ids[0]])


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_k": -1}, {"max_new_tokens": 0}],
)
def test_parameters_out_of_range_are_named(values):
    with pytest.raises(RolloutError, match=next(iter(values))):
        SamplingParams(**values)
