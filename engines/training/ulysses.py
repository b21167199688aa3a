"""Sequence parallelism by exchanging heads for tokens (Jacobs et al., DeepSpeed Ulysses, 2023, section 3).

Each rank of a group works on its share of the tokens; only attention needs them all. Before it, every rank sends each other
rank the heads that are that one's and receives all tokens of its own; after it, the other way round. So attention is computed
exactly as on one rank, for fewer heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """Ranks that share the tokens of the same micro-batch, in consecutive shares of equal size."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def padding(self, tokens: int) -> int:
        """Tokens to append so that the shares are equal."""
        return -tokens % self.size

    def share(self, tokens: Tensor) -> Tensor:
        """This rank's rows of a tensor (tokens, ...) whose number of rows ``size`` divides."""
        return tokens.chunk(self.size)[self.rank]

    def gather(self, share: Tensor) -> Tensor:
        """(tokens / size, ...) of each rank -> (tokens, ...) on all.

        Every rank goes on to compute the same loss of it, so the backward pass keeps this rank's rows and adds nothing.
        """
        return _Gather.apply(share, self)

    def exchange(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens / size, heads, dim) each -> (tokens, heads / size, dim); key and value heads are repeated where they do not divide."""
        copies = math.lcm(key.shape[1], self.size) // key.shape[1]
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        return tuple(_Exchange.apply(tensor, self, True) for tensor in (query, key, value))

    def restore(self, output: Tensor) -> Tensor:
        """(tokens, heads / size, dim) -> (tokens / size, heads, dim): undoes :meth:`exchange`."""
        return _Exchange.apply(output, self, False)


def _heads_for_tokens(tensor: Tensor, group: SequenceGroup) -> Tensor:
    by_rank = tensor.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group.group)
    return received.flatten(0, 1)


def _tokens_for_heads(tensor: Tensor, group: SequenceGroup) -> Tensor:
    by_rank = tensor.unflatten(0, (group.size, -1)).contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group.group)
    return received.transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """The gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: SequenceGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return (_heads_for_tokens if to_heads else _tokens_for_heads)(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (_tokens_for_heads if ctx.to_heads else _heads_for_tokens)(gradient, ctx.group), None, None


class _Gather(torch.autograd.Function):
    """See :meth:`SequenceGroup.gather`."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        gathered = share.new_empty(group.size * share.shape[0], *share.shape[1:])
        dist.all_gather_into_tensor(gathered, share.contiguous(), group=group.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.share(gradient), None
