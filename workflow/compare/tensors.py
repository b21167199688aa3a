"""Published tensors as numpy arrays, whatever layout wrote them, and how far two sets of them are apart. Loads no framework."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from engines.model_folder import TensorEntry, read_safetensors_header

_TYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "F8_E4M3": "V1", "F8_E5M2": "V1", "I16": "<i2", "U16": "<u2", "F16": "<f2",
    "BF16": "<u2", "I32": "<i4", "U32": "<u4", "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8",
}  # fmt: skip
TINY = 1e-3
"""A tensor whose norm is less than this share of the norm of all of its kind is measured against that share: rounding is not
relative to nothing. The last word of a name is its kind, such as exp_avg."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as it was published."""

    type: str
    """As its file spells it. Several types come as the same kind of array."""
    values: numpy.ndarray
    """bfloat16, which numpy lacks, as float32 of the same value; 8-bit floats as bytes that are no numbers."""


@dataclass(frozen=True)
class Apart:
    """How far two sets of tensors are apart."""

    tensors: int
    """Names that either of them has."""
    unequal: int
    """Of these, how many are not equal bit for bit."""
    largest: float
    """Largest relative difference ||a - b|| / ||b|| of one tensor; infinite where names or shapes differ, or values are not numbers. Floating-point
    types that differ are compared by their numbers, all others are not."""
    where: str
    """Name of that tensor, with the types where they differ."""


def role_tensors(folder: Path, role: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The whole tensors of one role of the training state in ``folder``, those whose names begin with ``prefix``.

    Args:
        role: the role's entry in the state's description.
    """
    headers: dict[str, dict[str, TensorEntry]] = {}
    whole = {}
    for name, record in role["tensors"].items():
        if not name.startswith(prefix):
            continue
        parts = []
        for shard in record["shards"]:
            path = folder / shard["file"]
            header = headers.setdefault(shard["file"], read_safetensors_header(path))
            parts.append((shard, read_values(path, header[shard["key"]])))
        # Blocks tile the tensor (the state's description is checked for that when it is written).
        values = numpy.empty(record["shape"], parts[0][1].dtype if parts else "f4")
        for shard, part in parts:
            place = tuple(slice(o, o + n) for o, n in zip(shard["offsets"], shard["shape"], strict=True))
            values[place] = part
        whole[name] = Tensor(record["dtype"], values)
    return whole


def folder_tensors(files: list[Path]) -> dict[str, Tensor]:
    """All tensors of some safetensors files."""
    return {
        name: Tensor(entry.dtype, read_values(path, entry))
        for path in files
        for name, entry in read_safetensors_header(path).items()
    }


def read_values(path: Path, entry: TensorEntry) -> numpy.ndarray:
    """One tensor, mapped from its file; see :class:`Tensor`."""
    count = math.prod(entry.shape)
    if count == 0:
        return numpy.empty(entry.shape, _TYPES[entry.dtype])
    mapped = numpy.memmap(path, _TYPES[entry.dtype], "r", entry.offset, (count,)).reshape(entry.shape)
    if entry.dtype == "BF16":
        return (mapped.astype("<u4") << 16).view("<f4")
    return mapped


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Apart:
    """Compare tensor by tensor."""
    names = sorted(ours.keys() | theirs.keys())
    squares: dict[str, float] = {}
    for name, tensor in theirs.items():
        squares[_kind(name)] = squares.get(_kind(name), 0.0) + _norm(tensor.values) ** 2
    unequal, largest, where = 0, 0.0, ""
    for name in names:
        one, other = ours.get(name), theirs.get(name)
        if one is not None and other is not None and _same_bits(one, other):
            continue
        unequal += 1
        difference = _relative(one, other, TINY * math.sqrt(squares.get(_kind(name), 0.0)))
        if difference > largest or not where:
            largest, where = difference, _told(name, one, other)
    return Apart(len(names), unequal, largest, where)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _told(name: str, one: Tensor | None, other: Tensor | None) -> str:
    if one is None or other is None or one.type == other.type:
        return name
    return f"{name}: {one.type} | {other.type}"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.type != other.type or one.values.shape != other.values.shape:
        return False
    return bool(numpy.array_equal(_bits(one.values), _bits(other.values)))


def _bits(values: numpy.ndarray) -> numpy.ndarray:
    return numpy.ascontiguousarray(values).reshape(-1).view("u1")


def _relative(one: Tensor | None, other: Tensor | None, floor: float) -> float:
    if one is None or other is None or one.values.shape != other.values.shape:
        return math.inf
    if "V" in _kinds(one, other) or (one.type != other.type and _kinds(one, other) != "ff"):
        return math.inf
    difference = _norm(one.values.astype("f8") - other.values.astype("f8"))
    scale = max(_norm(other.values), floor)
    relative = difference / scale if scale else (0.0 if difference == 0 else math.inf)
    return relative if math.isfinite(relative) else math.inf


def _kinds(one: Tensor, other: Tensor) -> str:
    """What the two arrays hold, in numpy's letters: f for floating point, V for what is no number."""
    return one.values.dtype.kind + other.values.dtype.kind


def _norm(values: numpy.ndarray) -> float:
    if values.dtype.kind == "V":
        return 0.0
    return float(numpy.linalg.norm(values.astype("f8").reshape(-1)))
