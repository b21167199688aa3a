"""One rank's part of a role's tensors, written to and read from safetensors, for any layout on either side."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from engines.checkpoint.errors import (
    StateDamaged,
    StateDiskFull,
    StateIncomplete,
    StateKeyMismatch,
    StateShapeMismatch,
)
from engines.checkpoint.index import ShardIndex, ShardRecord, TensorRecord, overlap
from engines.checkpoint.store import disk_full_is_named, make_durable
from engines.checkpoint.verify import read_state


@dataclass(frozen=True)
class Shard:
    """This rank's block of a global tensor, for frameworks that do not shard with DTensor.

    ``local`` may have zero elements on a rank that holds nothing of it.
    """

    local: Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    owned: bool = True
    """Whether this rank writes the block: one of those that hold a copy. All of them read it."""


@dataclass(frozen=True)
class _Block:
    """The same for every kind of tensor. ``owned``: this rank is the one that writes it."""

    local: Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    owned: bool

    @property
    def dtype(self) -> str:
        return str(self.local.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.local.shape)


def write_shards(
    folder: Path, rank: int, tensors: Mapping[str, Tensor | DTensor | Shard], scalars: dict[str, Any]
) -> ShardIndex:
    """Write this rank's blocks into ``folder/rank00000.safetensors``, durably; ``folder`` is named after the role.

    Of a DTensor each block is written once (by the first of its replicas), a plain tensor is the same on all ranks
    and written by rank 0. A rank that owns nothing writes no file.

    Args:
        tensors: the same names on every rank.
        scalars: JSON values, the same on every rank.
    Returns:
        What was written, for :meth:`engines.checkpoint.StateStore.commit`.
    Raises:
        StateDiskFull: the disk cannot hold this rank's file; nothing of it is left.
    """
    index, blocks = owned_blocks(rank, tensors, scalars)
    write_blocks(folder, rank, blocks)
    return index


def owned_blocks(
    rank: int, tensors: Mapping[str, Tensor | DTensor | Shard], scalars: dict[str, Any]
) -> tuple[ShardIndex, dict[str, Tensor]]:
    """What :func:`write_shards` returns, and the blocks that this rank writes, by name, where they are: not copied."""
    blocks = {name: _block(name, tensor, rank) for name, tensor in tensors.items()}
    mine = {name: block.local for name, block in blocks.items() if block.owned and block.local.numel()}
    records = {}
    for name, block in blocks.items():
        shards = (ShardRecord(_file_name(rank), name, block.offsets, block.shape),) if name in mine else ()
        records[name] = TensorRecord(block.dtype, block.global_shape, shards)
    return ShardIndex(rank, records, scalars), mine


def write_blocks(folder: Path, rank: int, blocks: Mapping[str, Tensor]) -> None:
    """The other half of :func:`write_shards`: one file, which appears whole and durable, or none where ``blocks`` is empty.

    Nothing is done after it has appeared: the state may be published then, and this folder be gone. Its names are made durable
    by who publishes it.

    Raises:
        StateDiskFull: the disk cannot hold it; nothing of it is left.
    """
    if blocks:
        folder.mkdir(exist_ok=True)
        _save(folder / _file_name(rank), blocks)


def load_shards(
    path: Path, role: str, targets: Mapping[str, Tensor | DTensor | Shard], partial: bool = False
) -> dict[str, Any]:
    """Fill ``targets`` in place from the state in folder ``path``, whatever layout wrote it; returns the scalars.

    Reads only the slices that overlap with this rank's blocks. No collective. With ``partial`` the state may hold more
    names than ``targets``.

    Raises:
        StateKeyMismatch: the state has no such role, or other names than ``targets``.
        StateShapeMismatch: a tensor has another shape or type; nothing was filled then.
        StateIncomplete, StateDamaged: the state's files do not hold what its description says.
    """
    state = read_state(path)
    if role not in state["roles"]:
        raise StateKeyMismatch(f"{path}: no role {role!r}, it has {sorted(state['roles'])}")
    entry = state["roles"][role]
    blocks = {name: _block(name, target, rank=0) for name, target in targets.items()}
    saved = entry["tensors"].keys()
    _check_names(f"{path}: {role}", saved & blocks.keys() if partial else saved, blocks.keys())
    for name, block in blocks.items():
        _check_kind(f"{path}: {role}: {name}", entry["tensors"][name], block)
    with contextlib.ExitStack() as stack, torch.no_grad():
        opened: dict[str, Any] = {}

        def reader(name: str) -> Any:
            if name not in opened:
                try:
                    opened[name] = stack.enter_context(safe_open(path / name, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise StateDamaged(f"{path / name}: {error}") from error
            return opened[name]

        for name, block in blocks.items():
            _fill(f"{path}: {role}: {name}", block, entry["tensors"][name]["shards"], reader)
    return entry["scalars"]


def _block(name: str, tensor: Tensor | DTensor | Shard, rank: int) -> _Block:
    if isinstance(tensor, Shard):
        return _Block(tensor.local.detach(), tuple(tensor.offsets), tuple(tensor.global_shape), tensor.owned)
    if not isinstance(tensor, DTensor):
        return _Block(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape), owned=rank == 0)
    for placement in tensor.placements:
        if type(placement) not in (Replicate, ShardPlacement):
            raise TypeError(f"{name}: placement {placement} cannot be saved; only Shard and Replicate can")
    mesh = tensor.device_mesh
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    coordinate = mesh.get_coordinate()
    owned = coordinate is not None and all(
        index == 0 or isinstance(placement, ShardPlacement)
        for index, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return _Block(tensor.detach().to_local(), tuple(offsets), tuple(tensor.shape), owned)


def _file_name(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"


def _save(file: Path, blocks: Mapping[str, Tensor]) -> None:
    tensors = {name: block.to("cpu").contiguous() for name, block in blocks.items()}
    needed = sum(tensor.nbytes for tensor in tensors.values())
    if needed > (free := shutil.disk_usage(file.parent).free):
        raise StateDiskFull(f"{file}: needs {needed:,} bytes and {free:,} are free")
    part = file.with_name(f"{file.name}.part")
    try:
        with disk_full_is_named(file):
            try:
                save_file(tensors, part)
            except SafetensorError as error:
                if code := re.search(r"os error (\d+)", str(error)):
                    raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from error
                raise
            part.chmod(0o644)  # safetensors makes files that only their owner can read
            make_durable(part)
            part.rename(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _check_names(where: str, saved: Any, expected: Any) -> None:
    missing, unexpected = sorted(expected - saved), sorted(saved - expected)
    if missing or unexpected:
        parts = [
            f"{len(names)} {kind} ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise StateKeyMismatch(f"{where}: the state's names are not the engine's: {'; '.join(parts)}")


def _check_kind(where: str, record: dict[str, Any], block: _Block) -> None:
    if tuple(record["shape"]) != block.global_shape or record["dtype"] != block.dtype:
        raise StateShapeMismatch(
            f"{where}: saved as {record['dtype']} {record['shape']}, "
            f"the engine has {block.dtype} {list(block.global_shape)}"
        )


def _fill(where: str, block: _Block, shards: list[dict[str, Any]], reader: Callable[[str], Any]) -> None:
    filled = 0
    for shard in shards:
        ranges = overlap(block.offsets, block.shape, tuple(shard["offsets"]), tuple(shard["shape"]))
        if ranges is None:
            continue
        source = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, shard["offsets"], strict=True))
        target = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, block.offsets, strict=True))
        file = reader(shard["file"])
        try:
            piece = file.get_slice(shard["key"])[source] if source else file.get_tensor(shard["key"])
        except SafetensorError as error:
            raise StateDamaged(f"{where}: {shard['file']}: {error}") from error
        block.local[target].copy_(piece)
        filled += math.prod(piece.shape)
    if filled != block.local.numel():
        raise StateIncomplete(
            f"{where}: the state holds {filled} of the {block.local.numel()} elements needed"
        )
