"""Causal attention inside each sequence of a packed batch, for transformers models.

Registered under the name ``baton_packed``. transformers builds no mask for a name it does not know, and hands keyword
arguments of the model call through to the attention, so the layout of the sequences travels with the call: no state is shared
between models.

Segments of similar lengths are padded on the right into one batch. A causal mask already hides what stands on the right, so
padding needs no mask and changes nothing. Where torch's variable-length kernel serves (CUDA, half precision), it takes the
packed form as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from engines.training.ulysses import SequenceGroup

NAME = "baton_packed"

PADDING = 1.12
"""A segment joins a group while the group's longest is at most so many times as long; "+ SLACK" for short ones."""
SLACK = 4


class Segments:
    """Where the sequences of one micro-batch stand, and how attention groups them. Made once, used by every layer."""

    def __init__(self, cu_seqlens: Tensor, device: torch.device, shared: SequenceGroup | None = None) -> None:
        """
        Args:
            cu_seqlens: (num_sequences + 1,) int64 on cpu.
            device: of the activations.
            shared: the ranks that share the tokens, each with all of them inside attention only. What is appended so that the
                shares are equal is a sequence of its own.
        """
        self.shared = shared
        if shared is not None and (padding := shared.padding(int(cu_seqlens[-1]))):
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + padding])
        lengths = cu_seqlens.diff()
        self.longest = int(lengths.max())
        self.cu_seqlens = cu_seqlens.to(device, torch.int32)
        self.groups: list[tuple[int, int]] = []  # (segments, padded length)
        order = torch.argsort(lengths, descending=True, stable=True)
        rows, inverse, filled = [], torch.empty(int(cu_seqlens[-1]), dtype=torch.int64), 0
        for members in _similar(lengths[order].tolist(), order.tolist()):
            count, length = len(members), int(lengths[members[0]])
            position = torch.arange(length).expand(count, length)
            valid = position < lengths[members][:, None]
            token = torch.where(valid, position + cu_seqlens[members][:, None], cu_seqlens[members][:, None])
            inverse[token[valid]] = (torch.arange(count * length).view(count, length) + filled)[valid]
            rows.append(token.flatten())
            self.groups.append((count, length))
            filled += count * length
        self.identity = filled == len(inverse) and torch.equal(inverse, torch.arange(filled))
        self.index = torch.cat(rows).to(device)  # (padded rows,): the token in each padded row
        self.inverse = inverse.to(device)  # (tokens,): the padded row of each token

    def pad(self, packed: Tensor) -> Tensor:
        """(tokens, heads, dim) -> (padded rows, heads, dim)"""
        return packed if self.identity else _Pad.apply(packed, self.index, self.inverse)

    def unpad(self, padded: Tensor) -> Tensor:
        """(padded rows, heads, dim) -> (tokens, heads, dim)"""
        return padded if self.identity else _Unpad.apply(padded, self.inverse)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    segments: Segments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (1, heads, tokens, dim), key and value (1, kv heads, tokens, dim).

    Returns:
        (1, tokens, heads, dim), and None for the attention weights.
    """
    if segments is None:
        raise ValueError(f"attention {NAME!r} needs segments= in the model call")
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # (tokens, heads, dim)
    if segments.shared is None:
        return _attend(packed, segments, scaling, dropout).unsqueeze(0), None
    output = _attend(list(segments.shared.exchange(*packed)), segments, scaling, dropout)
    return segments.shared.restore(output).unsqueeze(0), None


def _attend(packed: list[Tensor], segments: Segments, scaling: float, dropout: float) -> Tensor:
    """Query, key and value (tokens, heads, dim) -> (tokens, heads, dim)."""
    query = packed[0]
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _variable_length(packed, segments, scaling)
    sizes = [count * length for count, length in segments.groups]
    padded = [segments.pad(tensor).split(sizes) for tensor in packed]
    outputs = []
    for (count, length), *group in zip(segments.groups, *padded, strict=True):
        q, k, v = (tensor.unflatten(0, (count, length)).transpose(1, 2) for tensor in group)
        output = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return segments.unpad(joined)


def register() -> None:
    """Make ``attn_implementation="baton_packed"`` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def _similar(lengths: list[int], order: list[int]) -> list[list[int]]:
    """Neighbours in descending order of length, grouped so that little padding is needed."""
    groups: list[list[int]] = []
    longest = 0
    for length, sequence in zip(lengths, order, strict=True):
        if groups and longest <= PADDING * length + SLACK:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
            longest = length
    return groups


def _variable_length(packed: list[Tensor], segments: Segments, scaling: float) -> Tensor:
    """One kernel for all segments."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = segments.cu_seqlens, segments.longest
    causal = (-1, 0)
    return varlen_attn(
        *packed, bounds, bounds, longest, longest, scale=scaling, window_size=causal, enable_gqa=True
    )


class _Pad(torch.autograd.Function):
    """Every token stands in exactly one padded row, so the gradient is a gather too."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return packed.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """Padded rows were never read, so their gradient is 0."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.rows = padded.shape[0]
        return padded.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        padded = gradient.new_zeros(ctx.rows, *gradient.shape[1:])
        return padded.index_copy_(0, ctx.saved_tensors[0], gradient), None
