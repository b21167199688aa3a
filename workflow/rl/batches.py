"""From prompts and responses to the batch that an iteration works on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from engines.rollout.base import Response
from engines.training.batch import PackedBatch


def rollout_batch(
    prompts: Sequence[list[int]], responses: Sequence[Response], groups: Sequence[int]
) -> PackedBatch:
    """Prompt and response of each sample, end to end.

    Fields: input_ids; loss_mask, 1 on the response; rollout_log_probs, 0 on the prompt; per sequence group.
    """
    ids, mask, log_probs = [], [], []
    for prompt, response in zip(prompts, responses, strict=True):
        before, written = [0.0] * len(prompt), len(response.token_ids)
        ids.append(torch.tensor(prompt + response.token_ids))
        mask.append(torch.tensor(before + [1.0] * written))
        log_probs.append(torch.tensor(before + response.log_probs))
    return PackedBatch.from_sequences(
        {"input_ids": ids, "loss_mask": mask, "rollout_log_probs": log_probs},
        {"group": torch.tensor(groups)},
    )


def demonstration_batch(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> PackedBatch:
    """Prompt and demonstrated answer of each example. Fields: input_ids; loss_mask, 1 on the answer."""
    ids = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    mask = [
        torch.tensor([0.0] * len(prompt) + [1.0] * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return PackedBatch.from_sequences({"input_ids": ids, "loss_mask": mask}, {})


def border(batch: PackedBatch, *fields: str) -> TensorDict:
    """What a worker needs: the named per-token fields besides input_ids and loss_mask, in the border format."""
    names = ("input_ids", "loss_mask", *fields)
    return PackedBatch({name: batch.tokens[name] for name in names}, {}, batch.cu_seqlens).to_tensordict()


def per_sequence_sum(field: Tensor, batch: PackedBatch) -> Tensor:
    """(sequences,) float64: a per-token field summed over the loss tokens of each sequence."""
    rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    weighted = field.double() * batch.tokens["loss_mask"]
    return torch.zeros(len(batch), dtype=torch.float64).index_add_(0, rows, weighted)


def on_last_loss_token(values: Tensor, batch: PackedBatch) -> Tensor:
    """(tokens,) float64 with a sequence's value on its last loss token; a sequence without one loses it."""
    mask = batch.tokens["loss_mask"] > 0
    rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    placed = torch.zeros(batch.num_tokens, dtype=torch.float64)
    tokens = mask.nonzero().squeeze(-1)
    last = torch.full((len(batch),), -1).scatter_reduce_(0, rows[tokens], tokens, "amax")
    given = last >= 0
    placed[last[given]] = values[given].double()
    return placed
