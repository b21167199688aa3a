"""What computed a result, and when: kinds of hardware, versions. Never names of machines or people. Loads no framework."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
from pathlib import Path

from workflow.manifest import Hardware

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "tensordict", "ray", "numpy", "reasoning-gym", "hydra-core", "snakemake",
)  # fmt: skip


def package_versions() -> dict[str, str]:
    """Python and the packages whose versions can change a result, those that are installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def hardware() -> Hardware:
    """Kind of CPU, and of accelerator when this process uses one."""
    return Hardware(cpu=_cpu_kind(), accelerator=_accelerator_kind())


def timestamp() -> str:
    """Now, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _cpu_kind() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _accelerator_kind() -> str | None:
    torch = sys.modules.get("torch")  # a stage that uses an accelerator has loaded it
    for device in ("cuda", "npu"):
        backend = getattr(torch, device, None)
        if backend is not None and backend.is_available():
            return backend.get_device_name(0)
    return None
