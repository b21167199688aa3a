"""What a policy loss is made of: how much likelier each token has become."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engines.training.batch import PackedBatch
from workflow.rl.kl import MAX_LOG_RATIO


@dataclass(frozen=True)
class Ratios:
    """Of one micro-batch, which holds whole sequences. All (tokens,)."""

    log_probs: Tensor
    """Of the policy that learns; differentiable."""
    batch: PackedBatch
    """With old_log_probs, advantages, loss_mask and, for losses that choose tokens, selected (0 or 1)."""

    @property
    def advantages(self) -> Tensor:
        """How much better than expected each token was."""
        return self.batch.tokens["advantages"]

    @property
    def selected(self) -> Tensor:
        """1 on the tokens that the loss's selection chose from the whole mini-batch."""
        return self.batch.tokens["selected"]

    @cached_property
    def log_ratio(self) -> Tensor:
        """log p - log p_old, bounded, so that its exponential is finite."""
        difference = self.log_probs - self.batch.tokens["old_log_probs"]
        return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @cached_property
    def ratio(self) -> Tensor:
        """p / p_old."""
        return self.log_ratio.exp()

    def sequence_mean(self, field: Tensor) -> Tensor:
        """The mean of ``field`` over the loss tokens of each token's sequence; 0 in a sequence without any."""
        mask, lengths = self.batch.tokens["loss_mask"], self.batch.lengths
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(mask.device)
        sums = mask.new_zeros(2, len(lengths)).index_add(1, rows, torch.stack([field * mask, mask]))
        return (sums[0] / sums[1].clamp(min=1))[rows]
