"""Estimators that compare the samples of a prompt. Every token of a response has the response's advantage.

In all of them a group of one, and a group of equal scores, gets 0: there is nothing to compare (what is whitened
afterwards is shifted with all others). A rejected sample counts neither in its group's statistics nor in its size.
"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor

from engines.training.batch import PackedBatch
from workflow.campaign.algorithm import AlgorithmConfig
from workflow.rl.advantages.steps import EPSILON, Groups, whiten


def grpo(batch: PackedBatch, config: AlgorithmConfig) -> dict[str, Tensor]:
    """A = (score - mean of the group) / standard deviation of the group.

    (Shao et al., DeepSeekMath, section 4.1.2; unbiased standard deviation. Without the division, ``normalize_by_std=false``:
    Liu et al., Understanding R1-Zero-Like Training, section 3.2.)
    """
    groups = Groups(batch)
    return {"advantages": groups.on_tokens(_normalized(groups.centred, groups, config)).float()}


def rloo(batch: PackedBatch, config: AlgorithmConfig) -> dict[str, Tensor]:
    """A = score - mean of the other samples' scores (Ahmadian et al., Back to Basics, section 3.3, leave-one-out)."""
    groups = Groups(batch)
    others = (groups.sum(groups.scores) - groups.scores) / (groups.size - 1).clamp(min=1)
    return {"advantages": groups.on_tokens(groups.scores - others).float()}


def opo(batch: PackedBatch, config: AlgorithmConfig) -> dict[str, Tensor]:
    """A = score - sum_i l_i score_i / sum_i l_i over the group, with l the response's loss tokens.

    (Hao et al., On-Policy RL with Optimal Reward Baseline, section 3.2: the baseline of least variance.)
    """
    groups = Groups(batch)
    weighted = groups.sum(groups.lengths * groups.scores) / groups.sum(groups.lengths).clamp(min=1)
    return {"advantages": groups.on_tokens(groups.scores - weighted).float()}


def gpg(batch: PackedBatch, config: AlgorithmConfig) -> dict[str, Tensor]:
    """A = alpha (score - mean of the group), alpha = B / (B - M): of B samples, M are in groups of equal scores.

    (Chu et al., GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, section 3.) What the M samples
    cannot contribute is made up for. A batch of such groups alone gets 0.
    """
    groups = Groups(batch)
    able = (groups.counted * groups.differ).sum()
    alpha = groups.counted.sum() / able.clamp(min=1)
    return {"advantages": groups.on_tokens(alpha * groups.centred).float()}


def reinforce_plus_plus_baseline(batch: PackedBatch, config: AlgorithmConfig) -> dict[str, Tensor]:
    """A = score - mean of the group, shifted and scaled to mean 0 and standard deviation 1 over the batch's loss tokens.

    (Hu, REINFORCE++, section 3, the variant with a baseline for several samples of a prompt.) A group that has nothing to
    compare enters the batch's statistics with 0.
    """
    groups = Groups(batch)
    return {"advantages": whiten(groups.on_tokens(groups.centred), batch.tokens["loss_mask"])}


def pass_at_k(batch: PackedBatch, config: AlgorithmConfig) -> dict[str, Tensor]:
    """A = mean over all sets S of ``pass_k`` samples of the prompt that hold this one of (max S - max of S without it).

    What a sample adds to the best of k, with the others as its baseline (Tang et al., Optimizing Language Models for
    Inference Time Objectives using RL, section 3; over all sets: Walder and Karkhanis, Pass@K Policy Optimization). A sample
    adds score - score_j where j is the best of the others and is worse; of the C(n - 1, k - 1) sets of others,
    C(rank of j, k - 2) have it as their best. Divided by the group's standard deviation when ``normalize_by_std``. Where
    rejections leave fewer than k samples of a prompt, k is their number; one sample alone gets 0.
    """
    groups = Groups(batch)
    added = torch.zeros_like(groups.scores)
    for group in range(int(groups.index.max()) + 1):
        members = ((groups.index == group) & (groups.counted > 0)).nonzero().squeeze(-1)
        k, count = min(config.pass_k, len(members)), len(members)
        if k < 2:
            continue
        ranked = members[torch.argsort(groups.scores[members], stable=True)]
        share = torch.tensor([comb(j, k - 2) / comb(count - 1, k - 1) for j in range(count)]).double()
        scores = groups.scores[ranked]
        # Row i, column j: what sample i adds where j, below it, is the best of the others.
        added[ranked] = (torch.tril(scores[:, None] - scores[None, :], -1) * share).sum(1)
    return {"advantages": groups.on_tokens(_normalized(added, groups, config)).float()}


def _normalized(advantage: Tensor, groups: Groups, config: AlgorithmConfig) -> Tensor:
    return advantage / (groups.spread + EPSILON) if config.normalize_by_std else advantage
