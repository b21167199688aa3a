"""How weights get from the ranks of a training engine into rollout replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor


class CheckpointEngine(ABC):
    """One end of a transport of weights."""

    @abstractmethod
    def transfer(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Deliver a full set of weights to the replicas.

        Args:
            weights: (on-disk Hugging Face name, full tensor), e.g. ``TrainingWorker.weights()``. It is read to its end
                even when this rank delivers nothing, because reading it is collective over the engine's ranks.

        Raises:
            RolloutError: the weights do not fit a replica; it refuses to generate until a transfer succeeds.
        """
