"""Cutting and spreading batches, and putting results back in order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.workers import dispatch


@given(
    st.integers(1, 6), st.integers(1, 7), st.integers(1, 3), st.one_of(st.none(), st.integers(0, 2**63 - 1))
)
def test_every_epoch_sees_every_sequence_once(count, size, epochs, key):
    steps = dispatch.plan_mini_batches(count * size, size, epochs, key)
    assert [len(step) for step in steps] == [size] * (count * epochs)
    for epoch in range(epochs):
        seen = [i for step in steps[epoch * count : (epoch + 1) * count] for i in step]
        assert sorted(seen) == list(range(count * size))


def test_without_a_key_the_order_stays_and_with_one_each_epoch_has_its_own():
    assert dispatch.plan_mini_batches(4, 2, 2, None) == [[0, 1], [2, 3]] * 2
    first, second = dispatch.plan_mini_batches(64, 64, 2, 5)
    assert first != second
    assert dispatch.plan_mini_batches(64, 64, 1, 5) == [first]
    assert dispatch.plan_mini_batches(64, 64, 1, 6) != [first]


@pytest.mark.parametrize(("sequences", "size", "epochs"), [(0, 1, 1), (6, 4, 1), (4, 0, 1), (4, 2, 0)])
def test_sizes_that_do_not_fit_are_refused(sequences, size, epochs):
    with pytest.raises(dispatch.MiniBatchError):
        dispatch.plan_mini_batches(sequences, size, epochs, None)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40), st.integers(1, 5), st.data())
def test_shares_hold_every_sequence_once_in_like_numbers(lengths, ranks, data):
    indices = data.draw(st.permutations(range(len(lengths))))
    shares = dispatch.spread(indices, lengths, ranks)
    assert sorted(i for share in shares for i in share) == sorted(indices)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_shares_have_like_cost():
    lengths = [1000, 10, 10, 10, 900, 10, 10, 10]
    tokens = [sum(lengths[i] for i in share) for share in dispatch.spread(range(8), lengths, 2)]
    assert max(tokens) - min(tokens) <= 100


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=30), st.integers(1, 4))
def test_requests_are_balanced_and_responses_restored(prompts, replicas):
    shares = dispatch.spread_requests(prompts, replicas)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    answers = [[prompts[i] for i in share] for share in shares]
    assert dispatch.restore_order(answers, shares) == prompts


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 4))
def test_outputs_come_back_in_order(lengths, ranks):
    shares = dispatch.spread(range(len(lengths)), lengths, ranks)

    def outputs(share):  # each token tells its sequence and its place in it
        return {
            "x": torch.tensor([100.0 * i + t for i in share for t in range(lengths[i])]),
        }

    batch = dispatch.collect([outputs(share) for share in shares], shares, torch.tensor(lengths))
    assert batch.lengths.tolist() == lengths
    assert torch.equal(batch.tokens["x"], outputs(range(len(lengths)))["x"])
