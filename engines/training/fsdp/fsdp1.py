"""FSDP1: the parameters of a unit are flattened into one and sharded (``FullyShardedDataParallel``)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from engines.hf_checkpoint import on_disk_views
from engines.registry import EngineRegistry
from engines.training.fsdp.engine import ShardedDataParallelEngine
from engines.training.fsdp.model import TokenModel

DEVICES = ("cpu", "cuda", "npu")
_WRAPPER = "_fsdp_wrapped_module."


class FSDP1Engine(ShardedDataParallelEngine):
    """Every decoder layer is a unit, and the rest (embeddings, last norm, head) another."""

    def shard(self, model: TokenModel) -> nn.Module:
        half = self.config.dtype == "bfloat16"
        if self.mesh["shard"].size() == 1:  # asked to shard over one rank, FSDP1 would forget the replicas
            layout = {"sharding_strategy": ShardingStrategy.NO_SHARD}
        elif self.mesh.ndim == 2:
            layout = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": self.mesh}
        else:
            layout = {"sharding_strategy": ShardingStrategy.FULL_SHARD, "device_mesh": self.mesh}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*NO_SHARD.*")  # advises against FSDP for one rank
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in model.layers}),
                mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if half else None,
                device_id=self.device,
                use_orig_params=True,
                **layout,
            )

    def no_sync(self) -> AbstractContextManager[Any]:
        # In half precision FSDP1 would add gradients of micro-batches as they are; reduced ones it adds in float32.
        if self.config.dtype == "bfloat16":
            return nullcontext()
        return self.module.no_sync()

    def export_units(self) -> Iterator[tuple[str, Tensor]]:
        return self._gathered(gradients=False)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(on-disk name, full gradient) of every parameter that has one. Collective."""
        return self._gathered(gradients=True)

    def _gathered(self, gradients: bool) -> Iterator[tuple[str, Tensor]]:
        """Gathers one unit at a time; what is yielded is a copy, so it outlives the gathering."""
        units = {
            _clean(f"{name}." if name else ""): unit
            for name, unit in self.module.named_modules()
            if isinstance(unit, FullyShardedDataParallel)
        }
        for path, unit in units.items():
            below = tuple(other for other in units if other != path and other.startswith(path))
            copies = []
            with FullyShardedDataParallel.summon_full_params(
                unit, recurse=False, writeback=False, with_grads=gradients
            ):
                for inner, parameter in unit.named_parameters():
                    name = path + _clean(inner)
                    tensor = parameter.grad if gradients else parameter.detach()
                    if tensor is not None and not name.startswith(below):
                        copies.append((name, tensor.clone()))
            for name, tensor in copies:
                yield from on_disk_views(name, tensor)

    def sharded_state(self) -> dict[str, Any]:
        first = self._first_names()
        tensors = get_model_state_dict(self.module)
        state = {f"model.{name}": tensor for name, tensor in tensors.items() if first[name] == name}
        if self.optimizer is not None:
            slots = get_optimizer_state_dict(self.module, self.optimizer)["state"]
            for name, values in slots.items():
                state.update({f"optimizer.{name}.{slot}": value for slot, value in values.items()})
        return state

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        first = self._first_names()
        set_model_state_dict(self.module, {name: state[f"model.{first[name]}"] for name in first})
        if self.optimizer is None:
            return
        current = get_optimizer_state_dict(self.module, self.optimizer)
        for name, values in current["state"].items():
            current["state"][name] = {slot: state[f"optimizer.{name}.{slot}"] for slot in values}
        set_optimizer_state_dict(self.module, self.optimizer, current)

    def _first_names(self) -> dict[str, str]:
        """Name of a parameter -> the first name of the same one: tied weights stand once in a state."""
        named = self.module.named_parameters(remove_duplicate=False)
        first: dict[int, str] = {}
        return {_clean(name): first.setdefault(id(parameter), _clean(name)) for name, parameter in named}


def _clean(name: str) -> str:
    return name.replace(_WRAPPER, "")


@EngineRegistry.register(model_type="language_model", backend="fsdp", device=DEVICES)
class FSDP1LanguageModel(FSDP1Engine):
    """Log-probs and entropy."""

    model_type = "language_model"


@EngineRegistry.register(model_type="value_model", backend="fsdp", device=DEVICES)
class FSDP1ValueModel(FSDP1Engine):
    """Values."""

    model_type = "value_model"
