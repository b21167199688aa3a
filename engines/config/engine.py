"""Typed settings of a training engine, its layout and its optimizer. Loads no framework."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from engines.config.base import Config


class LayoutConfig(Config):
    """How one role's ranks divide the work."""

    data_parallel_size: int = Field(1, ge=1)
    """Ranks that see different sequences."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that share each matrix."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Ranks that share the layers."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that share each sequence."""
    expert_parallel_size: int = Field(1, ge=1)
    """Ranks that share the experts; re-slices the same ranks, so it is no factor of the world size."""
    expert_tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that share each expert's matrices."""
    virtual_pipeline_parallel_size: int = Field(1, ge=1)
    """Megatron: groups of layers on each pipeline rank; more than 1 interleaves them, for a shorter pipeline bubble."""
    sequence_parallel: bool = False
    """Megatron: the ranks of tensor parallelism also share what is done to each token alone (norms, residuals)."""
    distributed_optimizer: bool = False
    """Megatron: the data-parallel ranks share the optimizer's state."""
    shard_size: int | None = Field(None, ge=1)
    """FSDP: ranks over which parameters are sharded; fewer than data_parallel_size is HSDP (replicas of shards). All when not set."""

    @property
    def world_size(self) -> int:
        """Ranks of the role: TP x PP x CP x DP."""
        return (
            self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )

    @model_validator(mode="after")
    def _shards_divide(self) -> LayoutConfig:
        if self.shard_size is not None and self.data_parallel_size % self.shard_size:
            raise ValueError(
                f"shard_size={self.shard_size} does not divide data_parallel_size={self.data_parallel_size}"
            )
        return self


class OffloadConfig(Config):
    """What waits in host memory between uses."""

    parameters: bool = False
    """Parameters leave the device outside train and eval scopes."""
    optimizer: bool = False
    """Optimizer states (and gradients) leave the device outside train scopes."""


class EngineConfig(Config):
    """One role's training engine."""

    backend: str = "auto"
    """Key in the engine registry (fsdp, fsdp2, megatron, ...); auto chooses from model size, site and catalogue, and says why."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Device key; auto takes what the site offers and the catalogue supports."""
    layout: LayoutConfig = LayoutConfig()
    """Parallel sizes."""
    forward_only: bool = False
    """No optimizer and no gradients: for reference and reward models."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of parameters in forward and backward; parameters and optimizer states are kept in float32."""
    offload: OffloadConfig = OffloadConfig()
    """Residency of parameters and optimizer."""
    dynamic_micro_batches: bool = True
    """Fill a token budget with sequences of any length (true), or take a fixed number of sequences (false)."""
    micro_batch_size: int = Field(8, ge=1)
    """Sequences of a micro-batch per rank when dynamic_micro_batches is false."""
    token_budget: int = Field(4096, ge=1)
    """Hard cap on tokens per rank and micro-batch in training when dynamic_micro_batches is true."""
    inference_token_budget: int | None = Field(None, ge=1)
    """The same for passes without gradients; token_budget when not set."""
    fused_kernels: bool = False
    """Fused kernels of the backend; refused where the backend or the device has none."""
    moe_aux_loss_coefficient: float = Field(0.0, ge=0)
    """Weight of the loss that balances a mixture's experts (Fedus et al., Switch Transformers, equation 4), of each micro-batch: the only part of
    a loss that depends on how a mini-batch is cut."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass."""
    seed: int | None = Field(None, ge=0)
    """Seed of what an engine draws itself (initial value head, dropout); the run's seed when not set (0 outside of a run)."""
    deterministic: bool = False
    """Kernels and collectives that add in one order, and an error where there is none, for all roles that share a process with one that
    asks: slower, see [what is set and what it costs](exactness.md#deterministic-accelerators). Without it only a CPU is deterministic."""


class SchedulerConfig(Config):
    """Learning-rate schedule, stepped once per optimizer step."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the learning rate that is left at the end of linear and cosine."""


class AdamWConfig(Config):
    """AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization) with gradient clipping by global norm, but for its learning rate."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moments, each in [0, 1)."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad_norm: float = Field(1.0, gt=0)
    """Largest global gradient norm."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Learning-rate schedule."""

    @model_validator(mode="after")
    def _betas_in_range(self) -> AdamWConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={list(self.betas)}: each must be in [0, 1)")
        return self

    def at(self, lr: float) -> OptimizerConfig:
        """These settings with the peak learning rate ``lr``: what an engine is given."""
        return OptimizerConfig(lr=lr, **self.model_dump())


class OptimizerConfig(AdamWConfig):
    """AdamW, complete."""

    lr: float = Field(1e-5, gt=0, le=1)
    """Peak learning rate."""


class RolloutConfig(Config):
    """How responses are sampled."""

    backend: Literal["transformers"] = "transformers"
    """Rollout engine."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; training engines divide logits by the same number."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off. Recorded log-probs are of the distribution before it."""
    top_k: int = Field(0, ge=0)
    """Sample among the k most likely tokens; 0 is off."""
    max_new_tokens: int = Field(64, ge=1)
    """Longest response, EOS included."""
    batch_size: int = Field(512, ge=1)
    """Sequences generated together on one replica."""
    compact_every: int = Field(16, ge=1)
    """Decoding steps after which finished sequences leave the batch."""


class CheckpointConfig(Config):
    """When training states are saved inside a segment, and which are kept."""

    save_every: int = Field(0, ge=0)
    """Steps between states inside a segment; 0 saves only at its end (and on request)."""
    asynchronous: bool = False
    """Write the states inside a segment while the next steps run: training waits for a copy in host memory, as large as what a rank
    writes. A segment's last state, and those that are asked for, are waited for."""
    retain: str = Field("last", pattern=r"^(all|last|every:[1-9]\d*)$")
    """Which published states keep their bytes once a later one is verified: all, last, or every:N."""
