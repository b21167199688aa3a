"""Packed batches and the weights of the exact loss."""

from __future__ import annotations

import pytest
import torch

from engines.training.batch import AGGREGATIONS, LossTotals, PackedBatch, loss_totals, loss_weights
from tests.support.ranks import run_ranks

LENGTHS = [5, 1, 7, 3]


def make_batch(lengths: list[int] = LENGTHS) -> PackedBatch:
    """Token i of sequence s is 100 s + i; the first two tokens of each carry no loss."""
    return PackedBatch.from_sequences(
        {
            "input_ids": [100 * s + torch.arange(length) for s, length in enumerate(lengths)],
            "loss_mask": [(torch.arange(length) >= 2).float() for length in lengths],
        },
        {"reward": torch.arange(len(lengths)).float()},
    )


def test_positions_restart_in_each_sequence() -> None:
    batch = make_batch([3, 1, 2])
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.lengths.tolist() == [3, 1, 2]
    assert (len(batch), batch.num_tokens) == (3, 6)


def test_select_takes_sequences_in_the_order_given() -> None:
    chosen = make_batch().select([2, 0])
    assert chosen.tokens["input_ids"].tolist() == [*range(200, 207), *range(5)]
    assert chosen.sequences["reward"].tolist() == [2, 0]
    assert chosen.cu_seqlens.tolist() == [0, 7, 12]
    empty = make_batch().select([])
    assert (len(empty), empty.num_tokens, empty.tokens["loss_mask"].dtype) == (0, 0, torch.float32)


def test_concatenating_selections_restores_the_batch() -> None:
    batch = make_batch()
    again = PackedBatch.concatenate([batch.select([0, 1]), batch.select([2]), batch.select([3])])
    assert torch.equal(again.tokens["input_ids"], batch.tokens["input_ids"])
    assert torch.equal(again.cu_seqlens, batch.cu_seqlens)
    with pytest.raises(ValueError, match="different fields"):
        PackedBatch.concatenate([batch, batch.with_tokens(weight=torch.zeros(16))])


def test_the_border_format_and_back_also_after_indexing() -> None:
    batch = make_batch()
    border = batch.to_tensordict()
    fields = [border["input_ids"], border["loss_mask"]]
    assert fields[0].offsets() is fields[1].offsets()
    back = PackedBatch.from_tensordict(border)
    assert torch.equal(back.tokens["input_ids"], batch.tokens["input_ids"])
    assert torch.equal(back.sequences["reward"], batch.sequences["reward"])
    part = PackedBatch.from_tensordict(border[[3, 0]])
    assert part.tokens["input_ids"].tolist() == batch.select([3, 0]).tokens["input_ids"].tolist()


def test_fields_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="'loss_mask' differ in lengths"):
        PackedBatch.from_sequences({"input_ids": [torch.zeros(2)], "loss_mask": [torch.zeros(3)]})
    with pytest.raises(ValueError, match="'weight' has 3 entries"):
        make_batch().with_tokens(weight=torch.zeros(3))


def by_hand(aggregation: str, masks: list[list[float]], max_length: int) -> list[float]:
    """The definitions, sequence by sequence."""
    tokens = sum(map(sum, masks))
    sequences = sum(any(mask) for mask in masks)
    weights = []
    for mask in masks:
        for m in mask:
            weights.append(
                {
                    "token-mean": m / tokens,
                    "token-sum": m,
                    "seq-mean-token-sum": m / sequences,
                    "seq-mean-token-mean": m / (sum(mask) or 1) / sequences,
                    "seq-mean-token-sum-norm": m / (max_length * sequences),
                }[aggregation]
            )
    return weights


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_are_those_of_the_definitions(aggregation: str) -> None:
    batch = make_batch()
    masks = [m.tolist() for m in batch.tokens["loss_mask"].split(batch.lengths.tolist())]
    weights = loss_weights(batch, aggregation, loss_totals(batch), max_length=10)
    torch.testing.assert_close(weights, torch.tensor(by_hand(aggregation, masks, 10)))


def test_totals_count_sequences_with_loss_tokens_only() -> None:
    assert loss_totals(make_batch()) == LossTotals(tokens=3 + 0 + 5 + 1, sequences=3)


def test_a_loss_on_a_first_token_is_refused() -> None:
    batch = make_batch()
    mask = batch.tokens["loss_mask"].index_fill(0, batch.cu_seqlens[2:3], 1.0)
    with pytest.raises(ValueError, match="first token of 1 sequences"):
        loss_totals(batch.with_tokens(loss_mask=mask))


def test_without_loss_tokens_all_weights_are_zero() -> None:
    batch = make_batch([1, 2])
    for aggregation in AGGREGATIONS:
        assert not loss_weights(batch, aggregation, loss_totals(batch), max_length=4).any()


def test_a_function_of_ones_own_is_given_the_counts_and_counts_on_loss_tokens_only() -> None:
    batch = make_batch()
    mask = batch.tokens["loss_mask"]

    def own_share(mask, own, totals, max_length):
        return own / totals.tokens + max_length

    found = loss_weights(batch, own_share, loss_totals(batch), max_length=10)
    in_sequence = [m.sum() for m in mask.split(batch.lengths.tolist())]
    expected = torch.cat([(count / 9 + 10).expand(n) for count, n in zip(in_sequence, batch.lengths.tolist(), strict=True)])  # fmt: skip
    torch.testing.assert_close(found, expected * (mask > 0))


def test_wrong_aggregations_are_refused() -> None:
    totals = loss_totals(make_batch())
    with pytest.raises(ValueError, match="known: token-mean"):
        loss_weights(make_batch(), "tokenmean", totals)
    with pytest.raises(ValueError, match="max_length"):
        loss_weights(make_batch(), "seq-mean-token-sum-norm", totals)


def rank_weights() -> dict[str, list[float]]:
    import torch.distributed as dist

    share = make_batch().select([[0, 3], [1, 2]][dist.get_rank()])
    totals = loss_totals(share, dist.group.WORLD)
    return {a: loss_weights(share, a, totals, max_length=10).tolist() for a in AGGREGATIONS}


def test_shares_on_two_ranks_get_the_weights_of_the_whole() -> None:
    first, second = run_ranks(2, rank_weights)
    batch = make_batch()
    for aggregation in AGGREGATIONS:
        weights = loss_weights(batch, aggregation, loss_totals(batch), max_length=10)
        for share, indices in ((first, [0, 3]), (second, [1, 2])):
            assert share[aggregation] == weights[batch.token_rows(indices)].tolist()
