"""Attention for decoding with grouped queries, registered with transformers under ``NAME``.

With one new token per sample, the query heads that share a key-value head can stand as so many query positions: no
causality separates them. The stock function instead repeats the whole cache for every query head as soon as a
padding mask is there.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "grouped_decode"


def grouped_decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention output (batch, new tokens, heads, head size).

    Args:
        query: (batch, heads, new tokens, head size).
        key, value: (batch, key-value heads, all tokens, head size).
        attention_mask: None, or broadcastable to (batch, heads, new tokens, all tokens), equal for all heads.
    """
    if query.shape[2] > 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, heads, _, size = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], size)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, grouped_decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
