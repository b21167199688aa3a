"""The weight files of a Hugging Face folder, laid out before any tensor is there, so that several processes fill them.

A safetensors file says in its first bytes where each tensor lies. With names, types and shapes known, all offsets are: each
process writes its tensors in place, in any order, and the bytes do not depend on how the work was shared.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.model_folder import INDEX, SINGLE, ModelFolderError, TensorEntry, check_weight_files

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""safetensors' names of types."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies."""

    file: str
    start: int
    """First byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightFiles:
    """Weight files in ``folder`` for tensors of known types and shapes.

    Args:
        folder: exists.
        tensors: on-disk Hugging Face name -> (type, shape), in the order in which they are to lie.
        max_shard_size: bytes of the largest file; a larger tensor has a file of its own.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_shard_size: int
    ) -> None:
        self.folder = folder
        self.slots: dict[str, Slot] = {}
        self._headers: dict[str, bytes] = {}
        self._bytes: dict[str, int] = {}
        shards: list[list[str]] = []
        held = 0
        for name, (dtype, shape) in tensors.items():
            size = math.prod(shape) * dtype.itemsize
            if not shards or held + size > max_shard_size:
                shards.append([])
                held = 0
            shards[-1].append(name)
            held += size
        for number, names in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._lay_out(file, {name: tensors[name] for name in names})

    def _lay_out(self, file: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, (dtype, shape) in tensors.items():
            size = math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        for name, (dtype, shape) in tensors.items():
            start = 8 + len(text) + header[name]["data_offsets"][0]
            self.slots[name] = Slot(file, start, dtype, tuple(shape))
        self._headers[file] = struct.pack("<Q", len(text)) + text
        self._bytes[file] = 8 + len(text) + end

    def create(self) -> None:
        """Make the files, without their tensors, and the index of several; one process does."""
        for file, header in self._headers.items():
            with (self.folder / file).open("wb") as stream:
                stream.write(header)
                stream.truncate(self._bytes[file])
        if len(self._headers) > 1:
            total = sum(self._bytes[file] - len(header) for file, header in self._headers.items())
            weight_map = {name: slot.file for name, slot in sorted(self.slots.items())}
            content = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put ``tensor`` in its place.

        Raises:
            ValueError: another type or shape than was laid out.
        """
        slot = self.slots[name]
        if (tensor.dtype, tuple(tensor.shape)) != (slot.dtype, slot.shape):
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} where {slot.dtype} {slot.shape} was laid out"
            )
        data = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        descriptor = os.open(self.folder / slot.file, os.O_WRONLY)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], slot.start + done)
        finally:
            os.close(descriptor)


class WeightReader:
    """The tensors of the weight files in ``folder``, one at a time: memory is that of the tensor that is asked for.

    Raises:
        ModelFolderError: a file is missing or damaged, or holds a type that is not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, TensorEntry] = check_weight_files(folder)
        for name, entry in self.entries.items():
            if entry.dtype not in DTYPES:
                raise ModelFolderError(
                    f"{folder / entry.file}: {name} is {entry.dtype}; only {', '.join(DTYPES)} are read"
                )

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor, without reading it."""
        return DTYPES[self.entries[name].dtype]

    def read(self, name: str) -> torch.Tensor:
        """The tensor ``name``, as it is on disk."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=self.dtype(name))
        data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        with (self.folder / entry.file).open("rb", buffering=0) as file:
            file.seek(entry.offset)
            done = 0
            while done < len(data):
                if not (count := file.readinto(data[done:])):
                    raise ModelFolderError(f"{self.folder / entry.file}: truncated while it was read")
                done += count
        return tensor
