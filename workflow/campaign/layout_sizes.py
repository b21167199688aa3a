"""How many numbers of a model each rank of a layout holds, from the model's configuration alone. Loads no framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.config import ConfigError, LayoutConfig


@dataclass(frozen=True)
class ModelSizes:
    """A decoder's sizes by their meaning."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    """Of the MLP of a dense model, of one expert of a mixture."""
    vocabulary: int
    experts: int
    """0 for a dense model."""
    experts_per_token: int
    tied: bool
    """Whether the output embedding is the input embedding."""
    qk_norm: bool
    """Whether queries and keys are normalised, head by head."""
    qkv_bias: bool

    @property
    def query(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of all keys of a token; values have the same."""
        return self.key_value_heads * self.head_dim

    def attention_parameters(self, tensor: int = 1) -> int:
        """Of a layer, on each of ``tensor`` ranks, with both of the layer's norms; norms are on every rank."""
        projections = self.hidden * (2 * self.query + 2 * self.key_value)
        biases = (self.query + 2 * self.key_value) if self.qkv_bias else 0
        return (projections + biases) // tensor + 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    def mlp_parameters(self, tensor: int = 1, expert: int = 1, expert_tensor: int = 1) -> int:
        """Of a layer: a dense MLP on each of ``tensor`` ranks, or this rank's experts."""
        matrices = 3 * self.hidden * self.intermediate
        return matrices * self.experts // (expert * expert_tensor) if self.experts else matrices // tensor

    @property
    def router_parameters(self) -> int:
        """Of a layer; every rank has them."""
        return self.hidden * self.experts

    @property
    def layer_parameters(self) -> int:
        """All of a layer."""
        return self.attention_parameters() + self.mlp_parameters() + self.router_parameters

    @property
    def parameters(self) -> int:
        """All of the model."""
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return self.layers * self.layer_parameters + embeddings + self.hidden


def model_sizes(config: Mapping[str, Any], source: str) -> ModelSizes:
    """Read a transformers configuration.

    Args:
        source: where it stands, for messages.

    Raises:
        ConfigError: a size that is missing or no positive whole number.
    """

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{source}: {key}={value!r}: a positive whole number is needed")
        return value

    model_type = str(config.get("model_type"))
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    mixture = model_type.endswith("_moe")
    return ModelSizes(
        hidden=hidden,
        layers=number("num_hidden_layers"),
        heads=heads,
        key_value_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads or 1),
        intermediate=number("moe_intermediate_size" if mixture else "intermediate_size"),
        vocabulary=number("vocab_size"),
        experts=number("num_local_experts" if "num_local_experts" in config else "num_experts")
        if mixture
        else 0,
        experts_per_token=number("num_experts_per_tok") if mixture else 0,
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        qkv_bias=model_type == "qwen2",
    )


@dataclass(frozen=True)
class Held:
    """Numbers of a model on one rank."""

    dense: int
    """All but the experts."""
    experts: int

    @property
    def all(self) -> int:
        """Both."""
        return self.dense + self.experts


def megatron_stages(model: ModelSizes, layout: LayoutConfig) -> list[Held]:
    """Parameters of a rank of each pipeline stage, first to last: the first has the input embedding, the last the output's.

    Shoeybi et al., Megatron-LM (2019), section 3: matrices are cut by columns and then by rows over the tensor-parallel ranks, norms are
    not cut. Tied embeddings of a pipeline are held by both ends.
    """
    tensor, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    layers = model.layers // stages
    experts = model.mlp_parameters(1, layout.expert_parallel_size, layout.expert_tensor_parallel_size)
    dense = model.attention_parameters(tensor) + model.router_parameters
    dense += 0 if model.experts else model.mlp_parameters(tensor)
    embedding = model.vocabulary * model.hidden // tensor
    held = []
    for stage in range(stages):
        own = layers * dense
        if stage == 0:
            own += embedding
        if stage == stages - 1:
            own += model.hidden + (0 if model.tied and stages == 1 else embedding)
        held.append(Held(own, layers * experts if model.experts else 0))
    return held
