"""Ray over two nodes that share this host: ranks in the nodes' order, nobody without the token, nothing left on either."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from engines.workers import ray_cluster
from engines.workers.group import build_groups
from engines.workers.nodes import CLOSED, VARIABLE, JobNodes, free_port
from engines.workers.ray_cluster import RayCluster, RayStartError
from tests.support.models import save_tiny_model
from tests.support.processes import children, wait_until_gone
from tests.workers import scenario

NAMES = ("127.0.0.11", "127.0.0.12")


@pytest.fixture
def nodes(tmp_path) -> JobNodes:
    port = free_port(os.getpid())
    return JobNodes(NAMES, 1, "cpu", NAMES[0], port, "0" * 64, None, str(tmp_path / "ranks"))


@pytest.fixture
def start_part(tmp_path):
    """Starts the part of the second node; its standard output is text."""
    started = []

    def start(nodes: JobNodes) -> subprocess.Popen:
        path = tmp_path / f"nodes{len(started)}.json"
        nodes.write(path)
        variables = {VARIABLE: str(path), "SLURMD_NODENAME": NAMES[1], "RAY_ADDRESS": "192.0.2.1:6379"}
        part = subprocess.Popen(
            [sys.executable, "-m", "engines.workers.ray_node"],
            env=os.environ | variables | {"PYTHONPATH": str(Path.cwd())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(part)
        return part

    yield start
    for part in started:
        part.stdin.close()
        part.wait(60)


def test_ranks_follow_the_nodes_and_both_are_left_clean(nodes, start_part, tmp_path, monkeypatch):
    part = start_part(nodes)
    stranger = start_part(replace(nodes, token="1" * 64))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nodes0.json"))
    actor, critic = scenario.specs(save_tiny_model(tmp_path / "model"), ranks=2)
    critic = replace(critic, engine=critic.engine.model_copy(update={"deterministic": True}))
    group = build_groups([actor, critic])["actor"]

    def where(_) -> tuple[str, str, bool]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return ray.util.get_node_ip_address(), os.environ["LOCAL_RANK"], deterministic

    seen = ray.get([actor.__ray_call__.remote(where) for actor in group._actors])
    assert seen == [(NAMES[0], "0", True), (NAMES[1], "0", True)]
    assert stranger.wait(60) == 1
    assert "Ray ended here" in stranger.stdout.read()
    assert [node["NodeName"] for node in ray.nodes() if node["Alive"]].count(NAMES[1]) == 1

    processes = children(part.pid)
    assert processes
    group.shutdown()
    assert (tmp_path / CLOSED).exists()
    assert part.poll() is None
    part.stdin.close()
    assert part.wait(60) == 0
    assert wait_until_gone(processes) == set()


def test_a_part_waits_for_the_head_until_it_is_let_go(nodes, start_part):
    part = start_part(nodes)
    with pytest.raises(subprocess.TimeoutExpired):
        part.wait(3)
    part.stdin.close()
    assert part.wait(30) == 0


def test_a_node_that_does_not_join_in_time_is_named(nodes, monkeypatch):
    monkeypatch.setattr(ray_cluster, "REGISTRATION_SECONDS", 1.0)
    with pytest.raises(RayStartError, match=rf"after 1 s {NAMES[1]} did not join the Ray of {NAMES[0]}"):
        RayCluster(nodes)
    assert not ray.is_initialized()
