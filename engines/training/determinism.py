"""Processes whose kernels and collectives add in one order on every run, and what each device key needs for that.

Libraries read these variables once: cuBLAS when its first handle is made, NCCL and HCCL when ranks meet, CANN when the first kernel is
launched. So each rank sets them for itself, before it touches its device; then it matters neither how it was started nor on which node.

No variable has a second value that is let through, though some have one that is deterministic too: it would give other bits, and no
result says by which it was computed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from engines import ascend
from engines.training.errors import DeterminismError

VARIABLES: dict[str, Mapping[str, str]] = {
    "cpu": {},
    "cuda": {
        # Eight workspaces of 4 MiB for each handle and stream; without, products may share one and be split as it suits (NVIDIA,
        # cuBLAS library, section Results Reproducibility).
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Else chosen by size and topology, among them NVLS, whose sums in the switch have no order. Every collective has a ring.
        "NCCL_ALGO": "Ring",
    },
    "npu": ascend.DETERMINISTIC,
}
"""Device key -> variable -> the value that its libraries need."""


def compute_deterministically(device: str) -> None:
    """Let this process use kernels and collectives on ``device`` that add in one order, and raise where torch has none.

    For the rest of its life: what libraries have read cannot be taken back. Nothing happens when that was done before.

    Args:
        device: device key: cpu, cuda or npu.

    Raises:
        DeterminismError: the environment says otherwise, or the device is in use already.
    """
    missing = [name for name in VARIABLES[device] if name not in os.environ]
    if missing and _in_use(device):
        raise DeterminismError(
            f"engine.deterministic=True: this process used {device} before {', '.join(missing)} could be set; call "
            "compute_deterministically before anything that touches the device, also before init_process_group"
        )
    set_variables(VARIABLES[device], f"device {device}")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def set_variables(variables: Mapping[str, str], reader: str) -> None:
    """Set environment variables that decide whether results are deterministic.

    Args:
        reader: who needs them, for the error.

    Raises:
        DeterminismError: one of them has another value; none is set then.
    """
    others = {
        name: os.environ[name]
        for name, value in variables.items()
        if os.environ.get(name, value).casefold() != value.casefold()
    }
    if others:
        found = ", ".join(f"{name}={value}" for name, value in others.items())
        needed = ", ".join(f"{name}={variables[name]}" for name in others)
        raise DeterminismError(
            f"engine.deterministic=True: the environment says {found}, and {reader} needs {needed}: take it out of the environment "
            "(the shell, or site.devices.<key>.environment.setup), or leave engine.deterministic out"
        )
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _in_use(device: str) -> bool:
    module = getattr(torch, device, None)  # npu: not there before its extension is loaded
    return module is not None and module.is_initialized()
