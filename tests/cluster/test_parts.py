"""What the launcher starts on further nodes: which nodes they are, how a lost one is told, how they are let go."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from engines.workers.nodes import JobNodes
from engines.workers.ray_node import TOLD_TO_END
from workflow.campaign.lock import process_start
from workflow.cluster.nodes import expand_counts
from workflow.cluster.parts import MEETING_POINT, NodeParts, NodesUnclear, allocated, meeting_point


@pytest.mark.parametrize(
    ("text", "counts"),
    [("8", [8]), ("8(x3)", [8, 8, 8]), ("96,48(x2),1", [96, 48, 48, 1]), ("128(x1)", [128])],
)
def test_slurms_counts_are_read(text, counts):
    assert expand_counts(text) == counts


def set_job(monkeypatch, nodes, cpus, here):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", cpus)
    monkeypatch.setenv("SLURMD_NODENAME", here)


def test_a_jobs_nodes_have_their_own_cpus(monkeypatch):
    set_job(monkeypatch, "gpu[08-09],big", "64(x2),128", "gpu08")
    assert allocated(3) == {"gpu08": 64, "gpu09": 64, "big": 128}


@pytest.mark.parametrize(("count", "here"), [(2, "gpu08"), (3, "gpu09")])
def test_other_nodes_than_planned_are_refused(monkeypatch, count, here):
    set_job(monkeypatch, "gpu[08-09],big", "64(x2),128", here)
    with pytest.raises(NodesUnclear, match=r"planned for . nodes .*gpu\[08-09\],big"):
        allocated(count)


def test_the_meeting_point_holds_all_that_a_node_must_know(monkeypatch, tmp_path):
    set_job(monkeypatch, "n[1-2]", "8(x2)", "n1")
    variables = meeting_point(["n1", "n2"], 2, "cpu", "lo", tmp_path / "start0")
    monkeypatch.setenv(*next(iter(variables.items())))
    nodes = JobNodes.read()
    assert (nodes.names, nodes.ranks_per_node, nodes.address) == (("n1", "n2"), 2, "127.0.0.1")
    assert len(nodes.token) == 64
    assert meeting_point(["n1", "n2"], 2, "cpu", "lo", tmp_path / "start1") != variables


@pytest.fixture
def start(tmp_path):
    """Parts whose scripts are given."""
    started = []

    def start_parts(scripts):
        (tmp_path / MEETING_POINT).touch()
        parts = NodeParts(["n1", *scripts], scripts.__getitem__, tmp_path)
        started.append(parts)
        return parts

    yield start_parts
    for parts in started:
        (tmp_path / MEETING_POINT).touch()
        parts.end()


def until(answer):
    deadline = time.monotonic() + 20
    while not (found := answer()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_parts_stay_until_they_are_let_go_and_nothing_is_left(start, tmp_path):
    parts = start({"n2": "exec cat", "n3": "exec cat"})
    assert parts.lost() == ""
    parts.end()
    assert not (tmp_path / MEETING_POINT).exists()
    assert all(step.returncode == 0 for step in parts._steps.values())


def test_the_first_part_that_ends_is_named_with_what_it_said(start):
    parts = start({"n2": "exec cat", "n3": "echo Ray ended here; exit 7"})
    assert until(parts.lost) == (
        "node n3 is lost: its part of the job ended with exit code 7: Ray ended here"
    )


def test_a_part_that_ends_is_no_loss_once_the_stage_needs_none(start, monkeypatch, tmp_path):
    set_job(monkeypatch, "n[1-2]", "8(x2)", "n1")
    parts = start({"n2": "exit 1"})
    assert until(parts.lost)
    variables = meeting_point(["n1", "n2"], 2, "cpu", "lo", tmp_path)
    monkeypatch.setenv(*next(iter(variables.items())))
    assert not parts.closed
    JobNodes.read().close()
    assert parts.closed
    assert parts.lost() == ""


def test_a_part_says_that_slurm_told_it_to_end(start):
    parts = start(
        {"n2": f"trap 'echo {TOLD_TO_END}' TERM; echo ready; while ! read -t 0.1 x; [ $? -gt 1 ]; do :; done"}
    )
    until(lambda: "ready" in parts._log("n2").read_text())
    assert not parts.told_to_end()
    next(iter(parts._steps.values())).send_signal(signal.SIGTERM)
    assert until(parts.told_to_end)


def test_parts_end_when_the_launcher_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from workflow.cluster.parts import NodeParts; "
        "parts = NodeParts(['n1', 'n2'], lambda name: 'exec cat', Path(sys.argv[1])); "
        "print(parts._steps['n2'].pid, flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    part = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    assert until(lambda: process_start(part) is None)
