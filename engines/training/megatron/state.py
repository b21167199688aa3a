"""Model and optimizer as blocks of whole tensors, under their on-disk names: what leaves a rank and comes back in any layout.

The optimizer's tensors have the parameters' shapes, so the same units address them. The distributed optimizer keeps, on each
data-parallel rank, a flat range of every parameter; its ranges are put together for saving and cut again after loading. Megatron's
own formats for that (``dp_reshardable``, ``fully_reshardable``) are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from engines.checkpoint.shards import Shard
from engines.training.megatron.mapping import Unit, units_of
from engines.training.megatron.model import TokenModel

SLOTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Held:
    """A parameter of this rank, what it consists of, and what the optimizer keeps of it."""

    parameter: nn.Parameter
    units: list[Unit]
    optimizer: MegatronOptimizer | None
    """The one of Megatron's chained optimizers that it belongs to; None in a model that is not trained."""

    def read(self, slot: str | None) -> Tensor:
        """The float32 weights (``slot`` None) or a tensor of the optimizer, whole over the data-parallel ranks. Collective there."""
        if self.optimizer is None:
            return self.parameter.detach()
        main = self._main
        source = (
            main if slot is None else self.optimizer.optimizer.state[main][slot] if main is not None else None
        )
        if not isinstance(self.optimizer, DistributedOptimizer):
            return source.detach()
        if slot is None and self.parameter.dtype == torch.float32:
            return self.parameter.detach()
        return self._put_together(source, 1 if slot == "step" else self.parameter.numel(), slot)

    def write(self, slot: str | None, whole: Tensor) -> None:
        """The reverse of ``read``; no collective."""
        if slot is None:
            self.parameter.detach().copy_(whole)
        if self.optimizer is None or (main := self._main) is None:
            return
        target = main if slot is None else self.optimizer.optimizer.state[main][slot]
        if slot != "step" and isinstance(self.optimizer, DistributedOptimizer):
            whole = whole.reshape(-1)[self._range]
        target.detach().copy_(whole.view(target.shape))

    def kept(self) -> list[Tensor]:
        """The optimizer's tensors on this rank, as large as what it steps."""
        if self.optimizer is None or (main := self._main) is None:
            return []
        return [tensor for tensor in self.optimizer.optimizer.state[main].values() if tensor.ndim]

    @property
    def _main(self) -> Tensor | None:
        """What the optimizer steps: the parameter, its float32 copy, or this rank's range of one of these."""
        optimizer = self.optimizer
        if isinstance(optimizer, DistributedOptimizer):
            place = optimizer.model_param_group_index_map.get(self.parameter)
            if place is None:
                return None
            group, number = place
            return optimizer.optimizer.param_groups[group]["params"][number]
        return getattr(self.parameter, "main_param", self.parameter)

    @property
    def _range(self) -> slice:
        found = self.optimizer._get_model_param_range_map(self.parameter)["param"]
        return slice(found.start, found.end)

    def _put_together(self, source: Tensor | None, elements: int, slot: str | None) -> Tensor:
        """Every element is on one rank; adding their bits to zeros changes none."""
        whole = torch.zeros(elements, device=self.parameter.device)
        if source is not None:
            where = slice(0, 1) if slot == "step" else self._range
            whole[where] = source.detach().reshape(-1).to(whole)
        bits = whole.view(torch.int32)
        operation = dist.ReduceOp.MAX if slot == "step" else dist.ReduceOp.SUM
        dist.all_reduce(bits, operation, self.optimizer.data_parallel_group)
        return whole.view(() if slot == "step" else self.parameter.shape)


class Weights:
    """All that this rank holds, and where everything else is."""

    def __init__(self, chunks: list[TokenModel], optimizer: MegatronOptimizer | None) -> None:
        """Collective."""
        optimizers = {}
        for part in optimizer.chained_optimizers if optimizer is not None else []:
            optimizers.update(dict.fromkeys(_parameters_of(part), part))
        self.held = [
            Held(parameter, units, optimizers.get(parameter)) for parameter, units in units_of(chunks)
        ]
        everywhere: list[Any] = [None] * dist.get_world_size()
        own = [(u.name, u.global_shape, u.slices, u.owned) for h in self.held for u in h.units]
        dist.all_gather_object(everywhere, own)
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Every tensor of the model, in the same order on all ranks."""
        self.owners: dict[str, list[tuple[int, tuple[slice, ...]]]] = {}
        """(rank, where its block lies) of the blocks that make up each tensor."""
        for rank, units in enumerate(everywhere):
            for name, shape, slices, owned in units:
                self.shapes[name] = shape
                if owned:
                    self.owners.setdefault(name, []).append((rank, slices))
        self.shapes = {name: self.shapes[name] for name in sorted(self.shapes, key=_natural)}

    def read_files(self, folder: Path, instead: dict[str, Tensor]) -> None:
        """Fill parameters and the optimizer's float32 weights from the safetensors files in ``folder``, this rank's blocks only.

        Args:
            instead: whole tensors that stand in no file.
        """
        from safetensors import safe_open

        with ExitStack() as opened:
            files = [
                opened.enter_context(safe_open(path, framework="pt"))
                for path in sorted(folder.glob("*.safetensors"))
            ]
            places = {name: file for file in files for name in file.keys()}  # noqa: SIM118, it is no mapping
            wanted = {unit.name for held in self.held for unit in held.units}
            if missing := wanted - places.keys() - instead.keys():
                raise KeyError(f"{folder}: no file holds {sorted(missing)[:3]} ({len(missing)} tensors)")
            for held in self.held:
                whole = torch.empty(held.parameter.shape, device=held.parameter.device)
                for unit in held.units:
                    stored = (
                        instead[unit.name] if unit.name in instead else places[unit.name].get_slice(unit.name)
                    )
                    unit.write(whole, stored[unit.slices])
                held.write(None, whole)

    def sharded(self) -> dict[str, Shard]:
        """``model.<name>``, and ``optimizer.<name>.<slot>`` of a model that is trained. Collective."""
        state: dict[str, Shard] = {}
        trained = any(held.optimizer is not None for held in self.held)
        for slot in (None, *SLOTS) if trained else (None,):
            for held in self.held:
                tensor = held.read(slot)
                for unit in held.units:
                    state[_key(unit.name, slot)] = _shard(unit, tensor, slot)
            for name, shape in self.shapes.items():
                if _key(name, slot) not in state:  # it is on other ranks
                    nothing = torch.zeros(()) if slot == "step" else torch.empty((0,) * len(shape))
                    whole = () if slot == "step" else shape
                    state[_key(name, slot)] = Shard(nothing, (0,) * len(whole), whole, owned=False)
        return state

    def load_sharded(self, state: dict[str, Shard]) -> None:
        """Take over what ``sharded`` gave, filled in place."""
        trained = any(held.optimizer is not None for held in self.held)
        for slot in (None, *SLOTS) if trained else (None,):
            for held in self.held:
                if slot == "step":
                    held.write(slot, state[_key(held.units[0].name, slot)].local)
                    continue
                whole = torch.empty(held.parameter.shape, device=held.parameter.device)
                for unit in held.units:
                    unit.write(whole, state[_key(unit.name, slot)].local)
                held.write(slot, whole)


def _shard(unit: Unit, tensor: Tensor, slot: str | None) -> Shard:
    if slot == "step":  # of each parameter its own, or the optimizer would count for all of them at once
        owned = unit.owned and not any(unit.offsets)
        return Shard(tensor.clone(), (), (), owned)
    return Shard(unit.read(tensor), unit.offsets, unit.global_shape, unit.owned)


def _key(name: str, slot: str | None) -> str:
    return f"model.{name}" if slot is None else f"optimizer.{name}.{slot}"


def _parameters_of(optimizer: MegatronOptimizer) -> Iterable[nn.Parameter]:
    if isinstance(optimizer, DistributedOptimizer):
        # All that lie in its buffers: of some, this rank has no range.
        return [parameter for buffer in optimizer.buffers for parameter in buffer.params]
    return _model_parameters(optimizer)


def _model_parameters(optimizer: MegatronOptimizer) -> Iterator[nn.Parameter]:
    groups = optimizer.optimizer.param_groups if optimizer.optimizer is not None else []
    for group in getattr(optimizer, "float16_groups", None) or [g["params"] for g in groups]:
        yield from group


def _natural(name: str) -> list[Any]:
    """Numbers in names count as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
