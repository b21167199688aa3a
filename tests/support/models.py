"""Tiny Hugging Face models for tests. Initial weights are large: at the usual 0.02 attention bugs hide below 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 96
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, _MOE),
    "qwen3-moe-tied": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**_MOE, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
}


def save_tiny_model(
    folder: Path, family: str = "qwen3", seed: int = 0, value_head: bool = False, **overrides: Any
) -> Path:
    """A random float32 model of ``family`` as a Hugging Face folder; ``overrides`` go into its configuration.

    With ``value_head`` the folder holds ``score.weight`` in place of the language-model head.
    """
    config_type, model_type, own = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_type(config_type(**{**_COMMON, **own, **overrides}))
        for parameter in model.parameters():
            # Norms start at 1 and biases at 0, which would hide what is done with them.
            if parameter.ndim == 1:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        if value_head:
            tensors = load_file(folder / "model.safetensors")
            tensors.pop("lm_head.weight", None)
            tensors["score.weight"] = 0.2 * torch.randn(1, model.config.hidden_size)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
