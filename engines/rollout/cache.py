"""A key-value cache with room to grow, whose finished samples can leave."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """Keys and values in buffers with free positions at the end.

    The stock layer copies the whole cache for every new token; this one copies it once per ``reserve``, when rows
    are also dropped or repeated.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._buffers: list[Tensor] = []

    def reserve(self, rows: Tensor, room: int) -> None:
        """Keep the samples ``rows``, in that order (repeats allowed), with free space for ``room`` more tokens."""
        self._buffers = []
        for tensor in (self.keys, self.values):
            length = tensor.shape[-2]
            buffer = tensor.new_empty(len(rows), tensor.shape[1], length + room, tensor.shape[3])
            torch.index_select(tensor, 0, rows, out=buffer[:, :, :length])
            self._buffers.append(buffer)
        self._view(length)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object):
        """Append; falls back to the stock layer's copy when there is no room."""
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self._buffers or end > self._buffers[0].shape[-2]:
            self._buffers = []
            return super().update(key_states, value_states, *args, **kwargs)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        self._view(end)
        return self.keys, self.values

    def _view(self, length: int) -> None:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for a model of ``config``; layers without a window get room to grow."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def keep_rows(cache: DynamicCache, rows: Tensor, room: int) -> None:
    """Keep the samples ``rows`` in every layer, in that order, and make room for ``room`` more tokens."""
    for layer in cache.layers:
        if isinstance(layer, RoomyLayer):
            layer.reserve(rows, room)
        else:
            layer.batch_select_indices(rows)
