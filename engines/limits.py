"""What an engine computes of all that can be configured. Planning and the engine itself refuse by the same tables: no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engines.architectures import uses_windows
from engines.config import EngineConfig, LayoutConfig, nearest


@dataclass(frozen=True)
class Limits:
    """Of an engine that can divide any model by the sizes it knows."""

    architectures: tuple[str, ...]
    """transformers model types."""
    layout: tuple[str, ...]
    """The keys of LayoutConfig that it honours."""
    fused_kernels: bool
    auxiliary_losses: bool = False
    """Those of mixtures of experts."""

    def refuse_model(self, config: Mapping[str, Any]) -> str:
        """Why a model of this transformers configuration is not served; empty when it is."""
        model_type = config.get("model_type")
        if model_type not in self.architectures:
            return f"model_type={model_type!r} is not served; {nearest(str(model_type), list(self.architectures))}"
        if uses_windows(config):
            return "the model has sliding windows, packed attention has none"
        return ""

    def refuse_settings(self, config: EngineConfig) -> str:
        """Which settings are not honoured, by their paths below the engine; empty when all are."""
        plain = LayoutConfig()
        ignored = [
            f"layout.{key}={getattr(config.layout, key)}"
            for key in LayoutConfig.model_fields
            if key not in self.layout and getattr(config.layout, key) != getattr(plain, key)
        ]
        reasons = (
            [f"{', '.join(ignored)}: it divides work by {', '.join(self.layout)} only"] if ignored else []
        )
        if config.fused_kernels and not self.fused_kernels:
            reasons.append("fused_kernels=True: it has no fused kernels")
        if config.moe_aux_loss_coefficient and not self.auxiliary_losses:
            reasons.append(
                f"moe_aux_loss_coefficient={config.moe_aux_loss_coefficient}: it has no auxiliary losses"
            )
        return "; ".join(reasons)

    def refuse_layout(self, config: EngineConfig, model: Mapping[str, Any]) -> str:
        """Why a model of this transformers configuration cannot be divided like that; empty when it can."""
        return ""


@dataclass(frozen=True)
class FSDPLimits(Limits):
    """Of the FSDP engines: ranks that share sequences divide the heads of attention among them."""

    def refuse_layout(self, config: EngineConfig, model: Mapping[str, Any]) -> str:
        size, heads = config.layout.context_parallel_size, model.get("num_attention_heads")
        if not isinstance(heads, int) or heads % size == 0:
            return ""
        found = max(n for n in range(1, size) if heads % n == 0)
        return (
            f"layout.context_parallel_size={size} does not divide the model's num_attention_heads={heads}; "
            f"nearest that works: layout.context_parallel_size={found}"
        )


@dataclass(frozen=True)
class MegatronLimits(Limits):
    """Of Megatron: sizes have to divide what they share, and some combinations are refused because they would be wrong."""

    def refuse_model(self, config: Mapping[str, Any]) -> str:
        if reason := super().refuse_model(config):
            return reason
        rope = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("rope_type", "default")
        wrong = {
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "attention_bias": bool(config.get("attention_bias")),
            "mlp_bias": bool(config.get("mlp_bias")),
            "mlp_only_layers": bool(config.get("mlp_only_layers")),
            "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        }
        reasons = [f"{key}={config.get(key)!r}" for key, is_wrong in wrong.items() if is_wrong]
        if rope not in ("default", "linear", "llama3"):
            reasons.append(f"rope_type={rope!r}")
        return f"{', '.join(reasons)}: not computed by the megatron engine" if reasons else ""

    def refuse_settings(self, config: EngineConfig) -> str:
        return super().refuse_settings(config) or self.refuse_layout(config, {})

    def refuse_layout(self, config: EngineConfig, model: Mapping[str, Any]) -> str:
        reasons = [*_wrong_layout(config.layout), *_wrong_for(config.layout, model)]
        if not reasons and config.moe_aux_loss_coefficient and model and not _has_experts(model):
            return f"moe_aux_loss_coefficient={config.moe_aux_loss_coefficient}: the model has no experts"
        if not reasons:
            return ""
        found = _nearest_layout(config.layout, model)
        return f"{'; '.join(reasons)}; nearest that works: {_difference(config.layout, found)}"


def _wrong_layout(layout: LayoutConfig) -> list[str]:
    """What is wrong with the sizes whatever the model is."""
    reasons = []
    if layout.sequence_parallel and layout.tensor_parallel_size == 1:
        reasons.append(
            "layout.sequence_parallel=True: it is shared by the ranks of layout.tensor_parallel_size, which is 1"
        )
    if layout.virtual_pipeline_parallel_size > 1 and layout.pipeline_parallel_size == 1:
        reasons.append(
            f"layout.virtual_pipeline_parallel_size={layout.virtual_pipeline_parallel_size}: "
            "it interleaves the ranks of layout.pipeline_parallel_size, which is 1"
        )
    sharing = layout.world_size // layout.pipeline_parallel_size
    experts = layout.expert_parallel_size * layout.expert_tensor_parallel_size
    if sharing % experts:
        reasons.append(
            f"layout.expert_parallel_size={layout.expert_parallel_size} x "
            f"layout.expert_tensor_parallel_size={layout.expert_tensor_parallel_size} "
            f"does not divide the {sharing} ranks of a pipeline stage"
        )
    if layout.distributed_optimizer and layout.data_parallel_size * layout.context_parallel_size == 1:
        reasons.append(
            "layout.distributed_optimizer=True: it is shared by the ranks of layout.data_parallel_size and "
            "layout.context_parallel_size, which are 1"
        )
    return reasons


def _wrong_for(layout: LayoutConfig, model: Mapping[str, Any]) -> list[str]:
    """Which sizes do not divide what they share in this model. A size that the configuration does not say is left to the engine."""
    tensor, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    stages *= layout.virtual_pipeline_parallel_size
    shared = [
        ("tensor_parallel_size", tensor, "num_attention_heads"),
        ("tensor_parallel_size", tensor, "num_key_value_heads"),
        ("tensor_parallel_size", tensor, "intermediate_size"),
        ("tensor_parallel_size", tensor, "vocab_size"),
        ("pipeline_parallel_size x virtual_pipeline_parallel_size", stages, "num_hidden_layers"),
        ("expert_parallel_size", layout.expert_parallel_size, "num_experts"),
        ("expert_tensor_parallel_size", layout.expert_tensor_parallel_size, "moe_intermediate_size"),
    ]
    reasons = []
    for name, size, key in shared:
        whole = model.get(key)
        if isinstance(whole, int) and whole % size:
            padding = " (the vocabulary is not padded)" if key == "vocab_size" else ""
            reasons.append(f"layout.{name}={size} does not divide the model's {key}={whole}{padding}")
    has_experts = _has_experts(model)
    for name in ("expert_parallel_size", "expert_tensor_parallel_size"):
        if model and not has_experts and getattr(layout, name) > 1:
            reasons.append(f"layout.{name}={getattr(layout, name)}: the model has no experts")
    if has_experts and tensor > 1 and not layout.sequence_parallel:
        reasons.append(
            f"layout.tensor_parallel_size={tensor} of a model with experts needs layout.sequence_parallel=True"
        )
    return reasons


def _has_experts(model: Mapping[str, Any]) -> bool:
    return str(model.get("model_type", "")).endswith("_moe")


def _nearest_layout(layout: LayoutConfig, model: Mapping[str, Any]) -> LayoutConfig:
    """The legal layout that differs least, with as many ranks if there is one."""

    def distance(other: LayoutConfig) -> tuple[float, float]:
        sizes = [(getattr(layout, key), getattr(other, key)) for key in LayoutConfig.model_fields]
        changed = sum(
            abs(math.log(a / b)) if isinstance(a, int) and isinstance(b, int) and a and b else float(a != b)
            for a, b in sizes
        )
        return abs(math.log(layout.world_size / other.world_size)), changed

    legal = (o for o in _around(layout) if not _wrong_layout(o) and not _wrong_for(o, model))
    return min(legal, key=distance)


def _around(layout: LayoutConfig) -> Iterator[LayoutConfig]:
    """Layouts with smaller sizes, and with the data-parallel size that keeps the number of ranks."""

    def up_to(size: int) -> list[int]:
        world = layout.world_size
        return [n for n in range(size, 0, -1) if size % n == 0 or world % n == 0 or n & (n - 1) == 0]

    for tensor, pipeline, virtual, experts, expert_tensor in itertools.product(
        up_to(layout.tensor_parallel_size),
        up_to(layout.pipeline_parallel_size),
        up_to(layout.virtual_pipeline_parallel_size),
        up_to(layout.expert_parallel_size),
        up_to(layout.expert_tensor_parallel_size),
    ):
        fixed = tensor * pipeline * layout.context_parallel_size
        for data in {max(1, layout.world_size // fixed), layout.data_parallel_size}:
            for sequence in {layout.sequence_parallel, tensor > 1}:
                yield layout.model_copy(
                    update={
                        "tensor_parallel_size": tensor,
                        "pipeline_parallel_size": pipeline,
                        "virtual_pipeline_parallel_size": virtual,
                        "expert_parallel_size": experts,
                        "expert_tensor_parallel_size": expert_tensor,
                        "data_parallel_size": data,
                        "sequence_parallel": sequence,
                        "distributed_optimizer": layout.distributed_optimizer
                        and data * layout.context_parallel_size > 1,
                        "shard_size": None,
                    }
                )


def _difference(layout: LayoutConfig, other: LayoutConfig) -> str:
    changed = [
        f"layout.{key}={getattr(other, key)}"
        for key in LayoutConfig.model_fields
        if getattr(other, key) != getattr(layout, key)
    ]
    return ", ".join(changed)
