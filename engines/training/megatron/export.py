"""Weights out of all ranks: whole tensors under their on-disk names, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from engines.training.megatron.state import Weights


def export_units(
    weights: Weights, device: torch.device, scope: Callable[[], AbstractContextManager[None]]
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole float32 tensor), in the same order on all ranks: each block goes from its owner to everybody. Collective.

    Args:
        scope: of Megatron on the device; left whenever a tensor is handed over.
    """
    rank = dist.get_rank()
    places = {unit.name: (held, unit) for held in weights.held for unit in held.units}
    fused: tuple[object, Tensor] | None = (
        None  # the parameter last read, which the next names are parts of too
    )
    for name, shape in weights.shapes.items():
        with scope(), torch.no_grad():
            block = None
            if name in places:
                held, unit = places[name]
                if fused is None or fused[0] is not held:
                    fused = (held, held.read(None))
                block = unit.read(fused[1])
            whole = torch.empty(shape, device=device)
            for owner, slices in weights.owners[name]:
                piece = block if owner == rank else torch.empty(whole[slices].shape, device=device)
                piece = piece.contiguous().to(whole)
                if dist.get_world_size() > 1:
                    dist.broadcast(piece, owner)
                whole[slices] = piece
        yield name, whole
