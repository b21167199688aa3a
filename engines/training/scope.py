"""Where a rank stands, and when which parts of its engine are on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from engines.training.batch import NO_PADDING, Alignment
from engines.training.errors import OffloadedPartError

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


class Parking:
    """Which parts of an engine wait in host memory. It moves them with the engine's hook ``move``."""

    def __init__(self, engine: BaseEngine) -> None:
        self.engine = engine
        self.parked: set[str] = set()

    @property
    def configured(self) -> list[str]:
        """What waits outside of scopes."""
        offload = self.engine.config.offload
        return ["model"] * offload.parameters + ["optimizer", "grad"] * offload.optimizer

    def park(self, parts: Iterable[str]) -> None:
        """Put those of ``parts`` that are on the device into host memory."""
        self._move(set(parts) - self.parked, torch.device("cpu"))

    def bring_back(self, parts: Iterable[str]) -> None:
        """Put those of ``parts`` that are parked onto the device."""
        self._move(set(parts) & self.parked, self.engine.device)

    def require(self, *parts: str) -> None:
        """
        Raises:
            OffloadedPartError: one of ``parts`` is parked.
        """
        parked = [part for part in parts if part in self.parked]
        if parked:
            raise OffloadedPartError(
                f"{' and '.join(parked)} of this engine wait in host memory: enter train_mode() or eval_mode(), "
                f"or call to('device'), before using them"
            )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Scope with everything on the device."""
        parked = set(self.parked)
        self.bring_back(parked)
        try:
            yield
        finally:
            self.park(parked)

    def _move(self, parts: set[str], target: torch.device) -> None:
        if parts:
            self.engine.move(target, **{part: part in parts for part in PARTS})
            self.parked ^= parts


class BaseEngineCtx:
    """Scope of ``train_mode()`` or ``eval_mode()``: brings back what is parked, and parks on exit what it brought back.

    Scopes nest: an inner one finds everything in place, so it moves nothing.
    """

    def __init__(self, engine: BaseEngine, training: bool) -> None:
        self.engine = engine
        self.training = training

    def __enter__(self) -> BaseEngine:
        engine, parking = self.engine, self.engine.parking
        wanted = PARTS if self.training else ("model",)
        self.brought = [part for part in wanted if part in parking.parked and part in parking.configured]
        parking.bring_back(self.brought)
        self.outer = engine._mode
        engine._set_mode("train" if self.training else "eval")
        return engine

    def __exit__(self, *exception: object) -> None:
        if self.training:
            self.engine.zero_grad()
        self.engine._set_mode(self.outer)
        self.engine.parking.park(self.brought)
