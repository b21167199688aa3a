"""What the two FSDP engines share: transformers models, data parallelism over shards, AdamW on float32 master weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engines.catalog import FSDP
from engines.training.base import BaseEngine, Topology
from engines.training.batch import Alignment, MicroBatch
from engines.training.errors import UnsupportedConfigError
from engines.training.fsdp.model import TokenModel, load_model, predictors
from engines.training.packed_attention import Segments
from engines.training.process_group import local_device
from engines.training.schedule import Metrics, MicroBatchStep, ModelOutputs, sequential_schedule
from engines.training.ulysses import SequenceGroup


class ShardedDataParallelEngine(BaseEngine):
    """Base of fsdp and fsdp2: they differ in how parameters are wrapped, gathered and addressed."""

    mesh: DeviceMesh
    """("shard",), or ("replicate", "shard") for HSDP."""
    shared: SequenceGroup | None
    """The ranks with which this one shares sequences."""

    @abstractmethod
    def shard(self, model: TokenModel) -> nn.Module:
        """Distribute the parameters of ``model`` over ``mesh``."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[Any]:
        """Scope in which backward passes only accumulate gradients, on this rank."""

    def build(self) -> None:
        self._check_config()
        layout = self.config.layout
        self.device = local_device(self.config.device)
        self.topology, self.shared = self._groups()
        shards = (layout.shard_size or layout.data_parallel_size) * layout.context_parallel_size
        replicas = layout.world_size // shards
        if replicas == 1:
            self.mesh = init_device_mesh(self.device.type, (shards,), mesh_dim_names=("shard",))
        else:
            self.mesh = init_device_mesh(
                self.device.type, (replicas, shards), mesh_dim_names=("replicate", "shard")
            )
        model = load_model(self.model_path, self.model_type, self.config, self.temperature)
        if self.config.forward_only:
            model.requires_grad_(False)
        self.module = self.shard(model)
        if self.optimizer_config is not None:
            self.optimizer = self._adamw(self.module.parameters())

    def _groups(self) -> tuple[Topology, SequenceGroup | None]:
        """Consecutive ranks share sequences; each of them sees the same data-parallel share of a batch."""
        size, shared = self.config.layout.data_parallel_size, self.config.layout.context_parallel_size
        if shared == 1:
            return Topology(dist.get_rank(), size, dist.group.WORLD if size > 1 else None), None
        mesh = init_device_mesh(self.device.type, (size, shared), mesh_dim_names=("data", "sequence"))
        rank = mesh.get_local_rank("sequence")
        topology = Topology(
            mesh.get_local_rank("data"),
            size,
            mesh.get_group("data") if size > 1 else None,
            is_source=rank == 0,
            alignment=Alignment(total=shared, ranks=shared),
            sharing_rank=(rank,) if rank else (),
        )
        return topology, SequenceGroup(mesh.get_group("sequence"), rank, shared)

    def _check_config(self) -> None:
        config, layout = self.config, self.config.layout
        if reason := FSDP.refuse_settings(config):
            raise UnsupportedConfigError(f"engine.backend={config.backend}: {reason}")
        if not dist.is_initialized():
            raise UnsupportedConfigError(
                "the process group is not initialised; call init_process_group first"
            )
        if dist.get_world_size() != layout.world_size:
            raise UnsupportedConfigError(
                f"engine.layout asks for {layout.world_size} ranks; the process group has {dist.get_world_size()}"
            )

    def _adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        config = self.optimizer_config
        optimizer = torch.optim.AdamW(
            parameters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=self.device.type in ("cpu", "cuda"),
        )
        # The state exists from the start, so that saving, loading and moving know one form of it.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                step = torch.zeros((), device=self.device if group["fused"] else "cpu")
                optimizer.state[parameter] = {
                    "step": step,
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }
        return optimizer

    def forward_micro_batch(self, model: nn.Module, micro_batch: MicroBatch, entropy: bool) -> ModelOutputs:
        batch = micro_batch.batch
        return ModelOutputs(
            **model(
                batch.tokens["input_ids"],
                batch.position_ids,
                predictors(batch),
                Segments(batch.cu_seqlens, self.device, self.shared),
                entropy,
            )
        )

    def run_schedule(
        self, micro_batches: Sequence[MicroBatch], step: MicroBatchStep, forward_only: bool
    ) -> None:
        sequential_schedule(self.module, micro_batches, step, forward_only, self.no_sync)

    def gradient_scale(self, num_micro_batches: int) -> float:
        """Gradients are averaged over all ranks, also those that share sequences, and added over micro-batches."""
        return float(self.config.layout.world_size)

    def optimizer_step(self) -> Metrics:
        gradients = [_local(p.grad) for p in self.module.parameters() if p.grad is not None]
        norm = self._global_norm(gradients)
        skipped = not torch.isfinite(norm).item()
        limit = self.optimizer_config.clip_grad_norm
        if skipped:
            self.zero_grad()
        else:
            if norm > limit:
                torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).to(gradients[0]))
            self.optimizer.step()
        return {"grad_norm": (norm.item(), 1.0), "skipped_steps": (float(skipped), 1.0)}

    def _global_norm(self, gradients: list[Tensor]) -> Tensor:
        """() float64: of all shards; replicas of a shard count once."""
        squared = torch.zeros((), dtype=torch.float64, device=self.device)
        if gradients:
            squared = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        if self.mesh["shard"].size() > 1:
            dist.all_reduce(squared, group=self.mesh.get_group("shard"))
        return squared.sqrt()

    def move(self, device: torch.device, model: bool, optimizer: bool, grad: bool) -> None:
        if self.device.type == "cpu":
            return  # host memory is the device's memory
        if model:
            self.module.to(device)
        if grad:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(device)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state.update({name: value.to(device) for name, value in state.items() if name != "step"})


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
