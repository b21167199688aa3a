"""In which order a run sees its problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.streams import stream_key


@dataclass
class DataCursor:
    """Walks through the problems epoch by epoch, each epoch in an order of its own.

    An epoch's order depends on the run, the epoch and the problems' digests only. A step that is larger than what is
    left of an epoch goes on into the next one: no problem is dropped and none comes twice in an epoch.
    """

    run: str
    digests: Sequence[str] = field(repr=False)
    epoch: int = 0
    position: int = 0
    _orders: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)
    """Of the epoch that the cursor is in: making it anew for every step would cost a hash per problem."""

    def take(self, count: int) -> list[int]:
        """Indices of the next ``count`` problems; moves the cursor."""
        taken: list[int] = []
        while len(taken) < count:
            if self.position == len(self.digests):
                self.epoch, self.position = self.epoch + 1, 0
            piece = self._order(self.epoch)[self.position : self.position + count - len(taken)]
            self.position += len(piece)
            taken += piece
        return taken

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            keys = [stream_key(self.run, "epoch", epoch, digest) for digest in self.digests]
            self._orders = {epoch: sorted(range(len(keys)), key=keys.__getitem__)}
        return self._orders[epoch]

    def state(self) -> dict[str, Any]:
        """JSON state."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.epoch, self.position = state["epoch"], state["position"]
