"""What estimators are made of: the loss tokens of each sequence in a row, the samples of each prompt, and whitening."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.training.batch import PackedBatch
from workflow.rl.batches import per_sequence_sum

# Groups whose rewards differ by less than this are all alike; keeps rounding from being divided by itself.
EPSILON = 1e-6


def checked_rewards(batch: PackedBatch) -> Tensor:
    """(tokens,) the batch's rewards.

    Raises:
        ValueError: a reward on a token that is no loss token; it would be lost.
    """
    rewards = batch.tokens["rewards"]
    if bool((rewards[batch.tokens["loss_mask"] == 0] != 0).any()):
        raise ValueError("rewards must be 0 where loss_mask is 0")
    return rewards


class Steps:
    """The loss tokens of each sequence as rows of a matrix, filled from the left.

    Entries with loss_mask 0 inside a response (text that the policy did not write, such as a tool's answer) are no time
    steps: credit passes across them.
    """

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

    def returns(self, rewards: Tensor, gamma: float = 1.0) -> Tensor:
        """(sequences, steps) float64: what is earned from each step on, G_t = r_t + gamma G_{t+1}."""
        reward = self.matrix(rewards)
        returns, following = torch.zeros_like(reward), torch.zeros(reward.shape[0], dtype=torch.float64)
        for t in reversed(range(reward.shape[1])):
            following = reward[:, t] + gamma * following
            returns[:, t] = following
        return returns


class Groups:
    """The samples of each prompt; rejected ones (without a loss token) count in no statistic. All (sequences,) float64."""

    def __init__(self, batch: PackedBatch):
        self._batch = batch
        self.scores = per_sequence_sum(checked_rewards(batch), batch)
        self.lengths = per_sequence_sum(torch.ones(batch.num_tokens), batch)
        """Loss tokens."""
        self.counted = (self.lengths > 0).double()
        _, self.index = torch.unique(batch.sequences["group"], return_inverse=True)
        self.size = self.sum(torch.ones_like(self.scores))
        """Samples of the group that count."""
        mean = self.sum(self.scores) / self.size.clamp(min=1)
        self.centred = (self.scores - mean) * self.counted
        """Score - mean of the group."""
        self.spread = (self.sum(self.centred.square()) / (self.size - 1).clamp(min=1)).sqrt()
        """Unbiased standard deviation of the group."""
        self.differ = self.spread > EPSILON
        """False where there is nothing to compare: groups of one, and of scores that are equal but for rounding."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over each sample's group."""
        totals = torch.zeros(int(self.index.max()) + 1, dtype=torch.float64)
        return totals.index_add_(0, self.index, values * self.counted)[self.index]

    def on_tokens(self, advantage: Tensor) -> Tensor:
        """(tokens,) float64: each sample's advantage on its loss tokens; 0 where there is nothing to compare."""
        compared = torch.where(self.differ, advantage, 0.0)
        spread = torch.repeat_interleave(compared, self._batch.cu_seqlens.diff())
        return spread * self._batch.tokens["loss_mask"]


def whiten(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over all loss tokens of the batch; others become 0.

    (Engstrom et al., Implementation Matters in Deep Policy Gradients.) A batch of equal advantages becomes 0.
    """
    chosen = advantages[loss_mask > 0].double()
    if chosen.numel() < 2:
        return torch.zeros(advantages.shape)
    whitened = (advantages.double() - chosen.mean()) / (chosen.std() + EPSILON)
    return (whitened * loss_mask).float()
