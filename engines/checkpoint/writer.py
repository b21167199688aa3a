"""A rank's part of a state, copied at once and written while the training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.checkpoint.index import ShardIndex
from engines.checkpoint.shards import Shard, owned_blocks, write_blocks


class ShardWriter:
    """Writes one role's part on one rank, in a thread, one state at a time.

    A thread is enough: what takes time (writing, fsync) is done without the interpreter's lock. The copies are in host memory, as
    large as what this rank writes, and that memory is kept for the next state: it would cost more to be given it than to copy.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._copies: dict[str, Tensor] = {}
        self._writing: Future[None] | None = None

    def write(
        self,
        folder: Path,
        rank: int,
        tensors: Mapping[str, Tensor | DTensor | Shard],
        scalars: dict[str, Any],
    ) -> ShardIndex:
        """Like :func:`engines.checkpoint.shards.write_shards`, but the file appears later. The tensors may change at once.

        Raises:
            StateError, OSError: the state before could not be written.
        """
        self.check(wait=True)
        index, blocks = owned_blocks(rank, tensors, scalars)
        copies = {name: self._copy(name, block) for name, block in blocks.items()}
        self._writing = self._thread.submit(write_blocks, folder, rank, copies)
        return index

    def check(self, wait: bool = False) -> None:
        """Raise, once, what kept the file from being written; with ``wait``, not before it is there.

        Raises:
            StateError, OSError: it could not be written.
        """
        if self._writing is not None and (wait or self._writing.done()):
            writing, self._writing = self._writing, None
            writing.result()

    def _copy(self, name: str, block: Tensor) -> Tensor:
        kept = self._copies.get(name)
        if kept is None or (kept.shape, kept.dtype) != (block.shape, block.dtype):
            kept = self._copies[name] = torch.empty(block.shape, dtype=block.dtype, device="cpu")
        return kept.copy_(block)
