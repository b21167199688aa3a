"""A stage's device key and layout, and the site -> what sbatch is asked for, typed and as text. No torch.

One task per rank, so that SLURM spreads CPUs and memory as the ranks are spread; the batch step itself is the driver, which runs
once. The warning signal goes to it alone (``B:``).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engines.config import ConfigError
from workflow.campaign.pace import SIGNAL_SLACK
from workflow.campaign.plan import StageSpec
from workflow.campaign.site import UNKNOWN, DeviceSite, SiteConfig, read_seconds, spell_seconds

SIGNAL = "USR2"
"""The warning before the end of a job."""
LARGEST_WARNING = 65535
"""Seconds; more is refused by sbatch."""
PREFIX = "baton"
Parameters = dict[str, str | int | bool]


@dataclass(frozen=True)
class SbatchRequest:
    """What one job asks SLURM for. None means that the option is not given."""

    name: str
    """Job name and comment: ``baton:<stage>:<id>``, by which a job is found again."""
    nodes: int
    tasks_per_node: int
    """Ranks on each node."""
    time_seconds: int
    warning_seconds: int
    """Before the end, for the warning signal."""
    output: Path
    """Log of the batch step, appended to by every start."""
    cpus_per_task: int | None = None
    memory_mb: int | None = None
    """Host memory per node."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    devices: tuple[str, str] | None = None
    """Option and value by which devices are asked for, for instance ("gres", "gpu:4")."""
    exclusive: bool = False
    exclude: tuple[str, ...] = ()
    """Nodes that failed before."""
    requeue: bool = True
    further: dict[str, str] = field(default_factory=dict)
    """Options that only this site needs."""

    def parameters(self) -> Parameters:
        """sbatch's options by their long names; True for an option without a value."""
        given: dict[str, str | int | bool | None] = {
            "job-name": self.name,
            "comment": self.name,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "cpus-per-task": self.cpus_per_task,
            "mem": None if self.memory_mb is None else f"{self.memory_mb}M",
            **({} if self.devices is None else dict([self.devices])),
            "exclusive": self.exclusive or None,
            "exclude": ",".join(self.exclude) or None,
            "time": spell_seconds(self.time_seconds),
            "signal": f"B:{SIGNAL}@{self.warning_seconds}",
            "requeue" if self.requeue else "no-requeue": True,
            "open-mode": "append",
            "output": str(self.output),
        }
        return {name: value for name, value in (given | self.further).items() if value is not None}

    def text(self, script: str) -> str:
        """The batch script: these options, then ``script``."""
        return "\n".join(
            ["#!/bin/bash", *(_line(*option) for option in self.parameters().items()), "", script]
        )


def place_stage(
    spec: StageSpec,
    site: SiteConfig,
    *,
    output: Path,
    step: int | None = None,
    walltime_seconds: int | None = None,
    warning_seconds: int = SIGNAL_SLACK,
    memory_factor: float = 1.0,
    exclude: Iterable[str] = (),
) -> SbatchRequest:
    """Where and how a planned stage is submitted.

    Args:
        output: log of the batch step.
        step: training: the step at which the segment ends.
        walltime_seconds: of the job; the longest that the site gives when not set.
        warning_seconds: see :func:`workflow.campaign.pace.warning_for`.
        memory_factor: times the share of host memory, for a job that ran out of it; never more than the node has.
        exclude: nodes that failed before.

    Raises:
        ConfigError: the site does not offer the device, does not say what the job needs, or the layout does not fit its nodes.
    """
    return place(
        job_name(spec.stage, spec.id, step),
        site.key_of(spec.device),
        spec.at(step).world_size,
        site,
        output=output,
        walltime_seconds=walltime_seconds,
        warning_seconds=warning_seconds,
        memory_factor=memory_factor,
        exclude=exclude,
    )


def check_place(spec: StageSpec, site: SiteConfig, step: int | None, warning_seconds: int) -> None:
    """Whether a stage can be placed at all. Where the site leaves the walltime open, the job's own is asked for later.

    Raises:
        ConfigError: as :func:`place_stage`.
    """
    offered = site.devices.get(site.key_of(spec.device))
    left_open = offered is not None and offered.walltime in (None, UNKNOWN)
    place_stage(
        spec,
        site,
        output=Path("job.txt"),
        step=step,
        walltime_seconds=2 * LARGEST_WARNING if left_open else None,
        warning_seconds=warning_seconds,
    )


def place(
    name: str,
    device: str,
    ranks: int,
    site: SiteConfig,
    *,
    output: Path,
    walltime_seconds: int | None = None,
    warning_seconds: int = SIGNAL_SLACK,
    memory_factor: float = 1.0,
    exclude: Iterable[str] = (),
) -> SbatchRequest:
    """What :func:`place_stage` does, for any job of ``ranks`` ranks on a device key."""
    offered = site.devices.get(device)
    if offered is None:
        raise ConfigError(
            f"{name}: site {site.name!r} offers {', '.join(sorted(site.devices))}, not {device}"
        )
    if site.scheduler != "slurm":
        raise ConfigError(f"{name}: site {site.name!r} has no SLURM (site.scheduler={site.scheduler})")
    key = f"site.devices.{device}"
    nodes, tasks = offered.spread(ranks, key)
    if nodes > 1:
        _known(offered, key, "interface")
    used = offered.devices_per_node if offered.whole_nodes != "no" else _rounded(tasks, offered.gres_multiple)
    seconds = _walltime(offered, key, walltime_seconds)
    if not 0 < warning_seconds <= min(seconds - 1, LARGEST_WARNING):
        raise ConfigError(
            f"{name}: a warning {warning_seconds} s before the end does not fit a job of {seconds} s "
            f"({key}.walltime, at most {LARGEST_WARNING} s): the state takes too long to save for so short a job"
        )
    twin = offered.twin if offered.preemptible else None
    return SbatchRequest(
        name=name,
        nodes=nodes,
        tasks_per_node=tasks,
        time_seconds=seconds,
        warning_seconds=warning_seconds,
        output=output,
        cpus_per_task=_cpus(offered, key, tasks, used),
        memory_mb=_memory(offered, key, used, memory_factor),
        partition=(twin and twin.partition) or _known(offered, key, "partition"),
        account=_known(offered, key, "account"),
        qos=(twin and twin.qos) or _known(offered, key, "qos"),
        constraint=_known(offered, key, "constraint"),
        devices=_devices(offered, key, used),
        exclusive=offered.whole_nodes == "ask",
        exclude=tuple(exclude),
        requeue=site.requeue,
        further=dict(offered.sbatch),
    )


def job_name(stage: str, id: str, step: int | None = None) -> str:
    """``baton:<stage>:<id>``, for a segment of training with ``-step000020`` behind it."""
    return f"{PREFIX}:{stage}:{id}" + ("" if step is None else f"-step{step:06d}")


def _line(name: str, value: str | int | bool) -> str:
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _known(offered: DeviceSite, key: str, name: str):
    """A value of the site file that a job cannot do without."""
    value = getattr(offered, name)
    if value == UNKNOWN:
        raise ConfigError(
            f"{key}.{name} is unknown; `baton doctor` shows what the cluster says, then set it in the site file"
        )
    return value


def _walltime(offered: DeviceSite, key: str, asked: int | None) -> int:
    limit = offered.walltime
    if asked is not None and limit in (None, UNKNOWN):
        return asked
    limit = _known(offered, key, "walltime")
    if limit is None:
        raise ConfigError(f"{key}.walltime is not set, and neither is the walltime of the job")
    if asked is not None and asked > read_seconds(limit):
        raise ConfigError(
            f"a job of {spell_seconds(asked)} is longer than {key}.walltime={limit}; cut it into more segments"
        )
    return read_seconds(limit) if asked is None else asked


def _cpus(offered: DeviceSite, key: str, tasks: int, used: int) -> int | None:
    """CPUs of each rank: the devices' share of the node, spread over the ranks; none where whole nodes come anyway."""
    if offered.whole_nodes != "no" and offered.cpus_per_node in (None, UNKNOWN):
        return None
    cpus = _known(offered, key, "cpus_per_node")
    if cpus is None:
        return offered.threads_per_rank
    return max(cpus * used // offered.devices_per_node // tasks, 1)


def _memory(offered: DeviceSite, key: str, used: int, factor: float) -> int | None:
    """Host memory of the job on each node, MB: the devices' share, more after the job ran out of it."""
    memory = _known(offered, key, "memory_per_node_gb")
    if memory is None:
        return None
    share = min(factor * used / offered.devices_per_node, 1.0)
    return int(memory * 1024 * share)


def _devices(offered: DeviceSite, key: str, used: int) -> tuple[str, str] | None:
    template = _known(offered, key, "gres")
    if template is None:
        return None
    text = template.replace("{devices}", str(used))
    if text.startswith("--"):
        option, _, value = text[2:].partition("=")
        return option, value
    return "gres", text
