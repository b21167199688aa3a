"""How the nodes of a job find each other: ports, addresses, interfaces, and the record of it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from engines.workers import ray_node
from engines.workers.nodes import (
    PORTS,
    VARIABLE,
    JobNodes,
    NodesUnreachable,
    free_port,
    interface_addresses,
    interface_of,
    own_address,
    socket_variables,
    usable_cpus,
)
from engines.workers.ray_settings import accelerators

NODES = JobNodes(("n1", "n2"), 4, "npu", "10.0.0.1", 20017, "secret", None, "/shared/ranks")


def test_the_port_follows_from_the_job_and_neighbouring_jobs_stay_apart():
    ports = {job: free_port(job) for job in (17, 18, 17 + len(PORTS))}
    assert ports[17] == ports[17 + len(PORTS)]
    assert ports[17] != ports[18]
    assert set(ports.values()) <= set(PORTS)


def test_a_port_that_somebody_listens_on_is_passed_over_for_one_far_away():
    first = free_port(4711)
    with socket.socket() as taken:
        taken.bind(("127.0.0.12", first))  # on any address: Ray listens on all of them
        taken.listen()
        second = free_port(4711)
        assert second not in range(first, first + 500)
        assert second == free_port(4711)
    assert free_port(4711) == first


def test_ports_lie_below_those_of_connections():
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")
    assert PORTS.stop <= int(given.split()[0])


def test_the_address_is_that_of_the_named_interface_or_of_the_route():
    assert own_address("n1", "nowhere.invalid", "lo") == "127.0.0.1"
    for name, address in interface_addresses().items():
        assert interface_of(address) == name
        assert own_address(socket.gethostname(), address, None) in interface_addresses().values()


def test_nodes_on_one_host_are_told_apart_by_their_names():
    assert own_address("127.0.0.12", "127.0.0.11", None) == "127.0.0.12"
    assert interface_of("127.0.0.12") == "lo"


@pytest.mark.parametrize(
    ("peer", "interface", "told"),
    [
        ("n2", "nowhere0", r"node n1: no interface 'nowhere0' with an IPv4 address; there are .*lo"),
        ("nowhere.invalid", None, r"node n1: no route to nowhere\.invalid .*site\.devices\.<key>\.interface"),
    ],
)
def test_what_cannot_be_reached_is_named(peer, interface, told):
    with pytest.raises(NodesUnreachable, match=told):
        own_address("n1", peer, interface)


def test_collectives_use_that_interface_unless_the_environment_says_another(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0")
    assert socket_variables("hsn0") == {
        "GLOO_SOCKET_IFNAME": "hsn0",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "HCCL_SOCKET_IFNAME": "=hsn0",
    }


def test_the_record_is_for_its_owner_only_and_comes_back(tmp_path, monkeypatch):
    path = tmp_path / "nodes.json"
    NODES.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(VARIABLE, str(path))
    assert JobNodes.read() == NODES
    monkeypatch.delenv(VARIABLE)
    assert JobNodes.read() is None


def test_ray_is_told_what_the_job_has_and_where(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "96")
    command = ray_node.command(NODES, "n2", "10.0.0.2", tmp_path)
    assert command[command.index("start") :] == [
        *("start", "--block", "--log-style=record", "--address=10.0.0.1:20017"),
        *("--node-ip-address=10.0.0.2", "--node-name=n2", "--num-cpus=96", "--num-gpus=0"),
        *('--resources={"NPU": 4}', "--object-store-memory=268435456"),
        *("--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={tmp_path}/ray"),
    ]
    command = ray_node.command(replace(NODES, device="cuda"), "n2", "10.0.0.2", tmp_path)
    assert "--num-gpus=4" in command
    assert accelerators("cpu", 4) == (0, {})


def test_outside_a_job_the_cpus_are_those_of_the_affinity(monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    assert usable_cpus() == len(os.sched_getaffinity(0))
