"""FSDP2: each parameter is a DTensor sharded on its first dimension (``torch.distributed.fsdp.fully_shard``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engines.hf_checkpoint import on_disk_views
from engines.registry import EngineRegistry
from engines.training.batch import MicroBatch
from engines.training.fsdp.engine import ShardedDataParallelEngine
from engines.training.fsdp.model import TokenModel
from engines.training.schedule import MicroBatchStep

DEVICES = ("cpu", "cuda", "npu")


class FSDP2Engine(ShardedDataParallelEngine):
    """Shards every decoder layer as one unit, and the rest (embeddings, last norm, head) as another."""

    def shard(self, model: TokenModel) -> nn.Module:
        half = self.config.dtype == "bfloat16"
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
        # One shard has nothing to free between forward and backward, so gathering it anew would be waste.
        free = self.mesh["shard"].size() > 1
        for layer in model.layers:
            fully_shard(layer, mesh=self.mesh, mp_policy=precision, reshard_after_forward=free)
        fully_shard(model, mesh=self.mesh, mp_policy=precision, reshard_after_forward=free)
        return model.to(self.device)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.module.set_requires_gradient_sync(False)
        self.module.set_reshard_after_backward(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)
            self.module.set_reshard_after_backward(True)

    def run_schedule(
        self, micro_batches: Sequence[MicroBatch], step: MicroBatchStep, forward_only: bool
    ) -> None:
        super().run_schedule(micro_batches, step, forward_only)
        if (
            forward_only
        ):  # nothing else frees the gathered parameters, which the next step would take for current
            for unit in self.module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()

    def export_units(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield from on_disk_views(name, _full(parameter.detach()))

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(on-disk name, full gradient) of every parameter that has one. Collective."""
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                yield from on_disk_views(name, _full(parameter.grad))

    def sharded_state(self) -> dict[str, Any]:
        state = {}
        for name, parameter in self.module.named_parameters():
            state[f"model.{name}"] = parameter.detach()
            if self.optimizer is not None:
                slots = self.optimizer.state[parameter]
                state.update({f"optimizer.{name}.{slot}": value for slot, value in slots.items()})
        return state

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, target in self.sharded_state().items():
                if target is not state[name]:
                    target.copy_(state[name])


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device=DEVICES)
class FSDP2LanguageModel(FSDP2Engine):
    """Log-probs and entropy."""

    model_type = "language_model"


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device=DEVICES)
class FSDP2ValueModel(FSDP2Engine):
    """Values."""

    model_type = "value_model"
