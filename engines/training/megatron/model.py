"""A transformers model's configuration as Megatron's, and the parts of the model that a rank holds.

Everything comes from the model's own ``config.json``. The layers are Megatron's local ones (no Transformer Engine) with fusions
off, so that the same arithmetic runs on every device.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from engines.catalog import MEGATRON
from engines.config import EngineConfig, LayoutConfig
from engines.limits import MegatronLimits
from engines.training.errors import UnsupportedConfigError
from engines.training.megatron.attention import PackedCoreAttention

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_config(folder: Path, limits: MegatronLimits = MEGATRON) -> PretrainedConfig:
    """The configuration of the model in ``folder``, completed with transformers' defaults.

    Raises:
        UnsupportedConfigError: a model that is not computed exactly.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if reason := limits.refuse_model(config.to_dict()):
        raise UnsupportedConfigError(f"{folder}: {reason}")
    return config


_PLAIN_ARITHMETIC = {
    "attention_softmax_in_fp32": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": False,
    "persist_layer_norm": False,
}
"""The same on every device."""


def transformer_config(
    model: PretrainedConfig, layout: LayoutConfig, engine: EngineConfig | None = None
) -> TransformerConfig:
    """Megatron's configuration of ``model`` in ``layout``.

    Args:
        engine: what else a training engine is told (type of numbers, recompute); float32 without recompute when not given.
    """
    engine = engine or EngineConfig()
    half = engine.dtype == "bfloat16"
    dtype = torch.bfloat16 if half else torch.float32
    recompute: dict[str, Any] = {}
    if engine.activation_checkpointing:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        **_architecture(model),
        **_experts(model, engine.moe_aux_loss_coefficient),
        **_parallelism(layout),
        **_PLAIN_ARITHMETIC,
        **recompute,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=half,
        # Embeddings are indexed then: Megatron does not trust torch's look-up to add its gradient in one order.
        deterministic_mode=engine.deterministic,
        # All weights are read from files.
        use_cpu_initialization=True,
        perform_initialization=False,
    )


def build_chunks(
    model: PretrainedConfig, config: TransformerConfig, model_type: str = "language_model"
) -> list[GPTModel]:
    """The parts of the model that this rank holds: one, or as many as the virtual pipeline has. Weights are undefined.

    Megatron's parallel state is there already.
    """
    stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(stages or 1):
        where = {"ignore_virtual": False, "vp_stage": stage} if stages else {}
        first = parallel_state.is_pipeline_first_stage(**where)
        last = parallel_state.is_pipeline_last_stage(**where)
        stage_number = stage if stages else None
        chunks.append(TokenModel(model, config, model_type, first, last, stage_number))
        mark_shared_weights(chunks[-1])
    return chunks


def mark_shared_weights(chunk: nn.Module) -> None:
    """Mark how ranks share the weights, as Megatron does now; what is marked so already stays as it is.

    Before 0.17 it marks as split by tensor parallelism only what it initialises itself. Weights without the mark count once for all
    ranks in the norm of the gradient, so most of the norm would be missing. And it takes experts for dense weights when they are
    split in no way: each tensor-parallel rank, which has other tokens, would keep its own gradient of them.
    """
    split = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in chunk.modules():
        dimension = next((number for kind, number in split.items() if isinstance(module, kind)), None)
        weight = getattr(module, "weight", None)
        if dimension is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dimension, 1)
        if getattr(module, "is_expert", False) and weight is not None:
            sizes = module.config
            weight.allreduce = (
                sizes.expert_model_parallel_size == 1
                and sizes.expert_tensor_parallel_size == sizes.tensor_model_parallel_size
            )


class TokenModel(GPTModel):
    """A part of a model. Its last part ends after the last norm: the head is applied by who needs its outputs."""

    def __init__(
        self,
        model: PretrainedConfig,
        config: TransformerConfig,
        model_type: str,
        first: bool,
        last: bool,
        stage: int | None,
    ) -> None:
        super().__init__(
            config,
            _layers(config, stage),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_position_embeddings,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=is_tied(model) and model_type == "language_model",
            vp_stage=stage,
        )
        self.rotary_pos_emb = PackedRotaryEmbedding(model)
        if first and model.pad_token_id is not None:
            token = model.pad_token_id % model.vocab_size
            self.embedding.word_embeddings.register_forward_hook(
                partial(_keep_from_learning, token, config.sequence_parallel)
            )
        if last and model_type == "value_model":
            self.output_layer = nn.Linear(model.hidden_size, 1, bias=False, dtype=config.params_dtype)

    def head_weight(self) -> Tensor:
        """(vocabulary / TP, hidden) of a language model, (1, hidden) of a value model; the last part has it."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _postprocess(self, hidden_states: Tensor, *args: Any, **named: Any) -> Tensor:
        return hidden_states


def _keep_from_learning(
    token: int, scattered: bool, _: nn.Module, inputs: tuple[Tensor, ...], embedded: Tensor
) -> Tensor:
    """No gradient for the embedding of the padding ``token`` where it is read, as in transformers, whose row of it is 0.

    Args:
        inputs: the ids, (1, rows).
        embedded: (1, rows, hidden), or where sequence parallelism has ``scattered`` it (rows / TP, 1, hidden).
    """
    learns = (inputs[0] != token)[..., None]
    if scattered:
        size = parallel_state.get_tensor_model_parallel_world_size()
        learns = learns.transpose(0, 1).chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    return torch.where(learns, embedded, embedded.detach())


class PackedRotaryEmbedding(nn.Module):
    """Angles for rows whose positions are given, with the frequencies that transformers computes for the model.

    Megatron asks first for a sequence length and then for the angles of so many positions; here the first answer is the
    positions themselves, which travel in ``packed_seq_params``.
    """

    def __init__(self, model: PretrainedConfig) -> None:
        super().__init__()
        self.frequencies = _frequencies(model)  # (head_dim / 2,) float32, moved when used: not a weight

    def get_rotary_seq_len(
        self, context: Any, decoder: Any, decoder_input: Any, config: Any, packing: Any
    ) -> Tensor:
        return packing.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """(rows,) int64 -> (rows, 1, 1, head_dim) float32"""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self.frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None]


class RMSNorm(nn.RMSNorm):
    """torch's, told to Megatron so that its gradients are added over the ranks of sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def head_dim(model: PretrainedConfig) -> int:
    """Width of one attention head."""
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def has_qk_norm(model: PretrainedConfig) -> bool:
    """Whether queries and keys are normalised."""
    return model.model_type in ("qwen3", "qwen3_moe")


def has_qkv_bias(model: PretrainedConfig) -> bool:
    """Whether the projections to queries, keys and values have biases."""
    return model.model_type == "qwen2"


def is_tied(model: PretrainedConfig) -> bool:
    """Whether the output embedding is the input embedding."""
    return bool(model.tie_word_embeddings)


def _architecture(model: PretrainedConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": head_dim(model),
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "qk_layernorm": has_qk_norm(model),
        "add_bias_linear": False,
        "add_qkv_bias": has_qkv_bias(model),
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": model.attention_dropout,
    }


def _parallelism(layout: LayoutConfig) -> dict[str, Any]:
    interleaved = layout.virtual_pipeline_parallel_size > 1
    return {
        "tensor_model_parallel_size": layout.tensor_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_parallel_size
        if interleaved
        else None,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
        "sequence_parallel": layout.sequence_parallel,
        # Packed micro-batches differ in length, which only this dispatcher of tokens to experts knows.
        "moe_token_dispatcher_type": "alltoall",
        "variable_seq_lengths": layout.pipeline_parallel_size > 1,
        # Interleaved stages exchange wrong activations unless they overlap, and say nothing.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _experts(model: PretrainedConfig, aux_loss: float) -> dict[str, Any]:
    if model.model_type != "qwen3_moe":
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        # Softmax over the chosen experts is softmax over all, made to add up to 1 again.
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if aux_loss else "none",
        "moe_aux_loss_coeff": aux_loss,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
    }


def _layers(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    # The same layer everywhere; Megatron numbers them by pipeline rank and stage.
    count = get_num_layers_to_build(config, vp_stage=stage)
    layers = [ModuleSpec(layer.module, layer.params, layer.submodules) for _ in range(count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _frequencies(model: PretrainedConfig) -> Tensor:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = model.rope_parameters.get("rope_type", "default")
    if kind == "default":
        base, width = model.rope_parameters["rope_theta"], head_dim(model)
        return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](model, torch.device("cpu"))
    return frequencies
