"""Model FLOPs and device peaks, for model FLOPs utilisation (Chowdhery et al., PaLM, appendix B)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from engines.config import EngineConfig
from engines.model_folder import read_safetensors_header

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12}
"""Dense bfloat16 FLOPs per second by what the device's name contains, from the vendor's data sheets."""


def peak_flops(device: torch.device, config: EngineConfig) -> float | None:
    """FLOPs per second that the device can do in the engine's type; None where that is not known."""
    if device.type != "cuda" or config.dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def training_flops(model_path: Path, lengths: list[int]) -> float:
    """FLOPs of forward and backward over sequences of ``lengths``, without recomputation.

    6 per parameter and token, and 12 x layers x heads x head size x length per token for attention, halved because it
    is causal. Of a mixture, only the experts that a token visits count; the embedding table is a look-up.
    """
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    parameters = 0.0
    tensors = [
        item for path in model_path.glob("*.safetensors") for item in read_safetensors_header(path).items()
    ]
    for name, entry in tensors:
        share = 1.0
        if ".experts." in name:
            share = config["num_experts_per_tok"] / (config.get("num_experts") or config["num_local_experts"])
        if "embed_tokens" not in name or config.get("tie_word_embeddings"):
            parameters += share * math.prod(entry.shape)
    heads = config["num_attention_heads"]
    width = heads * (config.get("head_dim") or config["hidden_size"] // heads)
    attention = 6 * config["num_hidden_layers"] * width
    return sum(6 * parameters * length + attention * length * length for length in lengths)
