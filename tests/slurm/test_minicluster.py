"""The test cluster itself, and what only a real SLURM can say of placement: allocations, refusals, signals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.slurm.minicluster import ClusterFailed, MiniCluster, free_ports, main
from workflow.campaign.lock import process_start
from workflow.campaign.site import StageEnvironment, detect_site, load_site
from workflow.cluster.devices import query_allocation, read_allocation
from workflow.cluster.environment import enter
from workflow.cluster.inventory import node_kinds
from workflow.cluster.placement import place
from workflow.cluster.slurm import SlurmRefused, slurm

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
WAITING = """
import os, signal, sys
signal.signal(signal.SIGUSR2, lambda *_: (print("warned on", os.uname().nodename, flush=True), sys.exit(75)))
print("ready", flush=True)
signal.pause()
"""


def until(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to pass"
        time.sleep(0.2)


def test_partitions_and_what_their_nodes_have(in_cluster):
    kinds = {kind.partition: kind for kind in node_kinds()}
    assert set(kinds) == {"cuda", "cuda-low", "ascend", "ascend-low"}
    assert kinds["cuda"].nodes == ("cuda1", "cuda2")
    assert (
        kinds["cuda"].devices("gpu"),
        kinds["ascend-low"].devices("npu"),
        kinds["cuda"].devices("npu"),
    ) == (2, 2, 0)
    assert detect_site(CONFIGS) == "mini"


def test_ranks_over_two_nodes_with_their_devices(in_cluster):
    say = "echo $(hostname) $SLURM_PROCID $CUDA_VISIBLE_DEVICES"
    said = slurm("srun", "-p", "cuda", "-N2", "--ntasks-per-node=2", "--gres=gpu:2", "bash", "-c", say)
    assert sorted(said.split("\n")[:-1]) == ["cuda1 0 0,1", "cuda1 1 0,1", "cuda2 2 0,1", "cuda2 3 0,1"]


def test_the_indices_of_npus_are_in_the_allocation(in_cluster):
    one = ["-p", "ascend", "-w", "ascend1", "--gres=npu:1", "-o", "/dev/null", "--wrap", "sleep 60"]
    jobs = [slurm("sbatch", "--parsable", *one).strip() for _ in range(2)]
    until(lambda: all("RUNNING" in query_allocation(job) for job in jobs))
    indices = [read_allocation(query_allocation(job), "npu")["ascend1"].indices for job in jobs]
    slurm("scancel", *jobs)
    assert sorted(indices) == [(0,), (1,)]


@pytest.mark.parametrize(
    "options", [["-p", "ascend", "--gres=npu:3"], ["-p", "cuda", "--gres=npu:1"], ["-p", "nowhere"]]
)
def test_what_no_node_has_is_refused_at_submission(in_cluster, options):
    with pytest.raises(SlurmRefused, match=r"not available|[Ii]nvalid partition"):
        slurm("sbatch", "--parsable", *options, "--wrap", "true")


@pytest.mark.parametrize("device", ["cuda", "npu", "cpu"])
def test_the_batch_script_runs_and_the_warning_reaches_the_stage(in_cluster, tmp_path, device):
    site = load_site("mini", CONFIGS)
    request = place(f"baton:test:{device}", device, 2, site, output=tmp_path / "log", walltime_seconds=300)
    script = enter(StageEnvironment(), ["-c", WAITING], folder=str(tmp_path))
    _warned(tmp_path, request.text(script))


def test_a_step_in_between_hands_the_warning_on(in_cluster, tmp_path):
    """What the pyxis environment relies on; the job has more tasks and nodes than the driver."""
    request = place(
        "baton:test:step",
        "cuda",
        4,
        load_site("mini", CONFIGS),
        output=tmp_path / "log",
        walltime_seconds=300,
    )
    container = StageEnvironment(kind="pyxis", image="image", python="python3")
    script = enter(
        container,
        ["-c", WAITING],
        folder=str(tmp_path),
        cpus=request.tasks_per_node * (request.cpus_per_task or 1),
    )
    words = [
        word for word in script.split(" ") if not word.startswith("--container")
    ]  # the plugin itself is not here
    _warned(tmp_path, request.text(" ".join(words)))


def _warned(folder: Path, text: str) -> None:
    log = folder / "log"
    (folder / "job.sh").write_text(text)
    job = slurm("sbatch", "--parsable", str(folder / "job.sh")).strip()
    until(lambda: log.exists() and "ready" in log.read_text())
    slurm("scancel", "--batch", "--signal=USR2", job)
    until(lambda: "ExitCode=75:0" in slurm("scontrol", "show", "job", job))
    assert log.read_text().count("warned on") == 1


def test_where_no_cluster_can_run_the_reason_is_told(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for command in ("install", "start"):
        monkeypatch.setattr(sys, "argv", ["minicluster", command])
        assert main() == 1
        assert "needs root" in capsys.readouterr().err


def test_stop_ends_what_jobs_left_behind_and_nothing_else(tmp_path):
    folder = Path(tempfile.mkdtemp(prefix="baton-mini-", dir="/tmp"))
    other = MiniCluster(folder, accounting=False, port=free_ports())
    stranger = subprocess.Popen(["sleep", "300"])
    other.start()
    try:
        with pytest.raises(ClusterFailed, match="is running"):
            other.start()
        left = tmp_path / "pid"
        other.run("srun", "-p", "ascend", "bash", "-c", f"setsid sleep 300 >/dev/null 2>&1 & echo $! >{left}")
        pid = int(left.read_text())
        assert process_start(pid)
        assert (
            subprocess.run(["sacct"], capture_output=True, env=os.environ | other.environment).returncode == 1
        )
    finally:
        other.stop()
        shutil.rmtree(folder)
    assert process_start(pid) is None
    assert not any(other.alive(name) for name in other.daemons())
    assert stranger.poll() is None
    stranger.kill()
