"""What one rank wrote, as plain data, and how the ranks' indexes become one description of a role. No torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from engines.checkpoint.errors import StateIncomplete


@dataclass(frozen=True)
class ShardRecord:
    """A block of a tensor: where its bytes are, and which part of the global tensor they hold."""

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorRecord:
    """A global tensor and the blocks of it that are known. ``dtype`` is torch's name without the prefix."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[ShardRecord, ...] = ()


@dataclass(frozen=True)
class ShardIndex:
    """What one rank wrote of one role. Every rank lists every tensor, also those it wrote nothing of."""

    rank: int
    tensors: dict[str, TensorRecord]
    scalars: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> set[str]:
        """Names of the files that this rank writes."""
        return {shard.file for record in self.tensors.values() for shard in record.shards}


def merge_indexes(role: str, indexes: list[ShardIndex]) -> dict[str, Any]:
    """The role's entry of ``state.json``: scalars, and every tensor with the blocks of all ranks.

    Raises:
        StateIncomplete: when ranks differ in names, shapes, types or scalars, or blocks do not tile a tensor.
    """
    if not indexes:
        raise StateIncomplete(f"{role}: no rank wrote anything")
    first = indexes[0]
    for other in indexes[1:]:
        _check_agreement(role, first, other)
    tensors = {}
    for name, record in first.tensors.items():
        shards = [shard for index in indexes for shard in index.tensors[name].shards]
        _check_tiling(f"{role}: {name}", record.shape, shards)
        tensors[name] = {
            "dtype": record.dtype,
            "shape": list(record.shape),
            "shards": [{**asdict(shard), "file": f"{role}/{shard.file}"} for shard in shards],
        }
    return {"scalars": first.scalars, "tensors": tensors}


def overlap(
    offsets: tuple[int, ...],
    shape: tuple[int, ...],
    other_offsets: tuple[int, ...],
    other_shape: tuple[int, ...],
) -> list[tuple[int, int]] | None:
    """Per dimension (start, stop) of the intersection of two blocks in global coordinates; None when empty."""
    ranges = []
    for start, size, other_start, other_size in zip(offsets, shape, other_offsets, other_shape, strict=True):
        low, high = max(start, other_start), min(start + size, other_start + other_size)
        if low >= high:
            return None
        ranges.append((low, high))
    return ranges


def _check_agreement(role: str, first: ShardIndex, other: ShardIndex) -> None:
    if first.tensors.keys() != other.tensors.keys():
        names = sorted(first.tensors.keys() ^ other.tensors.keys())
        raise StateIncomplete(
            f"{role}: ranks {first.rank} and {other.rank} name different tensors: {names[:5]}"
        )
    if first.scalars != other.scalars:
        keys = first.scalars.keys() | other.scalars.keys()
        names = sorted(key for key in keys if first.scalars.get(key) != other.scalars.get(key))
        raise StateIncomplete(
            f"{role}: ranks {first.rank} and {other.rank} have different scalars: {names[:5]}"
        )
    for name, record in first.tensors.items():
        theirs = other.tensors[name]
        if (record.dtype, record.shape) != (theirs.dtype, theirs.shape):
            raise StateIncomplete(
                f"{role}: {name} is {record.dtype} {list(record.shape)} on rank {first.rank} "
                f"and {theirs.dtype} {list(theirs.shape)} on rank {other.rank}"
            )


def _check_tiling(name: str, shape: tuple[int, ...], shards: list[ShardRecord]) -> None:
    """Blocks that lie inside the tensor, are disjoint and hold as many elements as it has, tile it."""
    for shard in shards:
        if any(
            start < 0 or start + size > whole
            for start, size, whole in zip(shard.offsets, shard.shape, shape, strict=True)
        ):
            raise StateIncomplete(
                f"{name}: a block at {list(shard.offsets)} of {list(shard.shape)} lies outside {list(shape)}"
            )
    blocks = sorted(shards, key=lambda shard: shard.offsets)
    for first, second in itertools.pairwise(blocks):
        if overlap(first.offsets, first.shape, second.offsets, second.shape) is not None:
            raise StateIncomplete(
                f"{name}: the blocks at {list(first.offsets)} and {list(second.offsets)} overlap"
            )
    written, whole = sum(math.prod(shard.shape) for shard in shards), math.prod(shape)
    if written != whole:
        raise StateIncomplete(f"{name}: the ranks wrote {written} of its {whole} elements")
