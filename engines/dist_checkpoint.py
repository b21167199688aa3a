"""Megatron's distributed checkpoint on disk (``torch_dist``): tensors in chunks, found through one pickled index.

A chunk is a region of a global tensor, so any layout reads what any other wrote. Nothing here imports Megatron.
Notable: the index (``.metadata``) is a pickle, and so is ``common.pt``. Both are read only through unpicklers that know the
format's own classes, and what they give is checked before it is used; callers compare every file's digest first.
Chunks are written and read one at a time: memory is that of the largest one.
Left out: reading objects that are no tensors, and files whose bytes are transformed (compressed).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from engines.model_folder import ModelFolderError

INDEX = ".metadata"
COMMON = "common.pt"
FORMAT_FILE = "metadata.json"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_INDEX_CLASSES = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "torch": {
        "Size", "bfloat16", "bool", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int16", "int32", "int64",
        "int8", "uint8",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
}  # fmt: skip
"""Everything that the index of a checkpoint may name. None of it runs code that the file chooses."""


class DistCheckpointError(ModelFolderError):
    """A distributed checkpoint that cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Chunk:
    """One region of a global tensor, and where its bytes are."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype | None
    """None: no tensor but an object, which only keeps its place."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """First byte in ``file``."""
    length: int


class ChunkFile:
    """Writes chunks into one file of a checkpoint, one after the other. Use as a context manager; durable on leaving."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = (folder / name).open("wb")
        self._name = name
        self.chunks: list[Chunk] = []

    def append(self, key: str, tensor: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> None:
        """Write ``tensor``, which is the region of ``key`` at ``offsets``; ``shape`` is that of the whole."""
        start = self._file.tell()
        tensor = _alone(tensor.detach().contiguous())
        with _no_checksums():
            torch.save(tensor, self._file)
        length = self._file.tell() - start
        chunk = Chunk(
            key, tuple(shape), tensor.dtype, tuple(offsets), tuple(tensor.shape), self._name, start, length
        )
        self.chunks.append(chunk)

    def append_object(self, key: str, value: Any) -> None:
        """Write a plain value that is no tensor; ``key`` says with Megatron's suffix which part of how many it is."""
        start = self._file.tell()
        torch.save([value], self._file)
        self.chunks.append(Chunk(key, (), None, (), (), self._name, start, self._file.tell() - start))

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def write_index(folder: Path, chunks: Iterable[Chunk], common: dict[str, Any]) -> None:
    """Write what finds ``chunks`` again: index, common state and format. The same chunks give the same bytes.

    Args:
        folder: holds the files of the chunks.
        common: what a trainer asks of a checkpoint beside its tensors; plain values only.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for chunk in sorted(chunks, key=lambda chunk: (chunk.key, chunk.offsets)):
        place = _StorageInfo(chunk.file, chunk.start, chunk.length)
        if chunk.dtype is None:
            entries[chunk.key] = BytesStorageMetadata()
            places[MetadataIndex(chunk.key)] = place
            continue
        entry = entries.setdefault(
            chunk.key,
            TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(chunk.shape), []),
        )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        places[MetadataIndex(chunk.key, chunk.offsets)] = place
    with (folder / INDEX).open("wb") as file:
        pickle.dump(Metadata(state_dict_metadata=entries, storage_data=places), file, protocol=4)
    torch.save(common, folder / COMMON)
    (folder / FORMAT_FILE).write_text(json.dumps(_FORMAT), encoding="utf-8")


class DistCheckpoint:
    """The tensors of the checkpoint in ``folder``, read by region.

    Compare the files' digests before: the index says which bytes belong to which tensor.

    Raises:
        DistCheckpointError: no such checkpoint, an index that names anything but the format's own classes, or one that
            points outside of the folder's files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _check_format(folder / FORMAT_FILE)
        self.common = _read_common(folder / COMMON)
        self.tensors: dict[str, list[Chunk]] = {}
        for chunk in _read_index(folder):
            self.tensors.setdefault(chunk.key, []).append(chunk)

    def read(
        self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The region of ``key`` at ``offsets`` with ``sizes``; the whole tensor when they are not given.

        Raises:
            DistCheckpointError: no such tensor, a region outside of it, or chunks that do not cover it exactly once.
        """
        if key not in self.tensors:
            raise DistCheckpointError(f"{self.folder / INDEX}: no tensor {key!r}")
        chunks = self.tensors[key]
        shape = chunks[0].shape
        offsets = tuple(offsets or (0,) * len(shape))
        sizes = tuple(shape if sizes is None else sizes)
        if len(offsets) != len(shape) or any(
            o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)
        ):
            raise DistCheckpointError(
                f"{self.folder / INDEX}: {key} is {list(shape)}, the region {list(sizes)} at {list(offsets)} is not in it"
            )
        for chunk in chunks:
            if (chunk.offsets, chunk.sizes) == (offsets, sizes):
                return self._load(chunk)
        region = torch.empty(sizes, dtype=chunks[0].dtype)
        covered = 0
        for chunk in chunks:
            low = [max(a, b) for a, b in zip(chunk.offsets, offsets, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True)]  # fmt: skip
            if all(a < b for a, b in zip(low, high, strict=True)):
                source = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
                target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
                region[target] = self._load(chunk)[source]
                covered += math.prod(b - a for a, b in zip(low, high, strict=True))
        if covered != region.numel():
            raise DistCheckpointError(
                f"{self.folder / INDEX}: the chunks of {key} hold {covered} of {region.numel()} entries of the region "
                f"{list(sizes)} at {list(offsets)}"
            )
        return region

    def _load(self, chunk: Chunk) -> torch.Tensor:
        path = self.folder / chunk.file
        with path.open("rb") as file:
            try:
                tensor = torch.load(_create_file_view(file, chunk.start, chunk.length), weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
                raise DistCheckpointError(
                    f"{path}: the chunk of {chunk.key} cannot be read ({error})"
                ) from None
        if not isinstance(tensor, torch.Tensor) or (tuple(tensor.shape), tensor.dtype) != (
            chunk.sizes,
            chunk.dtype,
        ):
            raise DistCheckpointError(f"{path}: the chunk of {chunk.key} is not what the index says")
        return tensor


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with a storage of its own: a view would take its whole storage into the file."""
    data = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy())
    return data.view(tensor.dtype).reshape(tensor.shape)


@contextlib.contextmanager
def _no_checksums() -> Iterator[None]:
    """A checksum of each chunk costs as much as writing it, and nothing that reads checkpoints looks at it."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _IndexUnpickler(pickle.Unpickler):
    """Builds nothing but the classes of the index."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of the format")
        return super().find_class(module, name)


def _check_format(path: Path) -> None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DistCheckpointError(f"{path}: missing; expected a distributed checkpoint of Megatron") from None
    except ValueError as error:
        raise DistCheckpointError(f"{path}: no JSON ({error})") from None
    backend = found.get("sharded_backend") if isinstance(found, dict) else found
    if backend != _FORMAT["sharded_backend"]:
        raise DistCheckpointError(f"{path}: sharded_backend={backend!r}, only 'torch_dist' can be read")


def _read_common(path: Path) -> dict[str, Any]:
    if not path.is_file():  # newer versions of Megatron keep it among the objects
        return {}
    try:
        common = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise DistCheckpointError(
            f"{path}: it holds more than plain values, or is damaged ({reason})"
        ) from None
    if not isinstance(common, dict):
        raise DistCheckpointError(f"{path}: expected a dictionary, got {type(common).__name__}")
    return common


def _read_index(folder: Path) -> list[Chunk]:
    """The chunks of the index, each checked against the folder's files."""
    path = folder / INDEX
    if not path.is_file():
        raise DistCheckpointError(f"{path}: missing")
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        return [
            _checked(path, chunk)
            for key, entry in index.state_dict_metadata.items()
            if not isinstance(entry, BytesStorageMetadata)
            for chunk in _chunks_of(key, entry, index.storage_data)
        ]
    except DistCheckpointError:
        raise
    except Exception as error:  # a pickle can fail in any way
        raise DistCheckpointError(f"{path}: refused: {error}") from None


def _chunks_of(
    key: str, entry: TensorStorageMetadata, places: dict[MetadataIndex, _StorageInfo]
) -> list[Chunk]:
    found = []
    for chunk in entry.chunks:
        place = places[MetadataIndex(key, chunk.offsets)]
        if getattr(place, "transform_descriptors", None):
            raise DistCheckpointError(f"{key}: its bytes are transformed ({place.transform_descriptors})")
        found.append(
            Chunk(
                key=key,
                shape=tuple(entry.size),
                dtype=entry.properties.dtype,
                offsets=tuple(chunk.offsets),
                sizes=tuple(chunk.sizes),
                file=place.relative_path,
                start=place.offset,
                length=place.length,
            )
        )
    return found


def _checked(index: Path, chunk: Chunk) -> Chunk:
    """Refuse a chunk that is outside of its tensor, or whose bytes are outside of the folder's files."""
    numbers = (*chunk.shape, *chunk.offsets, *chunk.sizes, chunk.start, chunk.length)
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or any(
        offset + size > whole
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, chunk.shape, strict=True)
    ):
        raise DistCheckpointError(f"{index}: a chunk of {chunk.key} is outside of its tensor")
    if not isinstance(chunk.dtype, torch.dtype):
        raise DistCheckpointError(f"{index}: {chunk.key} has dtype {chunk.dtype!r}")
    path = index.parent / chunk.file
    if Path(chunk.file).name != chunk.file:
        raise DistCheckpointError(
            f"{index}: {chunk.key} is in {chunk.file!r}, which is no file of this folder"
        )
    if not path.is_file():
        raise DistCheckpointError(f"{path}: missing; {INDEX} lists it")
    if chunk.start + chunk.length > path.stat().st_size:
        raise DistCheckpointError(
            f"{path}: truncated: {path.stat().st_size} bytes, {INDEX} lists {chunk.start + chunk.length}"
        )
    return chunk
