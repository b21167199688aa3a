"""Joining the ranks of a role's worker processes, on any device key."""

from __future__ import annotations

import datetime
import os
from types import ModuleType

import torch
import torch.distributed as dist

from engines.ascend import AscendError, load_torch_npu

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
"""Device key -> torch.distributed backends; counts and lengths are agreed on cpu tensors everywhere."""


def init_process_group(
    device: str,
    rank: int = 0,
    world_size: int = 1,
    store: dist.Store | None = None,
    timeout_s: float = 1800,
) -> None:
    """Initialise torch.distributed for this process; nothing happens when that was done before.

    Args:
        device: device key: cpu, cuda or npu.
        store: where the ranks meet, e.g. ``dist.TCPStore`` or ``dist.FileStore``; not needed for one rank.

    Raises:
        ValueError: an unknown device key, several ranks without a store, or a group of another size is there already.
        AscendError: device npu, and CANN, torch_npu or its HCCL backend is missing or of another version.
    """
    if device not in BACKENDS:
        raise ValueError(f"device={device!r}: must be one of {', '.join(BACKENDS)}")
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ValueError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already; it cannot be rank {rank} of {world_size}"
            )
        return
    if store is None:
        if world_size != 1:
            raise ValueError(f"world_size={world_size} needs a store where the ranks meet")
        store = dist.HashStore()
    if device != "cpu":
        device_module(device).set_device(local_device(device))
    if device == "npu" and not dist.is_backend_available("hccl"):
        raise AscendError(
            "device npu: torch_npu is loaded and did not bring the hccl backend of torch.distributed; the versions of torch, "
            "torch_npu and CANN that belong together are those of env/ascend.txt"
        )
    dist.init_process_group(
        BACKENDS[device],
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def local_device(device: str) -> torch.device:
    """The torch device of this process: LOCAL_RANK selects among several accelerators."""
    if device == "cpu":
        return torch.device("cpu")
    visible = device_module(device).device_count()
    return torch.device(device, int(os.environ.get("LOCAL_RANK", "0")) % max(1, visible))


def device_module(device: str) -> ModuleType:
    """What torch knows of an accelerator's device key. For npu that is an extension, which is loaded first.

    Raises:
        AscendError: CANN or torch_npu is missing, broken or of another version.
    """
    if device == "npu":
        load_torch_npu()
    return getattr(torch, device)
