"""How much better than expected each token was: GAE for PPO, group comparison for GRPO. Computed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

# Groups whose rewards differ by less than this are all alike; keeps rounding from being divided by itself.
EPSILON = 1e-6


def gae(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the loss tokens of each sequence.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1}; both are 0 after the last token
    (Schulman et al., High-Dimensional Continuous Control Using GAE, equations 11 and 16). ``t + 1`` is the next token with
    loss_mask 1: entries with loss_mask 0 inside a response (text that the policy did not write) are no time steps, and
    credit passes across them.

    Args:
        rewards, values, loss_mask: (tokens,); rewards must be 0 where loss_mask is 0. values[t] = V(tokens before t).
        cu_seqlens: (sequences + 1,).

    Returns:
        advantages and returns (advantages + values), each (tokens,) float32, 0 where loss_mask is 0.

    Raises:
        ValueError: a reward on a token that is no loss token; it would be lost.
    """
    if bool((rewards[loss_mask == 0] != 0).any()):
        raise ValueError("rewards must be 0 where loss_mask is 0")
    steps = _Steps(loss_mask, cu_seqlens)
    reward, value = steps.matrix(rewards), steps.matrix(values)
    advantage = torch.zeros_like(reward)
    following_value = following = torch.zeros(reward.shape[0], dtype=torch.float64)
    # Rows are filled from the left, so a row's cells beyond its end hold 0 and stay 0.
    for t in reversed(range(reward.shape[1])):
        delta = reward[:, t] + gamma * following_value - value[:, t]
        following = (delta + gamma * lam * following) * steps.filled[:, t]
        following_value = value[:, t]
        advantage[:, t] = following
    return steps.flat(advantage), steps.flat((advantage + value) * steps.filled)


def whiten(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over all loss tokens of the batch; others become 0.

    (Engstrom et al., Implementation Matters in Deep Policy Gradients.) A batch of equal advantages becomes 0.
    """
    chosen = advantages[loss_mask > 0].double()
    if chosen.numel() < 2:
        return torch.zeros_like(advantages)
    whitened = (advantages.double() - chosen.mean()) / (chosen.std() + EPSILON)
    return (whitened * loss_mask).float()


def grpo(
    scores: Tensor, groups: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, normalize_by_std: bool
) -> Tensor:
    """Group-relative advantages: A = (score - mean of the group) / standard deviation of the group.

    (Shao et al., DeepSeekMath, section 4.1.2; unbiased standard deviation. Without the division: Liu et al.,
    Understanding R1-Zero-Like Training, section 3.2.) A group of one, and a group of equal scores, gets 0: there is
    nothing to compare. Sequences without a loss token are rejected ones and do not count in their group.

    Args:
        scores: (sequences,), each response's whole reward.
        groups: (sequences,) int64; equal numbers are samples of one prompt.
        loss_mask: (tokens,). cu_seqlens: (sequences + 1,).

    Returns:
        (tokens,) float32, 0 where loss_mask is 0.
    """
    steps = _Steps(loss_mask, cu_seqlens)
    counted = steps.lengths > 0
    _, index = torch.unique(groups, return_inverse=True)
    score, valid = scores.double(), counted.double()

    def per_group(values: Tensor) -> Tensor:
        totals = torch.zeros(int(index.max()) + 1, dtype=torch.float64)
        return totals.index_add_(0, index, values)[index]

    size = per_group(valid)
    centred = (score - per_group(score * valid) / size.clamp(min=1)) * valid
    # A group of equal scores leaves rounding behind, which must not count as a difference.
    spread = (per_group(centred.square()) / (size - 1).clamp(min=1)).sqrt()
    differs = spread > EPSILON
    advantage = torch.where(differs, centred / (spread + EPSILON) if normalize_by_std else centred, 0.0)
    return (torch.repeat_interleave(advantage, cu_seqlens.diff()) * loss_mask).float()


class _Steps:
    """The loss tokens of each sequence as rows of a matrix, filled from the left."""

    def __init__(self, loss_mask: Tensor, cu_seqlens: Tensor):
        chosen = loss_mask > 0
        rows = torch.repeat_interleave(torch.arange(cu_seqlens.numel() - 1), cu_seqlens.diff())
        self._tokens = chosen.nonzero().squeeze(-1)
        self._rows = rows[self._tokens]
        self.lengths = torch.bincount(self._rows, minlength=cu_seqlens.numel() - 1)
        starts = self.lengths.cumsum(0) - self.lengths
        self._columns = torch.arange(self._tokens.numel()) - starts[self._rows]
        self._size = loss_mask.numel()
        self.filled = self.matrix(torch.ones(self._size))

    def matrix(self, field: Tensor) -> Tensor:
        """(sequences, most loss tokens of any) float64 from a (tokens,) field; 0 beyond a row's end."""
        width = int(self.lengths.max()) if self.lengths.numel() else 0
        matrix = torch.zeros(self.lengths.numel(), width, dtype=torch.float64)
        matrix[self._rows, self._columns] = field[self._tokens].double()
        return matrix

    def flat(self, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`matrix`: (tokens,) float32, 0 on other tokens."""
        field = torch.zeros(self._size)
        field[self._tokens] = matrix[self._rows, self._columns].float()
        return field
