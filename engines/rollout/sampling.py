"""The next token of each sample, from one uniform number per (key, position).

A sample's randomness is a function of its key and the position alone, and the arithmetic of a row never looks at
other rows. So given equal logits a sample gets equal ids whatever it is batched with, in any order, on any replica.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from engines.rollout.base import SamplingParams

_UNIT = 2.0**48
"""Probability 1 in fixed point. Sums of integers are exact, whatever algorithm or device adds them up; tokens less likely
than 2^-48 are never drawn."""
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(keys: list[int], start: int, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1) with 53 bits, for positions ``start`` to ``start + count - 1`` of each key.

    SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, figures 13 and 16), used as a
    counter-based generator: the key is the seed, the position is the counter.

    Returns:
        (keys, count) float64.
    """
    seeds = np.array(keys, dtype=np.uint64)[:, None]
    counters = np.arange(start + 1, start + count + 1, dtype=np.uint64)[None, :]
    bits = seeds + counters * _GOLDEN_GAMMA  # unsigned: wraps, as the algorithm wants
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)) * 2.0**-53


def choose(logits: Tensor, uniform: Tensor | None, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row, by inverse CDF; the likeliest (the first of equals) when ``params.greedy``.

    Args:
        logits: (samples, vocabulary), any float type.
        uniform: (samples,) float64 in [0, 1); None when greedy.

    Returns:
        ids (samples,) int64 and their log-probs (samples,) float32, which are those of the policy at
        ``params.temperature``, before top-k and top-p.
    """
    log_probs = torch.log_softmax(logits.float() / params.temperature, dim=-1)
    if params.greedy:
        ids = logits.argmax(dim=-1)
    else:
        weights = (log_probs.double().exp() * _UNIT).long()
        ids = _inverse_cdf(_support(weights, params), uniform)
    return ids, log_probs.gather(-1, ids[:, None]).squeeze(-1)


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds ``uniform`` times the total: never one of weight 0."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    # A uniform number just below 1 times the total may round up to the total, which no cumulative weight exceeds.
    threshold = torch.minimum((uniform * total).long(), total - 1)
    return torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)


def _support(weights: Tensor, params: SamplingParams) -> Tensor:
    """``weights`` with those outside top-k, then outside top-p of what is left, set to 0.

    Tokens as likely as the k-th are all kept. Top-p keeps the fewest of the most likely tokens that reach
    ``top_p`` of the remaining mass (Holtzman et al., The Curious Case of Neural Text Degeneration, section 3.1).
    """
    if 0 < params.top_k < weights.shape[-1]:
        kth = weights.topk(params.top_k, dim=-1).values[:, -1:]
        weights = weights.where(weights >= kth, 0)
    if params.top_p < 1:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        kept = ordered.where(before < params.top_p * ordered.sum(dim=-1, keepdim=True).double(), 0)
        weights = torch.zeros_like(weights).scatter_(-1, order, kept)
    return weights


class SeededSampler(LogitsProcessor):
    """Chooses each row's token inside ``generate`` and leaves it the only possible one, so that argmax takes it.

    Made for one call of ``generate`` of at most ``steps`` new tokens; it keeps the chosen ids and log-probs,
    (samples, steps), never the logits.
    """

    def __init__(
        self, keys: list[int], position: int, steps: int, params: SamplingParams, device: torch.device
    ):
        self._params = params
        self._step = 0
        self._uniforms = None
        if not params.greedy:
            self._uniforms = torch.from_numpy(uniforms(keys, position, steps)).to(device)
        self.log_probs = torch.zeros(len(keys), steps, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = None if self._uniforms is None else self._uniforms[:, self._step]
        ids, log_probs = choose(scores, uniform, self._params)
        self.log_probs[:, self._step] = log_probs
        self._step += 1
        return scores.fill_(-torch.inf).scatter_(-1, ids[:, None], 0.0)
