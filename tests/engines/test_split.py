"""Balanced partitions, and micro-batches within a token budget on which all ranks agree."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.config import EngineConfig
from engines.training.batch import (
    MicroBatch,
    PackedBatch,
    SequenceTooLongError,
    balanced_partitions,
    pipeline_order,
    sequence_costs,
    split_micro_batches,
)
from tests.support.ranks import RankFailed, run_ranks


def make_batch(lengths: list[int]) -> PackedBatch:
    return PackedBatch.from_sequences(
        {
            "input_ids": [torch.full((length,), s) for s, length in enumerate(lengths)],
            "loss_mask": [torch.ones(length) for length in lengths],
        }
    )


def config(**values: object) -> EngineConfig:
    return EngineConfig(**values)


def covered(micro_batches: list[MicroBatch]) -> list[int]:
    return sorted(index for m in micro_batches if not m.is_filler for index in m.indices)


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9), st.booleans())
def test_partitions_hold_every_item_once(costs: list[int], parts: int, equal_size: bool) -> None:
    result = balanced_partitions(costs, parts, equal_size)
    assert len(result) == parts
    assert sorted(itertools.chain(*result)) == list(range(len(costs)))
    assert all(items == sorted(items) for items in result)
    if equal_size:
        sizes = [len(items) for items in result]
        assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_partitions_are_near_the_best_possible(costs: list[int], parts: int) -> None:
    """Worse than the lower bound by at most one item, which any sensible balancing keeps."""
    heaviest = max(sum(costs[i] for i in items) for items in balanced_partitions(costs, parts))
    assert heaviest <= sum(costs) / parts + max(costs)


def test_differencing_beats_filling_in_order() -> None:
    sums = sorted(sum([8, 7, 6, 5, 4][i] for i in items) for items in balanced_partitions([8, 7, 6, 5, 4], 2))
    assert sums == [14, 16]  # Karmarkar and Karp's own example


def test_no_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="parts=0"):
        balanced_partitions([1], 0)


def test_costs_grow_faster_than_lengths() -> None:
    short, long = sequence_costs([1000, 2000])
    assert long > 2 * short


def test_the_first_guess_of_the_count_may_break_the_cap() -> None:
    """Eight sequences of 7 into a budget of 8: 7 bins by the sum of lengths, 8 in truth."""
    micro_batches = split_micro_batches(make_batch([7] * 8), config(token_budget=8), False)
    assert [m.batch.num_tokens for m in micro_batches] == [7] * 8


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(50, 200), st.integers(1, 4))
def test_the_budget_is_a_hard_cap(lengths: list[int], budget: int, multiple: int) -> None:
    micro_batches = split_micro_batches(
        make_batch(lengths), config(token_budget=budget), False, None, multiple
    )
    assert covered(micro_batches) == list(range(len(lengths)))
    assert len(micro_batches) % multiple == 0
    assert all(m.batch.num_tokens <= budget for m in micro_batches)
    for m in micro_batches:
        if not m.is_filler:
            assert m.batch.tokens["input_ids"].unique().tolist() == sorted(m.indices)


def test_inference_has_its_own_budget() -> None:
    settings_ = config(token_budget=8, inference_token_budget=64)
    assert len(split_micro_batches(make_batch([7] * 8), settings_, True)) == 1
    assert len(split_micro_batches(make_batch([7] * 8), settings_, False)) == 8


def test_fixed_size_ignores_the_budget() -> None:
    settings_ = config(dynamic_micro_batches=False, micro_batch_size=3, token_budget=8)
    micro_batches = split_micro_batches(make_batch([7] * 8), settings_, False)
    assert [m.indices for m in micro_batches] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_costly_micro_batches_come_first() -> None:
    tokens = [
        m.batch.num_tokens
        for m in split_micro_batches(make_batch([9, 2, 5, 1]), config(token_budget=9), False)
    ]
    assert tokens == sorted(tokens, reverse=True)


def pipeline_time(costs: list[int], stages: int) -> float:
    """Until the last of ``stages`` is done, each with one forward of cost 1 and one backward of cost 2 by turns (1F1B)."""
    todo = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, len(costs))
        steps = [("forward", i) for i in range(ahead)]
        for i in range(len(costs)):
            steps += [("forward", ahead + i)] * (ahead + i < len(costs)) + [("backward", i)]
        todo.append(steps)
    done, clock = {}, [0.0] * stages
    while any(todo):
        for stage, steps in enumerate(todo):
            if not steps:
                continue
            what, i = steps[0]
            before = ("forward", i, stage - 1) if what == "forward" else ("backward", i, stage + 1)
            inside = before[2] in range(stages)
            if inside and before not in done:
                continue
            start = max(clock[stage], done.get(before, 0.0))
            clock[stage] = done[what, i, stage] = start + costs[i] * (1 if what == "forward" else 2)
            steps.pop(0)
    return max(clock)


def test_a_pipeline_idles_least_with_cheap_micro_batches_at_both_ends() -> None:
    assert pipeline_time([1, 1, 1, 1], 2) == 3 * (4 + 1)  # the bubble of equal ones: stages - 1
    lengths = [[9 + 7 * (i * seed % 11) for i in range(8)] for seed in range(1, 11)]
    times = {"descending": 0.0, "ascending": 0.0, "ours": 0.0}
    for drawn in lengths:
        settings_ = config(dynamic_micro_batches=False, micro_batch_size=1)
        ours = pipeline_order(split_micro_batches(make_batch(drawn), settings_, False))
        assert covered(ours) == list(range(8))
        for name, order in (
            ("descending", sorted(drawn, reverse=True)),
            ("ascending", sorted(drawn)),
            ("ours", [m.batch.num_tokens for m in ours]),
        ):
            times[name] += pipeline_time(order, 4)
    assert times["ours"] < 0.97 * min(times["descending"], times["ascending"])


def test_a_pipeline_s_fillers_stand_at_its_ends() -> None:
    split = split_micro_batches(make_batch([9, 3, 5]), config(token_budget=9), False, multiple=5)
    assert [m.batch.num_tokens for m in pipeline_order(split)] == [1, 5, 9, 3, 1]
    assert pipeline_order([]) == []


def test_fillers_are_one_token_without_loss() -> None:
    *_, last = split_micro_batches(make_batch([3, 3]), config(token_budget=8), False, multiple=3)
    assert last.is_filler
    assert last.batch.num_tokens == 1
    assert not last.batch.tokens["loss_mask"].any()


def rank_split(shares: list[list[int]], budget: int) -> list[tuple[list[int], int]]:
    import torch.distributed as dist

    batch = make_batch(shares[dist.get_rank()])
    result = split_micro_batches(batch, config(token_budget=budget), False, dist.group.WORLD)
    return [(m.indices, m.batch.num_tokens) for m in result]


def test_ranks_agree_on_the_number_of_micro_batches() -> None:
    shares = [[10, 10, 10], [2, 2, 2, 2], []]
    first, second, third = run_ranks(3, rank_split, shares, 10)
    assert len(first) == len(second) == len(third) == 3
    assert sorted(i for indices, _ in second for i in indices) == [0, 1, 2, 3]  # spread, not stuffed
    assert [indices for indices, _ in third] == [[-1]] * 3


def test_one_ranks_long_sequence_stops_all_of_them() -> None:
    with pytest.raises(RankFailed) as raised:
        run_ranks(2, rank_split, [[3], [11]], 10)
    assert {name for name, _ in raised.value.errors.values()} == {SequenceTooLongError.__name__}
    assert len(raised.value.errors) == 2
    assert "11 tokens" in raised.value.errors[0][1]
