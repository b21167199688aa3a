"""The further nodes of a job: what the launcher starts on them, how it learns that one is lost, and how it lets them go. No torch.

The stage itself runs on the first node. On each of the others a step of the job enters the stage's environment and joins the stage's
Ray (:mod:`engines.workers.ray_node`). Each hangs by its standard input, so nothing is left of them when this process dies.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engines.workers.nodes import CLOSED, VARIABLE, JobNodes, free_port, own_address
from engines.workers.ray_node import TOLD_TO_END
from workflow.cluster.nodes import expand_counts, expand_nodes
from workflow.cluster.states import last_lines

ARGUMENTS = ["-m", "engines.workers.ray_node"]
MEETING_POINT = "nodes.json"
LEAVING_SECONDS = 60.0
"""For the parts to remove what is theirs."""


class NodesUnclear(RuntimeError):
    """SLURM gave other nodes than the job was planned for."""


class NodeParts:
    """The parts of a job on all its nodes but the first.

    Args:
        names: of the job's nodes, in their order.
        script: the shell script that starts the part on a node.
        folder: seen by all nodes, of this start; the meeting point must be there.
    """

    def __init__(self, names: Sequence[str], script: Callable[[str], str], folder: Path) -> None:
        self._folder = folder
        self._steps = {
            name: subprocess.Popen(
                ["bash", "-c", script(name)],
                stdin=subprocess.PIPE,
                stdout=self._log(name).open("wb"),
                stderr=subprocess.STDOUT,
            )
            for name in names[1:]
        }

    def lost(self) -> str:
        """Why the job cannot go on: the first part that has ended; empty while all are there, and once the stage needs none."""
        if self.closed:
            return ""
        for name, step in self._steps.items():
            if step.poll() is not None:
                told = " ".join(last_lines(self._log(name), 3))
                return (
                    f"node {name} is lost: its part of the job ended with exit code {step.returncode}: {told}"
                )
        return ""

    @property
    def closed(self) -> bool:
        """Whether the stage has said that it needs them no longer."""
        return (self._folder / CLOSED).exists()

    def told_to_end(self) -> bool:
        """Whether SIGTERM came to a part: SLURM may send it to the steps of a job and not to its batch script."""
        return any(TOLD_TO_END in last_lines(self._log(name)) for name in self._steps)

    def end(self) -> None:
        """Let them go, and wait until they are gone."""
        for step in self._steps.values():
            step.stdin.close()
        deadline = time.monotonic() + LEAVING_SECONDS
        for step in self._steps.values():
            try:
                step.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                step.kill()
                step.wait()
        (self._folder / MEETING_POINT).unlink()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.txt"


def allocated(count: int) -> dict[str, int]:
    """The nodes of the job that this process runs in, in their order, and how many CPUs it has on each.

    Raises:
        NodesUnclear: there are not ``count`` of them, or this process is not on the first.
    """
    names = expand_nodes(os.environ["SLURM_JOB_NODELIST"])
    if len(names) != count or os.environ["SLURMD_NODENAME"] != names[0]:
        raise NodesUnclear(
            f"the job was planned for {count} nodes and starts on the first: "
            f"SLURM gave {os.environ['SLURM_JOB_NODELIST']}, and this is {os.environ['SLURMD_NODENAME']}"
        )
    return dict(zip(names, expand_counts(os.environ["SLURM_JOB_CPUS_PER_NODE"]), strict=True))


def meeting_point(
    names: Sequence[str], ranks_per_node: int, device: str, interface: str | None, folder: Path
) -> dict[str, str]:
    """Write down how the nodes find each other, in ``folder``; the variables by which their processes know.

    Raises:
        NodesUnreachable: the first node's address cannot be told.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MEETING_POINT
    JobNodes(
        names=tuple(names),
        ranks_per_node=ranks_per_node,
        device=device,
        address=own_address(names[0], names[1], interface),
        port=free_port(int(os.environ["SLURM_JOB_ID"])),
        token=secrets.token_hex(32),
        interface=interface,
        logs=str(folder / "ranks"),
    ).write(path)
    return {VARIABLE: str(path)}
