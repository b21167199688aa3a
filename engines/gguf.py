"""The header of a GGUF file: what the model is and how large, without reading a weight (format: ggml, docs/gguf.md)."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from engines.config import ConfigError

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""general.architecture -> transformers' model_type, where they are known to be the same model."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """What a file says of its model."""

    metadata: dict[str, Any]
    """Numbers and texts; arrays are left out."""
    parameters: int
    """Elements of all tensors."""

    @property
    def config(self) -> dict[str, Any]:
        """What of a transformers configuration can be told."""
        name = self.metadata.get("general.architecture")
        config = {
            "model_type": _MODEL_TYPES.get(name, name),
            "max_position_embeddings": self.metadata.get(f"{name}.context_length"),
        }
        return {key: value for key, value in config.items() if value is not None}


@cache
def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of ``path``.

    Raises:
        ConfigError: not a GGUF file.
    """
    with path.open("rb") as file:
        magic, _version, tensors, entries = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF":
            raise ConfigError(f"{path}: not a GGUF file")
        metadata = {_text(file): _value(file, _number(file, "I")) for _ in range(entries)}
        total = 0
        for _ in range(tensors):
            _skip_text(file)
            total += math.prod(_number(file, "Q") for _ in range(_number(file, "I")))
            file.seek(12, 1)  # type and offset
    return GgufHeader({key: value for key, value in metadata.items() if value is not None}, total)


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "Q")).decode("utf-8", errors="replace")


def _skip_text(file: BinaryIO) -> None:
    file.seek(_number(file, "Q"), 1)


def _value(file: BinaryIO, kind: int) -> Any:
    """A number or a text; None for an array, which is skipped."""
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        return _number(file, _SCALARS[kind])
    item, count = _number(file, "I"), _number(file, "Q")
    if item in _SCALARS:
        file.seek(struct.calcsize(f"<{_SCALARS[item]}") * count, 1)
    else:
        for _ in range(count):
            if item == _TEXT:
                _skip_text(file)
            else:
                _value(file, item)
    return None
