"""The model architectures that planning knows: what a configuration of each may say. Data only, so no framework is loaded.

The tables are those of the configuration classes in transformers; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.config import ConfigError, nearest

_DECODER = {
    "attention_dropout", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
    "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps",
    "rope_parameters", "tie_word_embeddings", "use_cache", "vocab_size",
}  # fmt: skip
_WINDOWS = {"use_sliding_window", "sliding_window"}
_LAYER_TYPES = {"layer_types", "max_window_layers"}
_EXPERTS = {
    "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok",
    "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip

KEYS: dict[str, set[str]] = {
    "llama": _DECODER | {"attention_bias", "head_dim", "mlp_bias", "pretraining_tp"},
    "qwen2": _DECODER | _WINDOWS | _LAYER_TYPES,
    "qwen3": _DECODER | _WINDOWS | _LAYER_TYPES | {"attention_bias", "head_dim"},
    "qwen3_moe": _DECODER | _WINDOWS | _EXPERTS | {"attention_bias"},
}
"""model_type -> the keys of its configuration."""

ROPE_KEYS = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor", "low_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type", "short_factor",
}  # fmt: skip
"""Keys below ``rope_parameters``."""

DEFAULT_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768}
"""``max_position_embeddings`` of a configuration that does not set it."""


def check_keys(config: Mapping[str, Any], path: str) -> None:
    """Refuse what the architecture's configuration does not know, which transformers would keep without a word.

    An architecture that is not in the table belongs to an engine of somebody else, and is left alone.

    Args:
        path: config path of ``config``, for messages.

    Raises:
        ConfigError: naming the key and the nearest spelling.
    """
    model_type = config.get("model_type")
    if model_type is None:
        raise ConfigError(f"{path}.model_type: missing; known: {', '.join(KEYS)}")
    if model_type not in KEYS:
        return
    levels = [(config, f"{path}.", KEYS[model_type] | {"model_type"})]
    if isinstance(rope := config.get("rope_parameters"), Mapping):
        levels.append((rope, f"{path}.rope_parameters.", ROPE_KEYS))
    for values, prefix, known in levels:
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"{prefix}{key}: unknown key of a {model_type} model; {nearest(str(key), sorted(known))}"
                )


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Longest sequence that a model of this configuration takes; None when that cannot be told."""
    return config.get("max_position_embeddings", DEFAULT_POSITIONS.get(config.get("model_type", "")))


def uses_windows(config: Mapping[str, Any]) -> bool:
    """Whether any layer attends to less than the whole sequence before a token."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return bool(config.get("use_sliding_window")) and config.get("max_window_layers", 0) < config.get(
        "num_hidden_layers", float("inf")
    )
