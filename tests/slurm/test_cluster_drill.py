"""A drill on the cluster: six faults to jobs, nodes, daemons and processes, and the results of the campaign left alone."""

from __future__ import annotations

from functools import partial

import pytest

from tests.slurm.faults import ClusterCampaign, cluster_faults
from tests.slurm.relay import HERE
from workflow.drill.run import Drill

pytestmark = pytest.mark.slurm


def test_six_faults_change_nothing(in_cluster, tmp_path):
    drill = Drill(
        words=[
            f"campaign={HERE / 'relay.yaml'}",
            "set=site.devices.npu.preemptible=true checkpoint.save_every=1",
        ],
        kills=6,
        seed=0,
        output=tmp_path / "drill",
        faults=lambda how: cluster_faults(in_cluster),
        make=partial(ClusterCampaign, cluster=in_cluster),
        aimed=0,
        share_in_time=0,
    )
    record = drill.run()
    assert record.passed, record
    assert len(record.hits) == 6
    assert len({hit.kind for hit in record.hits}) == 6
