"""Training on two nodes of a real SLURM: the same bits as on one, also when a node's part dies and when SLURM wants the nodes back."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.relay import PATIENCE, Relay
from workflow.campaign.lock import process_start

pytestmark = pytest.mark.slurm
LAYOUT = "engine.layout.data_parallel_size=2"
TWO_NODES = f"{LAYOUT} site.devices.npu.devices_per_node=1"


@pytest.fixture(scope="module")
def one_node(cluster, tmp_path_factory) -> Relay:
    """Both segments with both ranks on one node."""
    relay = Relay.create(tmp_path_factory.mktemp("nodes") / "one", cluster)
    for _ in range(2):  # --until ends at the first segment that is published
        head = relay.start(overrides=LAYOUT)
        assert head.wait(2 * PATIENCE) == 0, head.said()
    return relay


@pytest.fixture
def half(one_node, request) -> Iterator[Relay]:
    """A folder in which the second segment is still to be run; it waits there after one step."""
    yield from one_node.half_for(request.node.name)


def of_job(job: str, node: str, *words: str) -> list[int]:
    """Processes of a job on a node whose command line has one of ``words``."""
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"SLURMD_NODENAME={node}".encode()}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            variables = set((process / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if wanted <= variables and any(word.encode() in command for word in words):
            found.append(int(process.name))
    return found


def check_nothing_is_left(half: Relay, job: str, processes: list[tuple[int, str]]) -> None:
    deadline = time.monotonic() + 60
    while left := [pid for pid, started in processes if process_start(pid) == started]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    for prefix in ("baton-ray-", "baton-job-"):
        assert not [path for path in Path("/tmp").glob(f"{prefix}*") if f"/{job}/" in str(path.resolve())]
    assert not list((half.folder / "results/.jobs").rglob("nodes.json"))


def test_two_nodes_give_the_bits_of_one(one_node, half):
    os_address = {"RAY_ADDRESS": "192.0.2.1:6379"}  # must be ignored: nobody is there
    head = half.start(overrides=TWO_NODES, **os_address)
    job = half.job(head, "RUNNING").job
    half.steps(head, 1)
    nodes = half.cluster.run("squeue", "-h", "-j", job, "-o", "%D %N").split()
    assert nodes == ["2", "ascend[1-2]"]
    ranks = {node: of_job(job, node, "ray::RankActor") for node in ("ascend1", "ascend2")}
    assert [len(found) for found in ranks.values()] == [1, 1]
    described = {node: environment(found[0]) for node, found in ranks.items()}
    ours = [
        (pid, process_start(pid)) for node in ranks for pid in of_job(job, node, "ray", "workflow.stages")
    ]
    for node, variables in described.items():
        assert variables["GLOO_SOCKET_IFNAME"] == "lo"
        assert variables["RAY_AUTH_MODE"] == "token"
        caches = Path(variables["TORCHINDUCTOR_CACHE_DIR"])
        assert caches.parts[1] == "tmp", node
        assert caches.parts[2].startswith("baton-"), node
    assert len({variables["TORCHINDUCTOR_CACHE_DIR"] for variables in described.values()}) == 2
    assert len({variables["RAY_AUTH_TOKEN"] for variables in described.values()}) == 1
    folders = {Path(*Path(v["TORCHINDUCTOR_CACHE_DIR"]).parts[:3]) for v in described.values()}

    half.release()
    assert head.wait() == 0, head.said()
    assert half.weights() == one_node.weights()
    half.cluster.wait_until_idle()
    check_nothing_is_left(half, job, ours)
    assert not [folder for folder in folders if folder.exists()]


def environment(pid: int) -> dict[str, str]:
    """With which a process was started."""
    entries = (Path(f"/proc/{pid}/environ").read_bytes()).decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@pytest.mark.parametrize("victim", ["raylet", "engines.workers.ray_node"])
def test_a_nodes_part_that_dies_ends_the_job_and_the_next_one_goes_on(one_node, half, victim):
    head = half.start(overrides=TWO_NODES)
    job = half.job(head, "RUNNING").job
    half.steps(head, 1)
    ours = [
        (pid, process_start(pid))
        for node in ("ascend1", "ascend2")
        for pid in of_job(job, node, "ray", "workflow.stages")
    ]
    for pid in of_job(job, "ascend2", victim):
        os.kill(pid, signal.SIGKILL)
    half.until(head, "another job", lambda: half.record().attempt == 2)
    half.release()
    assert head.wait(2 * PATIENCE) == 0, head.said()
    assert "NODE_FAIL: SLURM job" in head.said()
    assert "node ascend2 is lost: its part of the job ended with exit code" in head.said()
    record = half.record()
    assert (record.attempt, record.excluded) == (2, [])
    assert half.jobs_submitted() == {job, record.job}
    assert [start["end"] for start in half.starts()][-1] == "published"
    assert half.weights() == one_node.weights()
    half.cluster.wait_until_idle()
    check_nothing_is_left(half, job, ours)


def test_on_a_warning_and_when_steps_are_told_to_end_all_ranks_save_and_the_job_goes_on(one_node, half):
    half.release()
    head = half.start(overrides=TWO_NODES, RELAY_PAUSE="3")
    job = half.job(head, "RUNNING").job
    half.steps(head, 1)
    half.cluster.run("scancel", "--batch", "--signal=USR2", job)
    half.until(head, "the second start", lambda: len(half.starts()) == 2)
    half.steps(head, 2)
    half.cluster.run("scancel", "--signal=TERM", job)  # to the steps: the batch script does not hear it
    assert head.wait(2 * PATIENCE) == 0, head.said()
    assert half.jobs_submitted() == {job}
    starts = half.starts()
    assert [(start["job"], start["restart"]) for start in starts] == [(job, n) for n in range(3)]
    assert [start["end"] for start in starts] == ["stopped", "stopped", "published"]
    assert half.weights() == one_node.weights()


def test_the_state_of_two_nodes_goes_on_on_one(one_node, half):
    half.release()
    head = half.start(overrides=LAYOUT)
    assert head.wait() == 0, head.said()
    assert half.weights() == one_node.weights()
    extra = json.loads((half.folder / half.train.manifest(6)).read_text())
    assert extra["world_size"] == 2
