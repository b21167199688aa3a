"""One real cluster for all tests of this folder, and one campaign that nobody disturbs there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.minicluster import MiniCluster, free_ports, install, unavailable
from tests.slurm.relay import PATIENCE, Relay


@pytest.fixture(scope="session")
def cluster() -> Iterator[MiniCluster]:
    """With accounting; in a folder and on ports of its own, so that another cluster on this host is left alone."""
    if reason := unavailable():
        pytest.skip(reason)
    install()
    folder = Path(tempfile.mkdtemp(prefix="baton-mini-", dir="/tmp"))
    running = MiniCluster(folder, port=free_ports())
    running.start()
    yield running
    running.stop()
    shutil.rmtree(folder)


@pytest.fixture
def in_cluster(cluster, monkeypatch) -> MiniCluster:
    """SLURM's commands talk to the cluster."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


@pytest.fixture(scope="session")
def undisturbed(cluster, tmp_path_factory) -> Relay:
    """The campaign relay from its first stage to its report."""
    relay = Relay.create(tmp_path_factory.mktemp("relay") / "undisturbed", cluster)
    head = relay.start(only_training=False)
    assert head.wait(2 * PATIENCE) == 0, head.said()
    relay.said = head.said()
    return relay


@pytest.fixture
def half(undisturbed, request) -> Iterator[Relay]:
    """A folder in which the second segment of training is still to be run; it waits there after one step."""
    yield from undisturbed.half_for(request.node.name)


@pytest.fixture
def closed(cluster) -> Iterator[Callable[[], None]]:
    """The ascend partitions take jobs and start none until ``closed()`` is called."""
    names = ("ascend", "ascend-low")

    def set_state(state: str) -> None:
        for name in names:
            cluster.run("scontrol", "update", f"PartitionName={name}", f"State={state}")

    set_state("DOWN")
    yield lambda: set_state("UP")
    set_state("UP")
