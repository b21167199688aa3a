"""The devices of an allocation, out of SLURM's own words (22.05), and never a guess."""

from __future__ import annotations

import pytest

from engines.config import parse
from workflow.campaign.site import DeviceSite
from workflow.cluster import devices
from workflow.cluster.devices import (
    Allocated,
    DevicesUnclear,
    device_variables,
    query_allocation,
    read_allocation,
    visible_devices,
)
from workflow.cluster.nodes import expand_nodes
from workflow.cluster.slurm import SlurmRefused, SlurmUnavailable

ONE = """JobId=3 JobName=hostname
   TRES=cpu=1,mem=256M,node=1,billing=1,gres/npu=1
   JOB_GRES=npu:1
     Nodes=ascend1 CPU_IDs=0 Mem=256 GRES=npu:1(IDX:1)
   TresPerNode=gres:npu:1
"""
SEVERAL = """JobId=4 JobName=train
     Nodes=node[01-02] CPU_IDs=0-7 Mem=256 GRES=npu:4(IDX:0-2,5)
     Nodes=node03 CPU_IDs=0-7 Mem=256 GRES=gpu:a100:1(IDX:0),npu:2(IDX:6-7)
"""
COUNTED = "JobId=5\n     Nodes=n1 CPU_IDs=0-7 Mem=256 GRES=npu:{count}(CNT:{count})\n"
NODE = parse(DeviceSite, {"devices_per_node": 8, "gres": "npu:{devices}"})


def test_indices_are_those_of_the_node():
    assert read_allocation(ONE, "npu") == {"ascend1": Allocated(1, (1,))}
    assert visible_devices(lambda: ONE, "ascend1", "npu", NODE) == (1,)
    assert device_variables("npu", (1,)) == {"ASCEND_RT_VISIBLE_DEVICES": "1"}


def test_nodes_of_one_job_may_differ():
    allocated = read_allocation(SEVERAL, "npu")
    assert allocated == {
        "node01": Allocated(4, (0, 1, 2, 5)),
        "node02": Allocated(4, (0, 1, 2, 5)),
        "node03": Allocated(2, (6, 7)),
    }
    assert read_allocation(SEVERAL, "cuda") == {"node03": Allocated(1, (0,))}


def test_counted_devices_are_a_whole_node_or_a_refusal():
    assert visible_devices(lambda: COUNTED.format(count=8), "n1", "npu", NODE) is None  # all of them are ours
    with pytest.raises(DevicesUnclear, match=r"2 of 8 devices without saying which.*whole_nodes"):
        visible_devices(lambda: COUNTED.format(count=2), "n1", "npu", NODE)


def test_no_devices_at_all_are_a_refusal_unless_the_node_is_whole():
    text = "JobId=6\n     Nodes=n1 CPU_IDs=0-7 Mem=256 GRES=\n"
    with pytest.raises(DevicesUnclear, match="no devices"):
        visible_devices(lambda: text, "n1", "npu", NODE)
    assert (
        visible_devices(lambda: text, "n1", "npu", NODE.model_copy(update={"whole_nodes": "always"})) is None
    )


@pytest.mark.parametrize("update", [{"stand_in": True}, {"confines_devices": True}])
def test_nothing_is_masked_where_a_job_sees_only_its_own(update):
    def nobody_asks() -> str:
        raise AssertionError("SLURM was asked")

    assert visible_devices(nobody_asks, "ascend1", "npu", NODE.model_copy(update=update)) is None
    assert device_variables("npu", None) == {}


def test_node_lists():
    assert expand_nodes("cuda1") == ["cuda1"]
    assert expand_nodes("a[1-3,7],b,c[08-10]") == ["a1", "a2", "a3", "a7", "b", "c08", "c09", "c10"]
    assert expand_nodes("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]


def test_a_controller_that_is_busy_is_asked_again(monkeypatch):
    answers = [SlurmUnavailable("Unable to contact slurm controller"), SlurmUnavailable("timed out"), ONE]

    def answer(*command: str, timeout: float) -> str:
        if isinstance(said := answers.pop(0), Exception):
            raise said
        return said

    monkeypatch.setattr(devices, "slurm", answer)
    monkeypatch.setattr(devices, "PAUSE", 0.0)
    assert query_allocation("5") == ONE
    answers[:] = [SlurmRefused("no")]
    with pytest.raises(DevicesUnclear, match="does not tell its devices"):
        query_allocation("5")
    monkeypatch.setattr(devices, "PATIENCE", 0.0)
    answers[:] = [SlurmUnavailable("timed out")] * 3
    with pytest.raises(DevicesUnclear, match="timed out"):
        query_allocation("5")
