"""The policy losses: from ratios and the section ``algorithm`` to terms per token, and fields for the metrics.

r is p / p_old of a token, A its advantage, |y| the number of loss tokens of its response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workflow.campaign.algorithm import AlgorithmConfig
from workflow.rl.kl import absolute
from workflow.rl.losses.ratios import Ratios

Terms = tuple[Tensor, dict[str, Tensor]]


def ppo(ratios: Ratios, config: AlgorithmConfig) -> Terms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); where A < 0 at most -dual_clip A.

    (Schulman et al., Proximal Policy Optimization, equation 7; two ranges: Yu et al., DAPO, section 3.1; dual clip: Ye et al.,
    Mastering Complex Control in MOBA Games with Deep Reinforcement Learning.)
    """
    terms = _clipped(ratios.ratio, ratios.advantages, config)
    fields = _clip_fractions(ratios.ratio, ratios.advantages, config)
    if config.dual_clip is not None:
        limit = -config.dual_clip * ratios.advantages
        fields["clip_fraction_dual"] = (ratios.advantages < 0) & (terms > limit)
        terms = torch.where(ratios.advantages < 0, torch.minimum(terms, limit), terms)
    return terms, fields


def gspo(ratios: Ratios, config: AlgorithmConfig) -> Terms:
    """-min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A), s_t = sg[s] p / sg[p], s = (product of r over y)^(1/|y|).

    (Zheng et al., Group Sequence Policy Optimization, the variant GSPO-token, where sg stops gradients: the value is the
    sequence's ratio, and so is the gradient when all tokens of a response have one advantage.)
    """
    sequence = ratios.sequence_mean(ratios.log_ratio).detach()
    ratio = (sequence + ratios.log_probs - ratios.log_probs.detach()).exp()
    return _clipped(ratio, ratios.advantages, config), _clip_fractions(ratio, ratios.advantages, config)


def cispo(ratios: Ratios, config: AlgorithmConfig) -> Terms:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p: the weight is clipped, and no token loses its gradient.

    (MiniMax, MiniMax-M1, section 3.1.)
    """
    ratio = ratios.ratio.detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    fields = {"clip_fraction_low": weight > ratio, "clip_fraction_high": weight < ratio}
    return -weight * ratios.advantages * ratios.log_probs, fields


def gmpo(ratios: Ratios, config: AlgorithmConfig) -> Terms:
    """-A g, g = (product over y of the clipped r)^(1/|y|); clipped means clip(r, e^-clip_low, e^clip_high) where that is worse.

    (Zhao et al., Geometric-Mean Policy Optimization.) Worse is smaller for A > 0, larger for A < 0.
    """
    log_ratio, advantages = ratios.log_ratio, ratios.advantages
    bounded = log_ratio.clamp(-config.clip_low, config.clip_high)
    worse = torch.where(advantages < 0, torch.maximum(log_ratio, bounded), torch.minimum(log_ratio, bounded))
    fields = {
        "clip_fraction_low": (log_ratio < -config.clip_low) & (advantages < 0),
        "clip_fraction_high": (log_ratio > config.clip_high) & (advantages > 0),
    }
    return -advantages * ratios.sequence_mean(worse).exp(), fields


def sapo(ratios: Ratios, config: AlgorithmConfig) -> Terms:
    """-A sigmoid(tau (r - 1)) 4 / tau; tau is sapo.temperature_positive for A > 0, else sapo.temperature_negative.

    (Gao et al., Soft Adaptive Policy Optimization.) At r = 1 its gradient is that of r A.
    """
    tau = torch.where(
        ratios.advantages > 0, config.sapo.temperature_positive, config.sapo.temperature_negative
    ).to(ratios.ratio)
    gate = torch.sigmoid(tau * (ratios.ratio - 1)) * 4 / tau
    return -ratios.advantages * gate, {"gate": gate}


def clip_cov(ratios: Ratios, config: AlgorithmConfig) -> Terms:
    """The terms of ppo, 0 on selected tokens: some of those with a covariance between covariance.low and covariance.high.

    (Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, Clip-Cov.)
    """
    terms = _clipped(ratios.ratio, ratios.advantages, config)
    fields = _clip_fractions(ratios.ratio, ratios.advantages, config)
    return terms * (1 - ratios.selected), {**fields, "selected": ratios.selected}


def kl_cov(ratios: Ratios, config: AlgorithmConfig) -> Terms:
    """-r A, plus covariance.coefficient |log p - log p_old| on selected tokens: those with the largest covariance.

    (Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, KL-Cov.)
    """
    penalty = config.covariance.coefficient * absolute(ratios.log_ratio)
    terms = -ratios.ratio * ratios.advantages + ratios.selected * penalty
    return terms, {"selected": ratios.selected}


def reinforce(ratios: Ratios, config: AlgorithmConfig) -> Terms:
    """-A log p (Williams, Simple Statistical Gradient-Following Algorithms): no ratio, so samples should be the policy's own."""
    return -ratios.advantages * ratios.log_probs, {}


def _clipped(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> Tensor:
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def _clip_fractions(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Where the clip takes the gradient away."""
    return {
        "clip_fraction_low": (ratio < 1 - config.clip_low) & (advantages < 0),
        "clip_fraction_high": (ratio > 1 + config.clip_high) & (advantages > 0),
    }
