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
    "BOOL": "?", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "I16": "<i2", "U16": "<u2", "F16": "<f2",
    "BF16": "<u2", "I32": "<i4", "U32": "<u4", "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8",
}  # fmt: skip
TINY = 1e-3
"""A tensor whose norm is less than this share of the norm of all of its kind is measured against that share: rounding is not
relative to nothing. The last word of a name is its kind, such as exp_avg."""


@dataclass(frozen=True)
class Apart:
    """How far two sets of tensors are apart."""

    tensors: int
    """Names that either of them has."""
    unequal: int
    """Of these, how many are not equal bit for bit."""
    largest: float
    """Largest relative difference ||a - b|| / ||b|| of one tensor; infinite where names, shapes or types differ, or values are not numbers."""
    where: str
    """Name of that tensor."""


def role_tensors(folder: Path, role: Mapping[str, Any], prefix: str = "") -> dict[str, numpy.ndarray]:
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
            parts.append((shard, read_tensor(path, header[shard["key"]])))
        # Blocks tile the tensor (the state's description is checked for that when it is written).
        whole[name] = numpy.empty(record["shape"], parts[0][1].dtype if parts else "f4")
        for shard, part in parts:
            place = tuple(slice(o, o + n) for o, n in zip(shard["offsets"], shard["shape"], strict=True))
            whole[name][place] = part
    return whole


def folder_tensors(files: list[Path]) -> dict[str, numpy.ndarray]:
    """All tensors of some safetensors files."""
    return {
        name: read_tensor(path, entry)
        for path in files
        for name, entry in read_safetensors_header(path).items()
    }


def read_tensor(path: Path, entry: TensorEntry) -> numpy.ndarray:
    """One tensor, mapped from its file. bfloat16, which numpy lacks, comes as float32 of the same value; 8-bit floats as their bytes."""
    count = math.prod(entry.shape)
    if count == 0:
        return numpy.empty(entry.shape, _TYPES[entry.dtype])
    mapped = numpy.memmap(path, _TYPES[entry.dtype], "r", entry.offset, (count,)).reshape(entry.shape)
    if entry.dtype == "BF16":
        return (mapped.astype("<u4") << 16).view("<f4")
    return mapped


def apart(ours: Mapping[str, numpy.ndarray], theirs: Mapping[str, numpy.ndarray]) -> Apart:
    """Compare tensor by tensor."""
    names = sorted(ours.keys() | theirs.keys())
    squares: dict[str, float] = {}
    for name, tensor in theirs.items():
        squares[_kind(name)] = squares.get(_kind(name), 0.0) + _norm(tensor) ** 2
    unequal, largest, where = 0, 0.0, ""
    for name in names:
        one, other = ours.get(name), theirs.get(name)
        if one is not None and other is not None and _same_bits(one, other):
            continue
        unequal += 1
        difference = _relative(one, other, TINY * math.sqrt(squares.get(_kind(name), 0.0)))
        if difference > largest or not where:
            largest, where = difference, name
    return Apart(len(names), unequal, largest, where)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _same_bits(one: numpy.ndarray, other: numpy.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(numpy.array_equal(_bits(one), _bits(other)))


def _bits(tensor: numpy.ndarray) -> numpy.ndarray:
    return numpy.ascontiguousarray(tensor).reshape(-1).view("u1")


def _relative(one: numpy.ndarray | None, other: numpy.ndarray | None, floor: float) -> float:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    difference = _norm(one.astype("f8") - other.astype("f8"))
    scale = max(_norm(other), floor)
    relative = difference / scale if scale else (0.0 if difference == 0 else math.inf)
    return relative if math.isfinite(relative) else math.inf


def _norm(tensor: numpy.ndarray) -> float:
    return float(numpy.linalg.norm(tensor.astype("f8").reshape(-1)))
