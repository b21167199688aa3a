"""The colocated transport: engine and replica share a process, so a weight is one copy in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from engines.rollout.base import BaseRollout
from engines.sync.base import CheckpointEngine


class NaiveCheckpointEngine(CheckpointEngine):
    """Copies each full tensor into the replica of the same process as it comes.

    Args:
        replica: the rollout replica of this process.
    """

    def __init__(self, replica: BaseRollout) -> None:
        self._replica = replica

    def transfer(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        stream: Iterator[tuple[str, Tensor]] = iter(weights)
        try:
            self._replica.update_weights(stream)
        finally:
            for _ in stream:  # a replica that refused must not leave the other ranks waiting in a gather
                pass
