"""What the cluster says of itself, through its own commands: partitions, nodes, associations. No torch."""

from __future__ import annotations

import getpass
import re
from dataclasses import dataclass

from workflow.cluster.nodes import expand_nodes
from workflow.cluster.slurm import SlurmLimit, SlurmRefused, SlurmUnavailable, slurm

SLURM_FAILURES = (SlurmLimit, SlurmRefused, SlurmUnavailable)
"""What a call of a SLURM command may raise."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one partition that are alike."""

    partition: str
    default: bool
    """Whether jobs go there that name no partition."""
    walltime_seconds: int | None
    """None: without a limit."""
    nodes: tuple[str, ...]
    cpus: int
    memory_mb: int
    gres: str
    features: frozenset[str]
    available: bool
    """Some of them take jobs."""

    def devices(self, name: str, kind: str | None = None) -> int:
        """How many of a generic resource a node has, of any type or of one."""
        found = re.finditer(r"([A-Za-z_]+)(?::([^:(,]+))?:(\d+)", self.gres)
        return sum(int(m[3]) for m in found if m[1] == name and kind in (None, m[2]))


def node_kinds() -> list[NodeKind]:
    """Every partition's nodes.

    Raises:
        SLURM_FAILURES: SLURM does not answer, or forbids it.
    """
    output = slurm("sinfo", "-h", "-e", "-o", "%P|%l|%N|%c|%m|%G|%f|%a|%T")
    kinds = []
    for line in filter(None, output.splitlines()):
        partition, limit, nodes, cpus, memory, gres, features, up, state = line.split("|")
        kinds.append(
            NodeKind(
                partition=partition.rstrip("*"),
                default=partition.endswith("*"),
                walltime_seconds=read_limit(limit),
                nodes=tuple(expand_nodes(nodes)),
                cpus=int(cpus.rstrip("+")),
                memory_mb=int(memory.rstrip("+")),
                gres=gres,
                features=frozenset(features.split(",")),
                available=up == "up" and not state.startswith(("down", "drain", "fail", "inval")),
            )
        )
    return kinds


def read_limit(text: str) -> int | None:
    """Seconds of a time limit as SLURM prints it; None for infinite.

    >>> read_limit("30:00"), read_limit("2:00:00"), read_limit("1-00:00:00"), read_limit("infinite")
    (1800, 7200, 86400, None)
    """
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts):
        return None
    hours, minutes, seconds = [0] * (3 - len(parts)) + [int(part) for part in parts]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


@dataclass(frozen=True)
class Association:
    """An account that the user may charge."""

    account: str
    partition: str
    """Empty: all."""
    qos: frozenset[str]


def associations() -> list[Association]:
    """What the user may charge and use.

    Raises:
        SLURM_FAILURES: the cluster keeps no accounts, or its database does not answer.
    """
    user = getpass.getuser()
    output = slurm("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account,partition,qos")
    rows = [line.split("|") for line in output.splitlines() if line.strip()]
    return [Association(account, partition, frozenset(qos.split(","))) for account, partition, qos in rows]
