"""What a site file says of a cluster: for each device key where its jobs go and how they are spelled. Loads no framework."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from engines.config import Config, ConfigError
from workflow.campaign.files import load_named, names_of
from workflow.manifest import Device

UNKNOWN = "unknown"
"""What the cluster's public documentation does not say. A job that needs the value is refused; ``baton doctor`` asks for it."""
LOCAL = "local"
"""The site of a host without SLURM."""
DeviceKey = Literal["cpu", "cuda", "npu"]
WALLTIME = r"^((\d+-)?\d{1,4}:[0-5]\d:[0-5]\d|unknown)$"


def _or_unknown(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError as error:
        raise ValueError(f"{error.errors()[0]['msg']}, or unknown") from None


MaybeInt = Annotated[int | Literal["unknown"], WrapValidator(_or_unknown)]
MaybeFloat = Annotated[float | Literal["unknown"], WrapValidator(_or_unknown)]
MaybeBool = Annotated[bool | Literal["unknown"], WrapValidator(_or_unknown)]


class StageEnvironment(Config):
    """How a stage's job gets at the Python that has torch and the backends."""

    kind: Literal["none", "venv", "modules", "apptainer", "pyxis"] = "none"
    """none: the interpreter that runs the workflow. venv, modules: on the host. apptainer, pyxis: in a container."""
    modules: list[str] = []
    """Loaded first, for every kind."""
    setup: list[str] = []
    """Shell lines after the modules, for instance the accelerator toolkit's own set-up script."""
    path: str | None = None
    """venv: its folder. modules: a venv on top of them, or none."""
    image: str | None = None
    """apptainer: the image's file. pyxis: an image, as --container-image takes it."""
    mounts: list[str] = []
    """Host folders that the container sees, ``/host`` or ``/host:/inside``. The folder the workflow runs in
    and ``scratch`` are always mounted."""
    options: list[str] = []
    """Further options of ``apptainer exec``, or for pyxis of ``srun``."""
    python: str = "python"
    """The interpreter's name inside the environment (not for kind none)."""

    @model_validator(mode="after")
    def _fields_of_the_kind(self) -> StageEnvironment:
        container = self.kind in ("apptainer", "pyxis")
        if container != (self.image is not None):
            raise ValueError(
                f"image belongs to kind apptainer or pyxis, and both need it; kind is {self.kind}"
            )
        if not container and (self.mounts or self.options):
            raise ValueError(f"mounts and options belong to kind apptainer or pyxis; kind is {self.kind}")
        if self.kind == "venv" and self.path is None:
            raise ValueError("kind venv needs path, the venv's folder")
        if self.path is not None and self.kind not in ("venv", "modules"):
            raise ValueError(f"path belongs to kind venv or modules; kind is {self.kind}")
        if self.kind == "modules" and not self.modules:
            raise ValueError("kind modules needs modules, the list of what is loaded")
        return self


class PreemptibleTwin(Config):
    """Where the same nodes are cheaper or sooner to be had, at the price that a job may be sent away."""

    partition: str | None = None
    """Its partition, when it has one of its own."""
    qos: str | None = None
    """Its qos, when it has one of its own."""

    @model_validator(mode="after")
    def _differs(self) -> PreemptibleTwin:
        if self.partition is None and self.qos is None:
            raise ValueError("set partition, qos, or both: without either it is no twin")
        return self


class DeviceSite(Config):
    """What a site offers for one device key, and how its jobs are asked for. None means that the option is not given."""

    devices_per_node: int = Field(1, ge=1)
    """Devices (cpu: ranks) of a node."""
    memory_per_device_gb: MaybeFloat = 4.0
    """Memory of each, in units of 2**30 bytes."""
    threads_per_rank: int = Field(1, ge=1)
    """CPU threads of each rank. They can change a bit of a result, so they are part of its numeric identity."""
    stand_in: bool = False
    """Jobs go where this key's jobs go, but compute on cpu: for clusters without the hardware."""

    partition: str | None = None
    """Partition; the cluster's default one when not set."""
    account: str | None = None
    """Account that is charged; the user's default one when not set."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that a node must have."""
    gres: str | None = None
    """How devices are asked for, per node: ``gpu:{devices}``, ``gpu:a100:{devices}``, ``npu:{devices}``, or a whole option such as
    ``--gpus-per-node={devices}``. Not set where whole nodes are given without asking."""
    gres_multiple: int = Field(1, ge=1)
    """Devices are given in multiples of this; a smaller layout gets idle ones."""
    whole_nodes: Literal["no", "always", "ask"] = "no"
    """no: nodes are shared. always: the cluster gives whole nodes by itself. ask: with --exclusive."""
    confines_devices: bool = False
    """A job sees only its own devices, numbered from 0, so there is nothing to mask."""
    max_nodes: MaybeInt | None = None
    """Most nodes of one job; without a limit when not set."""
    cpus_per_node: MaybeInt | None = None
    """CPUs of a node as SLURM counts them; each rank gets its share."""
    memory_per_node_gb: MaybeFloat | None = None
    """Host memory that jobs may have on a node; each rank gets its share. Not set where --mem is refused or needless."""
    cpu_bind: str | None = None
    """``srun --cpu-bind`` of the steps inside the job."""
    walltime: str | None = Field(None, pattern=WALLTIME)
    """Longest job, ``[days-]hours:minutes:seconds``."""
    preemptible: bool = False
    """Send jobs to the twin."""
    twin: PreemptibleTwin | None = None
    """The preemptible twin of this partition."""
    sbatch: dict[str, str] = {}
    """Further sbatch options by their long names, such as ``reservation``."""

    environment: StageEnvironment = StageEnvironment()
    """The environment of the stages."""
    scratch: str = "/tmp"
    """Folder for a job's temporary files and what it compiles, best on the node itself; the job's variables are expanded there."""
    interface: str | None = None
    """Network interface between nodes; found from the route between them when not set."""
    internet: MaybeBool = UNKNOWN
    """Whether compute nodes reach the internet."""

    @field_validator("walltime", mode="before")
    @classmethod
    def _clock(cls, value: Any) -> Any:
        # YAML reads an unquoted 24:00:00 as a number to base 60: that many seconds.
        return spell_seconds(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _coherent(self) -> DeviceSite:
        if self.preemptible and self.twin is None:
            raise ValueError("preemptible=true needs twin, the partition or qos that jobs go to")
        if self.gres not in (None, UNKNOWN) and "{devices}" not in self.gres:
            raise ValueError(
                f"gres={self.gres!r}: the number of devices is written {{devices}}, as in gpu:{{devices}}"
            )
        if self.devices_per_node % self.gres_multiple:
            raise ValueError(
                f"gres_multiple={self.gres_multiple} does not divide devices_per_node={self.devices_per_node}"
            )
        if self.memory_per_device_gb != UNKNOWN and self.memory_per_device_gb <= 0:
            raise ValueError(f"memory_per_device_gb={self.memory_per_device_gb}: must be above 0")
        return self

    def spread(self, ranks: int, key: str) -> tuple[int, int]:
        """Nodes, and ranks on each, of a layout: part of one node, or whole nodes.

        Args:
            key: what to name in a refusal, for instance ``site.devices.cuda``.

        Raises:
            ConfigError: a fraction of several nodes (with the nearest sizes that are none), or more nodes than a job may have.
        """
        size = self.devices_per_node
        if ranks <= size:
            return 1, ranks
        nodes = -(-ranks // size)
        if ranks % size:
            raise ConfigError(
                f"a layout of {ranks} ranks is a fraction of {nodes} nodes of {size} devices ({key}.devices_per_node); "
                f"the nearest that fill their nodes have {ranks // size * size} or {nodes * size}"
            )
        if self.max_nodes == UNKNOWN:
            raise ConfigError(
                f"a layout of {ranks} ranks needs {nodes} nodes, and {key}.max_nodes is unknown; set it"
            )
        if self.max_nodes is not None and nodes > self.max_nodes:
            raise ConfigError(
                f"a layout of {ranks} ranks needs {nodes} nodes of {size} devices, more than {key}.max_nodes={self.max_nodes}; "
                f"at most {self.max_nodes * size} ranks fit"
            )
        return nodes, size


class SiteConfig(Config):
    """The place where a campaign runs. Never part of an identity (but for the threads of a rank)."""

    name: str
    """Name of the site, and of its file."""
    scheduler: Literal["none", "slurm"] = "none"
    """none: a single host. slurm: a cluster."""
    cluster_names: list[str] = []
    """What SLURM calls the cluster (ClusterName): how the site is detected."""
    devices: dict[DeviceKey, DeviceSite] = Field(min_length=1)
    """Per device key, what there is."""
    launcher: dict[Literal["x86_64", "aarch64"], str] = {}
    """Per CPU architecture of the compute nodes, the venv with snakemake and submitit. The one that is active when not set."""
    requeue: bool = True
    """Whether jobs may requeue themselves."""

    def key_of(self, device: Device) -> str:
        """The device key that a stage's job is placed by: what it computes on, or the key that this stands in for."""
        offered = self.devices.get(device.asked)
        return device.asked if offered is not None and offered.stand_in else device.computed


def spell_seconds(seconds: int) -> str:
    """SLURM's spelling of a duration, rounded up to whole minutes as SLURM does itself.

    >>> spell_seconds(90), spell_seconds(26 * 3600)
    ('00:02:00', '1-02:00:00')
    """
    days, minutes = divmod(-(-seconds // 60), 24 * 60)
    return (f"{days}-" if days else "") + f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def read_seconds(walltime: str) -> int:
    """Seconds of ``[days-]hours:minutes:seconds``.

    >>> read_seconds("1-02:00:00")
    93600
    """
    days, _, clock = walltime.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def load_site(name: str, configs: Path) -> SiteConfig:
    """The site file ``configs/site/<name>.yaml``, or the file at the path ``name`` when it ends in .yaml.

    Raises:
        ConfigError: no such file, not YAML, or a wrong key or value.
    """
    return load_named("site", name, configs, SiteConfig)


def site_names(configs: Path) -> list[str]:
    """All sites that have a file."""
    return names_of("site", configs)


def detect_site(configs: Path) -> str:
    """The site whose ``cluster_names`` has this cluster's name; ``local`` without SLURM.

    Raises:
        ConfigError: SLURM is here and no site file, or more than one, names the cluster.
    """
    cluster = cluster_name()
    if cluster is None:
        return LOCAL
    found = [name for name in site_names(configs) if cluster in load_site(name, configs).cluster_names]
    if len(found) != 1:
        problem = f"sites {' and '.join(found)} both name" if found else "no site file names"
        raise ConfigError(
            f"{problem} this cluster, {cluster!r}: choose with site=NAME (site=local to stay on this host), "
            f"or write configs/site/<name>.yaml from configs/site/template.yaml with cluster_names: [{cluster}]"
        )
    return found[0]


def cluster_name() -> str | None:
    """ClusterName from slurm.conf, else from ``scontrol show config``; None when this host knows no cluster."""
    path = Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf"))
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        try:
            command = ["scontrol", "show", "config"]
            text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    match = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return match.group(1) if match else None
