"""Training on two nodes of a real SLURM: the same bits as on one, also when a node's part dies and when SLURM wants the nodes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.slurm.relay import PATIENCE, Relay
from workflow.campaign.lock import process_start
from workflow.cluster.states import failed_nodes

pytestmark = pytest.mark.slurm
LAYOUT = "engine.layout.data_parallel_size=2"
NODES = ("ascend1", "ascend2")
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
    """Processes of a job on a node whose command line, its arguments ended by NUL, has one of ``words``."""
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


def environment(pid: int) -> dict[str, str]:
    """With which a process was started."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


class Footprint:
    """What a job of two nodes has on them while it trains, and what must be gone after it."""

    def __init__(self, job: str) -> None:
        ranks = {node: of_job(job, node, "ray::RankActor") for node in NODES}
        assert [len(found) for found in ranks.values()] == [1, 1]
        self.variables = [environment(found[0]) for found in ranks.values()]
        pids = {pid for node in NODES for pid in of_job(job, node, "ray", "workflow.stages")}
        of_ray = set().union(*map(below_tmp, pids))
        # Ray's agents overwrite what they were started with, and are known by their files alone.
        everybody = [int(process.name) for process in Path("/proc").glob("[0-9]*")]
        pids |= {pid for pid in everybody if below_tmp(pid) & of_ray}
        self.processes = [(pid, process_start(pid)) for pid in pids]
        caches = [Path(variables["TORCHINDUCTOR_CACHE_DIR"]) for variables in self.variables]
        self.folders = [*(cache.parents[1] for cache in caches), *map(Path, of_ray)]

    def check_nothing_is_left(self, half: Relay) -> None:
        """Wait until all of it is gone."""
        deadline = time.monotonic() + 60
        while left := [pid for pid, started in self.processes if process_start(pid) == started]:
            assert time.monotonic() < deadline, "\n".join(described(pid) for pid in left)
            time.sleep(0.2)
        assert not [folder for folder in self.folders if folder.exists()]
        assert not list((half.folder / "results/.jobs").rglob("nodes.json"))


def described(pid: int) -> str:
    """A process that should be gone: whose child it is, what it runs and what it has open."""
    with suppress(OSError):
        process = Path(f"/proc/{pid}")
        parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        files = sorted({str(entry.readlink()) for entry in (process / "fd").iterdir()})
        return f"{pid}, child of {parent}: {command}\n  {files}"
    return f"{pid}, gone by now"


def below_tmp(pid: int) -> set[str]:
    """Private folders of Ray in which a process has files open."""
    found = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                parts = entry.readlink().parts
                if len(parts) > 3 and parts[2].startswith("baton-ray-"):
                    found.add("/".join(parts[:3])[1:])
    return found


def test_two_nodes_give_the_bits_of_one(one_node, half):
    head = half.start(overrides=TWO_NODES, RAY_ADDRESS="192.0.2.1:6379")  # to be ignored: nobody is there
    job = half.job(head, "RUNNING").job
    half.steps(head, 1)
    assert half.cluster.run("squeue", "-h", "-j", job, "-o", "%D %N").split() == ["2", "ascend[1-2]"]
    footprint = Footprint(job)
    assert len(set(footprint.folders)) == 3  # of the launcher, of the driver's Ray, and of the other node's
    for name, different in (("RAY_AUTH_TOKEN", 1), ("GLOO_SOCKET_IFNAME", 1), ("SLURMD_NODENAME", 2)):
        assert len({variables[name] for variables in footprint.variables}) == different, name

    half.release()
    assert head.wait() == 0, head.said()
    assert half.weights() == one_node.weights()
    half.cluster.wait_until_idle()
    footprint.check_nothing_is_left(half)


def test_of_a_jobs_nodes_those_are_avoided_that_slurm_has_put_out_of_service(in_cluster, monkeypatch):
    def update(state: str) -> None:
        in_cluster.run("scontrol", "update", f"NodeName={NODES[1]}", f"State={state}", "Reason=test")

    in_cluster.wait_until_idle()
    assert failed_nodes([NODES[0]]) == [NODES[0]]
    assert failed_nodes([*NODES]) == []
    update("DRAIN")
    assert failed_nodes([*NODES]) == [NODES[1]]
    update("RESUME")
    in_cluster.wait_until_idle()
    monkeypatch.setenv("SLURM_CONF", "/none")
    assert failed_nodes([*NODES]) == []


@pytest.mark.parametrize(
    "victim",
    ["/raylet\0", "\0-m\0engines.workers.ray_node\0"],  # the words of the command, not of a path in it
    ids=["the scheduler of Ray", "what holds Ray"],
)
def test_a_nodes_part_that_dies_ends_the_job_and_the_next_one_goes_on(one_node, half, victim):
    head = half.start(overrides=TWO_NODES)
    job = half.job(head, "RUNNING").job
    half.steps(head, 1)
    footprint = Footprint(job)
    (killed,) = of_job(job, "ascend2", victim)
    os.kill(killed, signal.SIGKILL)
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
    footprint.check_nothing_is_left(half)


@pytest.mark.parametrize(
    "words",
    [("--batch", "--signal=USR2"), ("--signal=TERM",)],
    ids=["the warning, to the batch script", "the end, to the steps alone"],
)
def test_before_the_end_all_ranks_save_and_the_same_job_goes_on(one_node, half, words):
    head = half.start(overrides=TWO_NODES)
    job = half.job(head, "RUNNING").job
    half.steps(head, 1)
    half.cluster.run("scancel", *words, job)
    half.until(head, "the request to save", lambda: "told to save its state" in half.job_log())
    half.release()
    assert head.wait(2 * PATIENCE) == 0, head.said()
    assert half.jobs_submitted() == {job}
    starts = half.starts()
    assert [(start["job"], start["restart"]) for start in starts] == [(job, 0), (job, 1)]
    assert [(start["last_step"], start["end"]) for start in starts] == [(5, "stopped"), (6, "published")]
    assert half.weights() == one_node.weights()
