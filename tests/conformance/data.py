"""Mini-batches for the suite: ragged sequences with every field that its losses read."""

from __future__ import annotations

import torch
from torch import Tensor

Sequence = dict[str, Tensor]

LENGTHS = (3, 17, 9, 24, 2, 12, 30, 1, 8, 21, 14, 7, 11)
"""Uneven, so that no split is even; the longest and the shortest are neighbours of others."""


def make_sequences(seed: int, vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[Sequence]:
    """Sequences of ``lengths`` with prompts of random lengths; the fourth has no loss token at all."""
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int) -> Tensor:
        return torch.randn(length, generator=generator)

    sequences = []
    for number, length in enumerate(lengths):
        prompt = int(torch.randint(1, max(2, length), (), generator=generator))
        mask = (torch.arange(length) >= prompt).float()
        sequences.append(
            {
                "input_ids": torch.randint(0, vocab_size, (length,), generator=generator),
                "loss_mask": mask if number != 3 else torch.zeros(length),
                "advantages": 1 + 0.5 * normal(length),  # a loss that is not a small difference of large sums
                "old_log_probs": -4.5 + 0.2 * normal(length),
                "returns": normal(length),
                "poison": torch.zeros(length),
            }
        )
    return sequences
