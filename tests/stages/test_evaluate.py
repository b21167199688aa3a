import math

import pytest

from engines.rollout.base import Response
from workflow.data import Problem
from workflow.stages.evaluate import summary, wilson_interval


@pytest.mark.parametrize(("right", "total"), [(0, 10), (3, 10), (10, 10), (700, 1024)])
def test_interval_holds_the_shares_that_the_score_test_accepts(right, total):
    """Its ends are where |p_hat - p| = z sqrt(p (1 - p) / n)."""
    low, high = wilson_interval(right, total)
    share = right / total
    for end in (low, high):
        if 0 < end < 1:
            assert abs(share - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / total), rel=1e-5)
    assert low <= share <= high


def test_summary_splits_by_task():
    problems = [Problem("a", "1", task="chain_sum"), Problem("b", "2"), Problem("c", "3", task="chain_sum")]
    responses = [
        Response([1, 2], [0.0, 0.0], True),
        Response([1], [0.0], True),
        Response([1] * 6, [0.0] * 6, False),
    ]
    metrics = summary(problems, responses, [True, False, False])
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["tasks"]["chain_sum"]["accuracy"] == 0.5
    assert metrics["tasks"]["exact match"]["problems"] == 1
    assert metrics["response_length"] == 3
    assert metrics["finished"] == pytest.approx(2 / 3)
