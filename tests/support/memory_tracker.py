"""The memory of tensors, followed operation by operation: what a rank holds, and the most that it ever held."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """Scope in which every storage that an operation of this thread makes is counted while it lives; each counts once.

    What a kernel needs inside itself is not seen, as on a device's allocator it would be.
    """

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        """
        Args:
            there: tensors that exist already.
        """
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0
        """Bytes."""
        self.add(there)

    def add(self, tensors: Iterable[Any]) -> None:
        """Count the storages of ``tensors`` (of a DTensor, the local one)."""
        for tensor in tensors:
            tensor = getattr(tensor, "_local_tensor", tensor)
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.held)

    @property
    def held(self) -> int:
        """Bytes of all storages that live now; a storage may have been emptied or filled since the last operation."""
        living = {key: storage for key, ref in self._storages.items() if (storage := ref()) is not None}
        self._storages = {key: self._storages[key] for key in living}
        return sum(storage.nbytes() for storage in living.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.add(tree_leaves(made))
        return made
