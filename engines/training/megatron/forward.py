"""One micro-batch through a part of the model: packed rows in, outputs of whole sequences out."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from engines.config import LayoutConfig
from engines.training.batch import Alignment, PackedBatch
from engines.training.log_probs import token_log_probs
from engines.training.megatron.attention import Packing
from engines.training.megatron.model import TokenModel
from engines.training.schedule import ModelOutputs


def pack(batch: PackedBatch, alignment: Alignment, device: torch.device) -> tuple[Packing, Tensor, int]:
    """Lay a micro-batch out over the ranks that share its sequences.

    Sequences are padded at their end, where a causal mask hides it; what is missing to a number of rows that the ranks can
    share is one more sequence.

    Returns:
        The packing, (tokens,) int64 on cpu: the padded row of each token, and the number of padded rows.
    """
    lengths = batch.lengths.tolist()
    padded = alignment.padded(lengths)
    if missing := alignment.rows(lengths) - sum(padded):
        padded = [*padded, missing]
    padded = torch.tensor(padded)
    cu_seqlens = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    starts = torch.repeat_interleave(cu_seqlens[: len(batch)], batch.lengths)
    own = torch.repeat_interleave(batch.cu_seqlens[:-1], batch.lengths)
    token_rows = starts + torch.arange(batch.num_tokens) - own
    rank = parallel_state.get_context_parallel_rank()
    return Packing.of(cu_seqlens, alignment.ranks, rank, device), token_rows, int(cu_seqlens[-1])


def hidden_states(
    model: torch.nn.Module,
    batch: PackedBatch,
    packing: Packing,
    token_rows: Tensor,
    size: int,
    balances_experts: bool = False,
) -> Tensor:
    """What this part of the model makes of the micro-batch: (local rows, 1, hidden).

    Args:
        size: rows of the padded micro-batch.
        balances_experts: there is an auxiliary loss, which padding must not count in.
    """
    input_ids = batch.tokens["input_ids"]
    padded = input_ids.new_full((size,), -1)
    padded[token_rows.to(input_ids.device)] = input_ids
    rows = padded[packing.rows][None]
    # Only a loss that balances experts looks at all rows; for every other, padding has weight 0.
    padding = {"padding_mask": rows < 0} if balances_experts and batch.num_tokens < size else {}
    return model(
        input_ids=rows.clamp(min=0),
        position_ids=packing.positions[None],
        attention_mask=None,
        packed_seq_params=packing,
        **padding,
    )


def outputs(
    model: TokenModel,
    hidden: Tensor,
    batch: PackedBatch,
    packing: Packing,
    token_rows: Tensor,
    size: int,
    layout: LayoutConfig,
    temperature: float,
    entropy: bool,
) -> ModelOutputs:
    """From the last part's hidden states to one number per token, on every rank that shares the sequences.

    Their backward passes keep, on each rank, what its own rows contributed.

    Args:
        hidden: (local rows, 1, hidden).
        token_rows: (tokens,) the padded row of each token.
    """
    is_value_model = model.head_weight().shape[0] == 1
    if layout.sequence_parallel:
        # Of a vocabulary each rank adds its part of the gradient; of values each has the whole of it.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not is_value_model)
    elif not is_value_model:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    rows, tokens = _local_predictors(batch, packing, token_rows, size)
    hidden = hidden[:, 0].index_select(0, rows)
    if is_value_model:
        known = {"values": (hidden @ model.head_weight().T)[:, 0].float()}
    else:
        group = parallel_state.get_tensor_model_parallel_group() if layout.tensor_parallel_size > 1 else None
        labels = batch.tokens["input_ids"][tokens]
        log_probs, entropies = token_log_probs(
            hidden, model.head_weight(), labels, temperature, entropy, group
        )
        known = {"log_probs": log_probs} | ({} if entropies is None else {"entropy": entropies})
    zeros = torch.zeros(batch.num_tokens, device=hidden.device)
    whole = {name: zeros.index_copy(0, tokens, field) for name, field in known.items()}
    if layout.context_parallel_size > 1:
        group = parallel_state.get_context_parallel_group()
        whole = {name: reduce_from_tensor_model_parallel_region(f, group=group) for name, f in whole.items()}
    return ModelOutputs(**whole)


def _local_predictors(
    batch: PackedBatch, packing: Packing, token_rows: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """(predicted tokens,) local rows that predict a token, and (predicted tokens,) which tokens those are."""
    predicted = torch.ones(batch.num_tokens, dtype=torch.bool)
    predicted[batch.cu_seqlens[:-1][batch.lengths > 0]] = False
    predicted = predicted.nonzero()[:, 0]
    device = packing.rows.device
    token_after = torch.full((size,), -1, device=device)
    token_after[(token_rows[predicted] - 1).to(device)] = predicted.to(device)
    tokens = token_after[packing.rows]
    rows = (tokens >= 0).nonzero()[:, 0]
    return rows, tokens[rows]
