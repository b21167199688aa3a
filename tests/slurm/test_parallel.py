"""Many jobs at once, on both partitions."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from bench.slurm.chain import OURS, parallel, run

pytestmark = pytest.mark.slurm


def test_twenty_jobs_over_both_partitions(cluster, tmp_path):
    folder = tmp_path / "twenty"
    starts = run(folder, cluster, sys.executable, OURS, parallel(20))
    assert Counter(start.partition for start in starts) == {"cuda": 10, "ascend": 10}
    assert len({start.name for start in starts}) == len({start.job for start in starts}) == len(starts) == 20
    assert len(list(folder.glob("results/store/convert/*/manifest.json"))) == 20
    names = cluster.run("squeue", "--states=all", "-h", "-o", "%o %j").splitlines()
    assert len([name for name in names if f"/{folder.name}/" in name]) == 20
