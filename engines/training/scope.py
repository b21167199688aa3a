"""Where a rank stands, and when which parts of its engine are on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from engines.training.batch import NO_PADDING, Alignment

if TYPE_CHECKING:
    from engines.training.base import BaseEngine

PARTS = ("model", "optimizer", "grad")
"""What can wait in host memory."""


@dataclass(frozen=True)
class Topology:
    """Where this rank stands. A backend sets it in ``build``."""

    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    data_parallel_group: dist.ProcessGroup | None = None
    """None when data_parallel_size is 1."""
    is_source: bool = True
    """Whether this rank returns outputs and metrics for its share of the data."""
    micro_batch_multiple: int = 1
    """The number of micro-batches is a multiple of this (interleaved pipelines)."""
    alignment: Alignment = NO_PADDING
    """How micro-batches are padded and shared."""
    sharing_rank: tuple[int, ...] = ()
    """Where this rank stands among those with the same share of the data, of which it holds other heads, layers or rows; () is the first."""


class BaseEngineCtx:
    """Scope of ``train_mode()`` or ``eval_mode()``: brings back what is parked, and parks on exit what it brought back.

    Scopes nest: an inner one finds everything in place, so it moves nothing.
    """

    def __init__(self, engine: BaseEngine, training: bool) -> None:
        self.engine = engine
        self.training = training

    def __enter__(self) -> BaseEngine:
        engine = self.engine
        wanted = PARTS if self.training else ("model",)
        self.brought = [
            part for part in wanted if part in engine._parked and part in engine._offloaded_by_config
        ]
        engine._relocate("device", self.brought)
        self.outer = engine._mode
        engine._set_mode("train" if self.training else "eval")
        return engine

    def __exit__(self, *exception: object) -> None:
        if self.training:
            self.engine.zero_grad()
        self.engine._set_mode(self.outer)
        self.engine._relocate("cpu", self.brought)
