"""One real cluster for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.minicluster import MiniCluster, install


@pytest.fixture(scope="session")
def cluster() -> Iterator[MiniCluster]:
    """With accounting; in a folder and on ports of its own, so that another cluster on this host is left alone."""
    install()
    folder = Path(tempfile.mkdtemp(prefix="baton-mini-", dir="/tmp"))
    running = MiniCluster(folder, port=17800)
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
