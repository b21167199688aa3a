"""How many parameters a model has and how many bytes a stage will write, told from configurations and headers. No framework."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.architectures import check_keys
from engines.checkpoint.store import parse_policy
from engines.config import ConfigError
from engines.gguf import read_gguf_header
from engines.model_folder import check_model_folder, locate_gguf
from workflow.campaign.hub import check_fetched, is_hub
from workflow.campaign.schema import ModelConfig

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
STATE_BYTES = 12
"""Per parameter of a training state: float32 weight and two AdamW moments."""
FIXED_BYTES = 2**20
"""Tokenizer, records, logs."""
OPTIONAL_SIZES = (
    "vocab_size",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_experts",
    "moe_intermediate_size",
)
"""Of an architecture: sizes that may be left to their defaults."""


@dataclass(frozen=True)
class ModelFacts:
    """What planning knows of the base model, without loading it."""

    source: str
    """Where that stands, for messages."""
    config: Mapping[str, Any]
    """The transformers configuration: all of it, or what a header tells of it."""
    parameters: int


def read_model(model: ModelConfig) -> ModelFacts:
    """Look at the base model's configuration and headers.

    Raises:
        ConfigError: a key that its architecture does not have, or a size that is none.
        ModelFolderError: the folder is incomplete or damaged, or the package is missing.
    """
    if model.folder is not None:
        if is_hub(model.path):
            check_fetched(model.path)
        tensors = check_model_folder(model.folder)
        file = model.folder / "config.json"
        total = sum(math.prod(entry.shape) for entry in tensors.values())
        return ModelFacts(str(file), json.loads(file.read_text(encoding="utf-8")), total)
    if model.package is not None:
        header = read_gguf_header(locate_gguf(model.package))
        return ModelFacts(f"model.package={model.package!r}", header.config, header.parameters)
    check_keys(model.architecture, "model.architecture")
    return ModelFacts("model.architecture", model.architecture, _architecture_parameters(model))


def weights_bytes(parameters: int, dtype: str) -> int:
    """A model folder."""
    return parameters * WEIGHT_BYTES[dtype] + FIXED_BYTES


def kept_states(cuts: Sequence[int], retain: str) -> int:
    """How many states of a training are on disk at the same time: those kept, the last two cuts, and one inside a segment.

    Args:
        cuts: the steps at which segments end, in order.
        retain: ``checkpoint.retain``.
    """
    every = parse_policy(retain)
    kept = [cut for cut in cuts[:-1] if every and cut % every == 0]
    return len({*kept, *cuts[-2:]}) + 1


def states_bytes(parameters: int, trained_models: int, kept_states: int) -> int:
    """Training states that lie on disk at the same time."""
    return parameters * STATE_BYTES * trained_models * kept_states + FIXED_BYTES


def _architecture_parameters(model: ModelConfig) -> int:
    """By the shapes that llama-like decoders share; experts, if any, are counted."""
    config = model.architecture or {}
    for key in OPTIONAL_SIZES:
        if config.get(key) is not None:
            _number(config, key)
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
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model.architecture.{key}={value!r}: a positive whole number is needed")
    return value
