"""Causal attention inside each sequence of a packed micro-batch, under context parallelism too.

Megatron's own core attention knows neither packing nor context parallelism without Transformer Engine. This one takes the
place of it in every layer, on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from engines.training.packed_attention import Segments, packed_attention


@dataclass
class Packing(PackedSeqParams):
    """How the rows of a micro-batch lie on this rank. Travels with the model call, so models share no state.

    With context parallelism of size c each sequence is padded to a multiple of 2c and cut into as many chunks; rank r holds
    chunks r and 2c - 1 - r of every sequence, so that all ranks have equally much to attend to.
    """

    rows: Tensor | None = None
    """(local rows,) int64: which row of the padded micro-batch each of this rank's rows is."""
    positions: Tensor | None = None
    """(local rows,) int64: position of each local row in its sequence."""
    segments: Segments | None = None
    """The sequences, where they are whole."""
    order: Tensor | None = None
    """(padded rows,) int64: where each row stands among the rows of all ranks, one rank after the other."""
    chunks: list[tuple[slice, slice, Tensor]] | None = None
    """Of each local chunk: its local rows, the padded rows it may attend to, and which of them by row (chunk, keys) bool."""

    @classmethod
    def of(cls, cu_seqlens: Tensor, size: int, rank: int, device: torch.device) -> Packing:
        """
        Args:
            cu_seqlens: (num_sequences + 1,) int64 on cpu, of padded sequences.
            size: of context parallelism.
            rank: in it.
        """
        total = int(cu_seqlens[-1])
        starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
        positions = torch.arange(total) - starts
        if size == 1:
            rows = torch.arange(total)
            segments = Segments(cu_seqlens, device)
            return cls("packed", rows=rows.to(device), positions=positions.to(device), segments=segments)
        by_rank = [_rows_of(cu_seqlens, size, other) for other in range(size)]
        order = torch.empty(total, dtype=torch.int64)
        order[torch.cat(by_rank)] = torch.arange(total)
        return cls(
            "packed",
            rows=by_rank[rank].to(device),
            positions=positions[by_rank[rank]].to(device),
            order=order.to(device),
            chunks=_chunks_of(cu_seqlens, size, rank, device),
        )


class PackedCoreAttention(nn.Module):
    """Megatron's core attention: queries, keys and values (rows, 1, heads, dim) -> (rows, 1, heads x dim)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Packing | None = None,
    ) -> Tensor:
        packing = packed_seq_params
        dropout = self.dropout if self.training else 0.0
        if packing.segments is not None:
            whole = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            output, _ = packed_attention(
                self, *whole, None, self.scale, dropout=dropout, segments=packing.segments
            )
            return output[0].flatten(1).unsqueeze(1)
        group = parallel_state.get_context_parallel_group()
        key, value = (
            gather_from_sequence_parallel_region(tensor.contiguous(), group=group)
            .squeeze(1)
            .index_select(0, packing.order)
            for tensor in (key, value)
        )
        outputs = [
            self._attend(query[own, 0], key[known], value[known], mask, dropout)
            for own, known, mask in packing.chunks
        ]
        return torch.cat(outputs).flatten(1).unsqueeze(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
        """Each (rows, heads, dim)."""
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.scale, dropout_p=dropout, enable_gqa=grouped
        )
        return output[0].transpose(0, 1)


def _chunk_bounds(cu_seqlens: Tensor, size: int, rank: int) -> list[tuple[int, int, int]]:
    """(first row of the sequence, first row of the chunk, first row after it) of this rank's chunks, in order."""
    bounds = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        length = (end - start) // (2 * size)
        for chunk in (rank, 2 * size - 1 - rank):
            bounds.append((start, start + chunk * length, start + (chunk + 1) * length))
    return bounds


def _rows_of(cu_seqlens: Tensor, size: int, rank: int) -> Tensor:
    return torch.cat([torch.arange(first, last) for _, first, last in _chunk_bounds(cu_seqlens, size, rank)])


def _chunks_of(
    cu_seqlens: Tensor, size: int, rank: int, device: torch.device
) -> list[tuple[slice, slice, Tensor]]:
    chunks, filled = [], 0
    for start, first, last in _chunk_bounds(cu_seqlens, size, rank):
        visible = torch.arange(start, last)[None] <= torch.arange(first, last)[:, None]
        chunks.append((slice(filled, filled + last - first), slice(start, last), visible.to(device)))
        filled += last - first
    return chunks
