"""How many parameters a model has and how many bytes a stage will write, told from configurations and headers. No framework."""

from __future__ import annotations

import math
import struct
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from engines.config import ConfigError
from engines.model_folder import check_model_folder, locate_gguf
from workflow.campaign.schema import ModelConfig

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
STATE_BYTES = 12
"""Per parameter of a training state: float32 weight and two AdamW moments."""
FIXED_BYTES = 2**20
"""Tokenizer, records, logs."""


def count_parameters(model: ModelConfig) -> int:
    """Parameters of the base model.

    Raises:
        ModelFolderError: the folder is incomplete or damaged, or the package is missing.
    """
    if model.path is not None:
        tensors = check_model_folder(Path(model.path))
        return sum(math.prod(entry.shape) for entry in tensors.values())
    if model.package is not None:
        return _gguf_parameters(locate_gguf(model.package))
    return _architecture_parameters(model)


def weights_bytes(parameters: int, dtype: str) -> int:
    """A model folder."""
    return parameters * WEIGHT_BYTES[dtype] + FIXED_BYTES


def states_bytes(parameters: int, trained_models: int, kept_states: int) -> int:
    """Training states that lie on disk at the same time."""
    return parameters * STATE_BYTES * trained_models * kept_states + FIXED_BYTES


@cache
def _gguf_parameters(path: Path) -> int:
    """Sum of the tensors' sizes in a GGUF header (the format's description: ggml, docs/gguf.md)."""
    with path.open("rb") as file:
        magic, _version, tensors, entries = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF":
            raise ConfigError(f"{path}: not a GGUF file")
        for _ in range(entries):
            _gguf_text(file)
            _skip_gguf_value(file, *struct.unpack("<I", file.read(4)))
        total = 0
        for _ in range(tensors):
            _gguf_text(file)
            (dimensions,) = struct.unpack("<I", file.read(4))
            total += math.prod(struct.unpack(f"<{dimensions}Q", file.read(8 * dimensions)))
            file.seek(12, 1)  # type and offset
    return total


_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_TEXT, _GGUF_ARRAY = 8, 9


def _gguf_text(file: BinaryIO) -> None:
    file.seek(struct.unpack("<Q", file.read(8))[0], 1)


def _skip_gguf_value(file: BinaryIO, kind: int) -> None:
    if kind == _GGUF_TEXT:
        _gguf_text(file)
    elif kind == _GGUF_ARRAY:
        item, count = struct.unpack("<IQ", file.read(12))
        if item in _GGUF_SIZES:
            file.seek(_GGUF_SIZES[item] * count, 1)
        else:
            for _ in range(count):
                _skip_gguf_value(file, item)
    else:
        file.seek(_GGUF_SIZES[kind], 1)


def _architecture_parameters(model: ModelConfig) -> int:
    """By the shapes that llama-like decoders share; experts, if any, are counted."""
    config = model.architecture or {}
    hidden = _number(config, "hidden_size")
    layers = _number(config, "num_hidden_layers")
    heads = _number(config, "num_attention_heads")
    intermediate = _number(config, "intermediate_size")
    key_value_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    vocabulary = config.get("vocab_size") or (model.tokenizer.vocab_size if model.tokenizer else 0)
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    attention = hidden * head_dim * (2 * heads + 2 * key_value_heads)
    if experts:
        expert_size = config.get("moe_intermediate_size") or intermediate
        mlp = experts * 3 * hidden * expert_size + hidden * experts
    else:
        mlp = 3 * hidden * intermediate
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return layers * (attention + mlp + 2 * hidden) + embeddings + hidden


def _number(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"model.architecture.{key}={value!r}: a positive whole number is needed")
    return value
