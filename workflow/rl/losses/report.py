"""Metrics of a micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.training.schedule import Metrics


def over_loss_tokens(fields: dict[str, Tensor], mask: Tensor) -> Metrics:
    """(sum, count) of each field over the loss tokens; one transfer from the device for all of them."""
    stacked = torch.stack([mask, *(field.detach() * mask for field in fields.values())]).double().sum(dim=-1)
    count, *sums = stacked.tolist()
    return {name: (total, count) for name, total in zip(fields, sums, strict=True)}
