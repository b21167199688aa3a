"""Which tokens Clip-Cov and KL-Cov choose: once per mini-batch, from the log-probs of a pass without gradients.

cov_t = (log p_t - mean log p) (A_t - mean A), means over the mini-batch's loss tokens (Cui et al., The Entropy Mechanism of
Reinforcement Learning for Reasoning Language Models). Both functions take the whole mini-batch with
old_log_probs and advantages, and log_probs (tokens,), and return (tokens,) float32: 1 on what is chosen. ``noise`` is a
random number per token that came with the batch, so that no choice depends on the order of the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.training.batch import PackedBatch
from workflow.campaign.algorithm import AlgorithmConfig
from workflow.rl.losses.ratios import Ratios


def within_bounds(batch: PackedBatch, log_probs: Tensor, config: AlgorithmConfig) -> Tensor:
    """Clip-Cov: of the tokens with low < cov < high that ppo's clip leaves alone, those with the least ``noise``."""
    ratio, advantages = Ratios(log_probs, batch).ratio, batch.tokens["advantages"]
    clipped = ((ratio < 1 - config.clip_low) & (advantages < 0)) | ((ratio > 1 + config.clip_high) & (advantages > 0))  # fmt: skip
    covariance = covariances(batch, log_probs)
    able = (covariance > config.covariance.low) & (covariance < config.covariance.high) & ~clipped
    return _first((batch.tokens["noise"], covariance), able & _loss_tokens(batch), _count(batch, config))


def largest(batch: PackedBatch, log_probs: Tensor, config: AlgorithmConfig) -> Tensor:
    """KL-Cov: the loss tokens with the largest covariance; of equal ones those with the least ``noise``."""
    return _first(
        (-covariances(batch, log_probs), batch.tokens["noise"]), _loss_tokens(batch), _count(batch, config)
    )


def covariances(batch: PackedBatch, log_probs: Tensor) -> Tensor:
    """(tokens,) float32: the covariance of each loss token; meaningless on others."""
    chosen = _loss_tokens(batch)
    fields = log_probs.double(), batch.tokens["advantages"].double()
    centred = [field - (field[chosen].mean() if bool(chosen.any()) else 0) for field in fields]
    # Rounded, so that what is equal but for the means, whose sums depend on the order, is equal.
    return (centred[0] * centred[1]).float()


def _loss_tokens(batch: PackedBatch) -> Tensor:
    return batch.tokens["loss_mask"] > 0


def _count(batch: PackedBatch, config: AlgorithmConfig) -> int:
    return max(int(config.covariance.share * float(batch.tokens["loss_mask"].sum())), 1)


def _first(orders: Sequence[Tensor], able: Tensor, count: int) -> Tensor:
    """1 on the ``count`` tokens among those ``able`` that come first in ``orders[0]``; equal ones go by the next order."""
    places = able.nonzero().squeeze(-1)
    for order in reversed(orders):
        places = places[torch.argsort(order[places], stable=True)]
    selected = torch.zeros(able.shape)
    selected[places[:count]] = 1.0
    return selected
