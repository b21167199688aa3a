"""Estimators that follow rewards through time: GAE, REINFORCE++, ReMax."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.training.batch import PackedBatch
from workflow.campaign.algorithm import AlgorithmConfig
from workflow.rl.advantages.steps import Steps, checked_rewards, whiten


def gae(batch: PackedBatch, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Generalized advantage estimation over the loss tokens of each sequence.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1}; both are 0 after the last token
    (Schulman et al., High-Dimensional Continuous Control Using GAE, equations 11 and 16). ``t + 1`` is the next loss token.
    ``returns`` are advantages + values; advantages are then whitened over the batch when ``normalize_by_std``.
    """
    mask, rewards = batch.tokens["loss_mask"], checked_rewards(batch)
    steps = Steps(mask, batch.cu_seqlens)
    reward, value = steps.matrix(rewards), steps.matrix(batch.tokens["old_values"])
    advantage = torch.zeros_like(reward)
    following_value = following = torch.zeros(reward.shape[0], dtype=torch.float64)
    # Rows are filled from the left, so a row's cells beyond its end hold 0 and stay 0.
    for t in reversed(range(reward.shape[1])):
        delta = reward[:, t] + config.gamma * following_value - value[:, t]
        following = (delta + config.gamma * config.gae_lambda * following) * steps.filled[:, t]
        following_value = value[:, t]
        advantage[:, t] = following
    advantages, returns = steps.flat(advantage), steps.flat((advantage + value) * steps.filled)
    if config.normalize_by_std:
        advantages = whiten(advantages, mask)
    return {"advantages": advantages, "returns": returns}


def reinforce_plus_plus(batch: PackedBatch, config: AlgorithmConfig) -> dict[str, Tensor]:
    """A_t = (G_t - mean) / standard deviation over the batch's loss tokens, with G_t = r_t + gamma G_{t+1}.

    (Hu, REINFORCE++, section 3: no critic, and no group.) ``t + 1`` is the next loss token. A batch of one loss token, or of
    equal returns, gets 0.
    """
    mask, rewards = batch.tokens["loss_mask"], checked_rewards(batch)
    steps = Steps(mask, batch.cu_seqlens)
    return {"advantages": whiten(steps.flat(steps.returns(rewards, config.gamma)), mask)}


def remax(batch: PackedBatch, config: AlgorithmConfig) -> dict[str, Tensor]:
    """A_t = r_t + r_{t+1} + ... - score of the greedy response to the same prompt.

    (Li et al., ReMax, algorithm 1.) A prompt with one sample, and one whose samples are all alike, still has the greedy
    response to be compared with.
    """
    steps = Steps(batch.tokens["loss_mask"], batch.cu_seqlens)
    advantage = (steps.returns(checked_rewards(batch)) - batch.sequences["baseline"][:, None]) * steps.filled
    return {"advantages": steps.flat(advantage)}
