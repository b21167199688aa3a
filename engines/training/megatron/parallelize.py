"""Megatron's process groups, gradients and optimizer for one layout.

Megatron's parallel state belongs to the whole process, so a process knows one layout and keeps it.
"""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import nn

from engines.config import LayoutConfig, OptimizerConfig
from engines.training.batch import Alignment
from engines.training.errors import UnsupportedConfigError
from engines.training.megatron.cpu import on_cpu
from engines.training.megatron.model import TokenModel
from engines.training.scope import Topology


def device_scope(device: str) -> AbstractContextManager[None]:
    """Scope in which Megatron computes on ``device`` (a device key); every call of Megatron is made inside one."""
    return on_cpu() if device == "cpu" else contextlib.nullcontext()


def join(layout: LayoutConfig) -> None:
    """Make Megatron's process groups for ``layout``; nothing happens when they are there. Collective.

    Raises:
        UnsupportedConfigError: no process group or one of another size, or this process has another layout already.
    """
    if not dist.is_initialized():
        raise UnsupportedConfigError("the process group is not initialised; call init_process_group first")
    if dist.get_world_size() != layout.world_size:
        raise UnsupportedConfigError(
            f"engine.layout asks for {layout.world_size} ranks; the process group has {dist.get_world_size()}"
        )
    if parallel_state.model_parallel_is_initialized():
        if (joined := _joined()) != (asked := _sizes(layout)):
            differing = ", ".join(f"{k}={asked[k]} (is {joined[k]})" for k in asked if asked[k] != joined[k])
            raise UnsupportedConfigError(
                f"engine.layout: {differing}: this process has another Megatron layout already; "
                "give the role processes of its own"
            )
        return
    interleaved = layout.virtual_pipeline_parallel_size > 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_parallel_size if interleaved else None,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    # Megatron wants its random streams to exist; nothing is drawn from them, so the host's must not move.
    with torch.random.fork_rng(devices=[]):
        tensor_parallel.model_parallel_cuda_manual_seed(0)


def topology(layout: LayoutConfig) -> Topology:
    """Where this rank stands, once it has joined."""
    size = layout.data_parallel_size
    is_source = (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    sharing_rank = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    # An interleaved pipeline takes micro-batches in groups of its size.
    interleaved = layout.virtual_pipeline_parallel_size > 1
    return Topology(
        parallel_state.get_data_parallel_rank(),
        size,
        parallel_state.get_data_parallel_group() if size > 1 else None,
        is_source,
        layout.pipeline_parallel_size if interleaved else 1,
        alignment(layout),
        sharing_rank if any(sharing_rank) else (),
    )


def alignment(layout: LayoutConfig) -> Alignment:
    """Context parallelism cuts each sequence into two chunks a rank, sequence parallelism all rows into equal parts."""
    context, tensor = layout.context_parallel_size, layout.tensor_parallel_size
    sequence = 2 * context if context > 1 else 1
    total = context * (tensor if layout.sequence_parallel else 1)
    return Alignment(sequence, math.lcm(sequence, total), context)


def with_gradients(chunks: list[TokenModel], layout: LayoutConfig) -> list[nn.Module]:
    """The same parts with float32 gradients, added up over the data-parallel ranks when a step's backward passes are done."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=layout.distributed_optimizer
    )
    wrapped = [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def adamw(chunks: list[nn.Module], config: OptimizerConfig, layout: LayoutConfig) -> MegatronOptimizer:
    """Megatron's AdamW with one set of rules for all parameters, whose state exists from the start."""
    dtype = next(chunks[0].parameters()).dtype
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=0.0,  # the engine clips
            use_distributed_optimizer=layout.distributed_optimizer,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        ),
        chunks,
        config_overrides={},  # by default norms and biases do not decay
        use_gloo_process_groups=False,
    )
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups if part.optimizer is not None else []:
            for parameter in group["params"]:
                part.optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }
    return optimizer


def _sizes(layout: LayoutConfig) -> dict[str, int]:
    return {
        name: getattr(layout, name)
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "virtual_pipeline_parallel_size",
            "context_parallel_size",
            "expert_parallel_size",
            "expert_tensor_parallel_size",
        )
    }


def _joined() -> dict[str, int]:
    state = parallel_state
    return {
        "tensor_parallel_size": state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel_size": state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_parallel_size": state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context_parallel_size": state.get_context_parallel_world_size(),
        "expert_parallel_size": state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": state.get_expert_tensor_parallel_world_size(),
    }
