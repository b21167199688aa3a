"""Published tensors as numpy arrays, whatever layout wrote them, and how far two sets of them are apart. Loads no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
relative to nothing. The first and the last word of a name are its kind, such as actor and exp_avg."""
COUNTS = ("step",)
"""Last words of the names of tensors that count: they are equal or not, by no tolerance."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as it was published."""

    type: str
    """As its file spells it. Several types come as the same kind of array."""
    read: Callable[[], numpy.ndarray]
    """Its values, read anew each time, so that a model is never in memory as a whole. bfloat16, which numpy lacks, as float32 of the
    same value; 8-bit floats as bytes that are no numbers."""


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
    wanted = {name: record for name, record in role["tensors"].items() if name.startswith(prefix)}
    files = {shard["file"] for record in wanted.values() for shard in record["shards"]}
    headers = {file: read_safetensors_header(folder / file) for file in files}
    return {
        name: Tensor(record["dtype"], partial(_put_together, folder, record, headers))
        for name, record in wanted.items()
    }


def _put_together(
    folder: Path, record: Mapping[str, Any], headers: Mapping[str, Mapping[str, TensorEntry]]
) -> numpy.ndarray:
    # Blocks tile the tensor (the state's description is checked for that when it is written).
    blocks = [
        (block, read_values(folder / block["file"], headers[block["file"]][block["key"]]))
        for block in record["shards"]
    ]
    values = numpy.empty(record["shape"], blocks[0][1].dtype if blocks else "f4")
    for block, part in blocks:
        place = tuple(slice(o, o + n) for o, n in zip(block["offsets"], block["shape"], strict=True))
        values[place] = part
    return values


def folder_tensors(files: list[Path]) -> dict[str, Tensor]:
    """All tensors of some safetensors files."""
    return {
        name: Tensor(entry.dtype, partial(read_values, path, entry))
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
    squares: dict[tuple[str, str], float] = {}
    unequal: list[tuple[str, float, float]] = []
    for name in names:
        one, other = ours.get(name), theirs.get(name)
        values = [None if tensor is None else tensor.read() for tensor in (one, other)]
        norm = 0.0 if other is None else _norm(values[1])
        if math.isfinite(norm):
            squares[_kind(name)] = squares.get(_kind(name), 0.0) + norm**2
        if one is None or other is None:
            unequal.append((name, math.inf, norm))
        elif one.type != other.type or not _same_bits(*values):
            unequal.append((name, _distance(name, one, other, *values), norm))
    largest, where = 0.0, ""
    for name, distance, norm in unequal:
        relative = _ratio(distance, max(norm, TINY * math.sqrt(squares.get(_kind(name), 0.0))))
        if relative > largest or not where:
            largest, where = relative, _told(name, ours.get(name), theirs.get(name))
    return Apart(len(names), len(unequal), largest, where)


def _kind(name: str) -> tuple[str, str]:
    return name.partition(".")[0], name.rpartition(".")[2]


def _told(name: str, one: Tensor | None, other: Tensor | None) -> str:
    if one is None or other is None or one.type == other.type:
        return name
    return f"{name}: {one.type} | {other.type}"


def _same_bits(one: numpy.ndarray, other: numpy.ndarray) -> bool:
    return one.shape == other.shape and bool(numpy.array_equal(_bits(one), _bits(other)))


def _bits(values: numpy.ndarray) -> numpy.ndarray:
    return numpy.ascontiguousarray(values).reshape(-1).view("u1")


def _distance(name: str, one: Tensor, other: Tensor, a: numpy.ndarray, b: numpy.ndarray) -> float:
    """||a - b||; infinite where it says nothing: other shapes, no numbers, types of which one is not floating point, other counts."""
    kinds = a.dtype.kind + b.dtype.kind  # numpy's letters: f for floating point, V for what is no number
    if a.shape != b.shape or "V" in kinds or (one.type != other.type and kinds != "ff"):
        return math.inf
    distance = _norm(a.astype("f8") - b.astype("f8"))
    return math.inf if distance and _kind(name)[1] in COUNTS else distance


def _ratio(distance: float, scale: float) -> float:
    if distance == 0:
        return 0.0
    ratio = distance / scale if scale else math.inf
    return ratio if math.isfinite(ratio) else math.inf


def _norm(values: numpy.ndarray) -> float:
    if values.dtype.kind == "V":
        return 0.0
    return float(numpy.linalg.norm(values.astype("f8").reshape(-1)))
