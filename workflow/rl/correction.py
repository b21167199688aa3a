"""Rollout correction: the rollout computes not quite the policy that is trained, and what is done about it.

w_t = p_old(t) / p_rollout(t), both at the sampling temperature: the training engine's probability of a token over the one
it was sampled with (importance sampling).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.training.batch import PackedBatch
from workflow.campaign.algorithm import CorrectionConfig
from workflow.rl.batches import per_sequence_sum
from workflow.rl.kl import MAX_LOG_RATIO


def log_weights(batch: PackedBatch) -> Tensor:
    """(tokens,) float64: log w_t, 0 on tokens that the policy did not write."""
    difference = batch.tokens["old_log_probs"].double() - batch.tokens["rollout_log_probs"].double()
    return difference * batch.tokens["loss_mask"]


def token(log_weight: Tensor, batch: PackedBatch) -> Tensor:
    """log w_t (importance sampling by token)."""
    return log_weight


def sequence(log_weight: Tensor, batch: PackedBatch) -> Tensor:
    """Sum of log w over the response (importance sampling by sequence)."""
    return torch.repeat_interleave(product(log_weight, batch), batch.lengths)


def truncate(weight: Tensor, config: CorrectionConfig) -> Tensor:
    """min(w, high) (Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training: TIS)."""
    return weight.clamp(max=config.high)


def mask(weight: Tensor, config: CorrectionConfig) -> Tensor:
    """w where low <= w <= high, else 0; the token keeps its place in every denominator (Ling Team, Every Step Evolves: IcePop)."""
    return torch.where((weight >= config.low) & (weight <= config.high), weight, 0.0)


def mean(log_weight: Tensor, batch: PackedBatch) -> Tensor:
    """Mean of log w over a response (Liu et al., When Speed Kills Stability: the geometric mean of w)."""
    tokens = per_sequence_sum(torch.ones(batch.num_tokens), batch).clamp(min=1)
    return product(log_weight, batch) / tokens


def product(log_weight: Tensor, batch: PackedBatch) -> Tensor:
    """Sum of log w over a response (Liu et al., as above)."""
    return per_sequence_sum(log_weight, batch)


def importance_weights(batch: PackedBatch, config: CorrectionConfig) -> Tensor:
    """(tokens,) float32: what each token's policy term is multiplied by, w of ``config.weights`` within ``config.bound``."""
    log_weight = config.weighting.load()(log_weights(batch), batch)
    return config.bounding.load()(log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), config).float()


def reject(batch: PackedBatch, config: CorrectionConfig) -> PackedBatch:
    """Take all loss tokens, and with them the reward, from responses whose w (``config.reject``) is outside of reject_low to reject_high.

    A rejected response is in no statistic of its group, in no loss and in no denominator.
    """
    log_ratio = config.rejection.load()(log_weights(batch), batch)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    kept = torch.repeat_interleave(
        (ratio >= config.reject_low) & (ratio <= config.reject_high), batch.lengths
    )
    return batch.with_tokens(**{name: batch.tokens[name] * kept for name in ("loss_mask", "rewards")})


def correct(batch: PackedBatch, config: CorrectionConfig) -> PackedBatch:
    """Reject responses and add ``correction``, as ``config`` says."""
    if config.weighting:
        batch = batch.with_tokens(correction=importance_weights(batch, config))
    return reject(batch, config) if config.rejection else batch


def mismatch(batch: PackedBatch) -> dict[str, float]:
    """How far the rollout is from the policy that is trained, over loss tokens, before anything is corrected.

    rollout_ratio_min, _max: of w. rollout_kl: mean of -log w, KL(rollout || trained), which the samples estimate without bias;
    rollout_k3: the same by k3, w - 1 - log w. rollout_difference: mean of |log w|. rollout_sequence_ratio_min, _max: of the
    product of w over a response. rollout_effective_samples: (sum w)^2 / (n sum w^2) over tokens, 1 where all weights are equal.
    """
    mask = batch.tokens["loss_mask"] > 0
    log_weight = log_weights(batch)
    products = per_sequence_sum(log_weight, batch).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    chosen = log_weight[mask]
    weight = chosen.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "rollout_kl": float(-chosen.mean()),
        "rollout_k3": float((weight - 1 - chosen).mean()),
        "rollout_difference": float(chosen.abs().mean()),
        "rollout_sequence_ratio_min": float(products.min()),
        "rollout_sequence_ratio_max": float(products.max()),
        "rollout_effective_samples": float(weight.sum().square() / (len(weight) * weight.square().sum())),
    }
