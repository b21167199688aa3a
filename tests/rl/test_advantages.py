import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow.rl.advantages import gae, grpo, whiten

numbers = st.floats(-3, 3, width=32)


@st.composite
def sequences(draw):
    """(rewards, values, mask) per sequence; rewards only where the mask is 1."""
    result = []
    for _ in range(draw(st.integers(1, 4))):
        mask = draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
        rewards = [draw(numbers) * m for m in mask]
        result.append((rewards, [draw(numbers) for _ in mask], mask))
    return result


def flat(batch, place):
    return torch.tensor([entry for sequence in batch for entry in sequence[place]], dtype=torch.float32)


def cu_seqlens(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def slow_gae(rewards, values, mask, gamma, lam):
    """The definition, as a sum over the tokens that the policy wrote: A_t = sum_k (gamma lambda)^k delta_{t+k}."""
    steps = [t for t, m in enumerate(mask) if m]
    advantages = [0.0] * len(mask)
    for i, t in enumerate(steps):
        for k, u in enumerate(steps[i:]):
            following = values[steps[i + k + 1]] if i + k + 1 < len(steps) else 0.0
            advantages[t] += (gamma * lam) ** k * (rewards[u] + gamma * following - values[u])
    return advantages


@settings(deadline=None)
@given(sequences(), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_its_definition(batch, gamma, lam):
    mask = flat(batch, 2)
    advantages, returns = gae(
        flat(batch, 0), flat(batch, 1), mask, cu_seqlens([len(s[2]) for s in batch]), gamma, lam
    )
    expected = torch.tensor(
        [a for rewards, values, m in batch for a in slow_gae(rewards, values, m, gamma, lam)]
    )
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns, (expected + flat(batch, 1)) * mask, atol=1e-5, rtol=1e-5)


def test_credit_passes_over_tokens_that_the_policy_did_not_write():
    mask = torch.tensor([0.0, 1, 1, 0, 0, 1])
    rewards = torch.tensor([0.0, 0, 0, 0, 0, 1])
    values = torch.tensor([9.0, 0.5, 0.4, 9.0, 9.0, 0.2])
    advantages, _ = gae(rewards, values, mask, torch.tensor([0, 6]), gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, torch.tensor([0, 0.5, 0.6, 0, 0, 0.8]))


def test_a_reward_that_would_be_lost_is_an_error():
    with pytest.raises(ValueError, match="rewards must be 0"):
        gae(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([0, 2]), 1, 1)


def test_whitened_advantages():
    mask = torch.tensor([1.0, 0, 1, 1])
    whitened = whiten(torch.tensor([1.0, 99, 2, 3]), mask)
    torch.testing.assert_close(whitened, torch.tensor([-1.0, 0, 0, 1]))
    assert whiten(torch.tensor([5.0, 5.0]), torch.ones(2)).tolist() == [0, 0]
    assert whiten(torch.tensor([5.0]), torch.ones(1)).tolist() == [0]


def grpo_scores(scores, groups, normalize_by_std, lengths=None):
    lengths = lengths or [2] * len(scores)
    mask = torch.tensor([m for n in lengths for m in ([0.0] + [1.0] * n)])
    starts = cu_seqlens([n + 1 for n in lengths])
    advantages = grpo(torch.tensor(scores), torch.tensor(groups), mask, starts, normalize_by_std)
    assert bool((advantages[mask == 0] == 0).all())
    return [advantages[end - 1].item() for end in starts[1:]]


def test_grpo_formula():
    scores, groups = [1.0, 0.0, 0.0, 5.0, 3.0], [7, 7, 7, 2, 2]
    assert grpo_scores(scores, groups, True) == pytest.approx(
        [1.154699, -0.577349, -0.577349, 0.707106, -0.707106], abs=1e-5
    )
    assert grpo_scores(scores, groups, False) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1.0, -1.0], abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2)), min_size=1, max_size=12), st.booleans())
def test_grpo_is_its_definition_in_any_order(samples, normalize):
    groups, scores = [g for g, _ in samples], [s for _, s in samples]
    for advantage, (group, score) in zip(grpo_scores(scores, groups, normalize), samples, strict=True):
        own = [s for g, s in samples if g == group]
        mean = sum(own) / len(own)
        deviation = math.sqrt(sum((s - mean) ** 2 for s in own) / max(len(own) - 1, 1))
        expected = 0.0
        if deviation > 1e-6:
            expected = (score - mean) / ((deviation + 1e-6) if normalize else 1)
        assert advantage == pytest.approx(expected, abs=1e-3)


def test_groups_without_a_difference_get_nothing():
    assert grpo_scores([0.7, 0.1, 0.1, 0.1], [0, 1, 1, 1], True) == [0, 0, 0, 0]


def test_a_rejected_sequence_does_not_count_in_its_group():
    scores = [1.0, 0.0, 5.0, 0.0]
    advantages = grpo_scores(scores, [0, 0, 0, 0], True, lengths=[1, 1, 0, 1])
    assert [advantages[i] for i in (0, 1, 3)] == pytest.approx([1.154699, -0.577349, -0.577349], abs=1e-5)
    assert advantages[2] == 0
