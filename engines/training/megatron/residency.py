"""Host memory for what is not in use: storages are emptied and refilled, so every view of them stays what it is.

Megatron's parameters, gradients and the ranges that a distributed optimizer steps are views of a few large buffers; moving them
one by one would break them apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Parked:
    """Storages whose content waits in host memory."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Empty the storages of ``tensors``, each once; using the tensors before ``bring_back`` is an error."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._held: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages.values():
            if storage.nbytes():
                self._held.append(
                    (storage, storage.cpu() if storage.device.type != "cpu" else storage.clone())
                )
                storage.resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes that wait."""
        return sum(copy.nbytes() for _, copy in self._held)

    def bring_back(self) -> None:
        """Refill the storages."""
        for storage, copy in self._held:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._held = []
