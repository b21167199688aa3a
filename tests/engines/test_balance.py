"""How evenly the benchmark's long-tailed steps are cut; a count, so it can be asserted."""

from bench.batches import RANKS, greedy, imbalance, measure, step_lengths
from engines.training.batch.split import sequence_costs
from engines.training.packed_attention import PADDING, SLACK
from engines.workers.dispatch import spread


def test_long_tailed_steps_are_cut_evenly():
    lengths = step_lengths(seed=0)
    found = measure(lengths)
    assert found["useful"] >= 0.98
    # A sequence is padded to at most so many times its length, and a little.
    most = sum(PADDING * length + SLACK for length in lengths)
    assert sum(lengths) / most <= found["useful_in_attention"] < 1
    assert found["fullest_micro_batch"] <= 1
    assert found["imbalance"] <= 0.03
    assert found["idle"] <= 0.03


def test_balancing_beats_greedy_over_many_steps():
    totals = {"greedy": 0.0, "ours": 0.0}
    for seed in range(20):
        lengths = step_lengths(seed)
        costs = sequence_costs(lengths)
        totals["ours"] += imbalance(costs, spread(range(len(lengths)), lengths, RANKS))
        totals["greedy"] += imbalance(costs, greedy(costs))
    assert totals["ours"] < totals["greedy"]
