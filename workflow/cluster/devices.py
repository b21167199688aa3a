"""Which devices of a node an allocation has. SLURM masks gpus by itself; of npus it knows the indices and tells nobody. No torch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from workflow.campaign.site import DeviceSite
from workflow.cluster.nodes import expand_nodes, expand_numbers
from workflow.cluster.slurm import SlurmLimit, SlurmRefused, SlurmUnavailable, slurm

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable by which a runtime is told its devices."""
PATIENCE, PAUSE = 300.0, 5.0
"""Seconds for which a controller that does not answer is asked, and between two questions."""
_GRES_NAME = {"cuda": "gpu", "npu": "npu"}
_NODES = re.compile(r"^\s+Nodes=(\S+) .*?\bGRES=(.*)$", re.MULTILINE)
_GRES = re.compile(
    r"(?P<name>[A-Za-z_]+)(?::(?P<type>[^:(,]+))?:(?P<count>\d+)(?:\((?P<how>IDX|CNT):(?P<what>[^)]*)\))?"
)


class DevicesUnclear(RuntimeError):
    """It cannot be told which devices of the node are this job's; guessing would take those of another job."""


@dataclass(frozen=True)
class Allocated:
    """Devices of one node that belong to a job."""

    count: int
    indices: tuple[int, ...] | None
    """As the node numbers them; None when SLURM only counted."""


def read_allocation(text: str, device: str) -> dict[str, Allocated]:
    """The devices of a job per node, out of ``scontrol show job -d``.

    Args:
        device: cuda or npu.
    """
    name = _GRES_NAME[device]
    found: dict[str, Allocated] = {}
    for nodes, gres in _NODES.findall(text):
        entries = [entry for entry in _GRES.finditer(gres) if entry["name"] == name]
        if not entries:
            continue
        counted = any(entry["how"] != "IDX" for entry in entries)
        numbers = [int(n) for e in entries if e["how"] == "IDX" for n in expand_numbers(e["what"]) if n]
        allocated = Allocated(
            sum(int(entry["count"]) for entry in entries), None if counted else tuple(sorted(numbers))
        )
        found |= dict.fromkeys(expand_nodes(nodes), allocated)
    return found


def query_allocation(job_id: str) -> str:
    """What ``scontrol show job -d`` says of a job; a controller that is busy or restarts is asked again for ``PATIENCE``.

    Raises:
        DevicesUnclear: SLURM does not answer, or says no.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return slurm("scontrol", "show", "job", "-d", job_id, timeout=30)
        except (SlurmUnavailable, SlurmRefused, SlurmLimit) as error:
            if not isinstance(error, SlurmUnavailable) or time.monotonic() > deadline:
                raise DevicesUnclear(f"job {job_id}: scontrol does not tell its devices ({error})") from None
        time.sleep(PAUSE)


def visible_devices(
    ask: Callable[[], str], node: str, device: str, offered: DeviceSite
) -> tuple[int, ...] | None:
    """The indices to make visible to this job's processes on ``node``; None when everything they see is theirs.

    Args:
        ask: gives the text of ``scontrol show job -d``; called only where it matters.
        offered: what the site says of the device key.

    Raises:
        DevicesUnclear: SLURM only counted the devices, and the job does not have the whole node.
    """
    if offered.stand_in or offered.confines_devices or device not in VISIBLE:
        return None
    allocated = read_allocation(ask(), device).get(node)
    if allocated is not None and allocated.indices is not None:
        return allocated.indices
    if offered.whole_nodes != "no" or (allocated is not None and allocated.count == offered.devices_per_node):
        return None
    has = "no devices" if allocated is None else f"{allocated.count} of {offered.devices_per_node} devices"
    raise DevicesUnclear(
        f"node {node}: SLURM gives this job {has} without saying which; ask for whole nodes "
        f"(site.devices.{device}.whole_nodes: ask), or have gres.conf name the device files (File=)"
    )


def device_variables(device: str, indices: tuple[int, ...] | None) -> dict[str, str]:
    """Environment variables that make just those devices visible; none when nothing has to be masked."""
    return {} if indices is None else {VISIBLE[device]: ",".join(map(str, indices))}
