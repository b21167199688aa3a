"""Small batches for the properties of the objective: sequences as plain lists, drawn by hypothesis, and packed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from engines.training.batch import PackedBatch


@dataclass
class Sequence:
    """One sample. Per-token lists have equal lengths; the first token is never a loss token."""

    mask: list[int]
    fields: dict[str, list[float]]
    group: int = 0
    baseline: float = 0.0
    score: float = field(default=0.0)
    """Sum of its rewards."""

    @property
    def steps(self) -> list[int]:
        """Places of the loss tokens."""
        return [t for t, m in enumerate(self.mask) if m]


def with_foreign_text(s: Sequence, at: int) -> Sequence:
    """The sample with what the policy did not write: two tokens at place ``at`` (a tool's answer) and one at its end."""

    def stretched(values: list, foreign: float) -> list:
        return [*values[:at], foreign, foreign, *values[at:], foreign]

    fields = {name: stretched(field, 0.0 if name == "rewards" else 9.0) for name, field in s.fields.items()}
    return Sequence(stretched(s.mask, 0), fields, s.group, s.baseline, s.score)


def pack(sequences: list[Sequence]) -> PackedBatch:
    """The sequences end to end; rewards in float64, as the trainer has them."""
    tokens = {
        name: [torch.tensor(s.fields[name], dtype=torch.float64 if name == "rewards" else torch.float32) for s in sequences]
        for name in sequences[0].fields
    }  # fmt: skip
    masks = [torch.tensor(s.mask, dtype=torch.float32) for s in sequences]
    return PackedBatch.from_sequences(
        {"loss_mask": masks, **tokens},
        {
            "group": torch.tensor([s.group for s in sequences]),
            "baseline": torch.tensor([s.baseline for s in sequences], dtype=torch.float64),
        },
    )


def unpack(values: torch.Tensor, sequences: list[Sequence]) -> list[list[float]]:
    """A per-token field of the packed sequences, sequence by sequence."""
    return [part.tolist() for part in values.split([len(s.mask) for s in sequences])]


NUMBERS = st.floats(-2, 2, width=32)
SCORES = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(-2, 2, width=32)
"""Often equal, as scores are."""


@st.composite
def masks(draw) -> list[int]:
    """Prompt, then what the policy wrote, with spans in between that it did not write; sometimes nothing is left of it."""
    return [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))]


@st.composite
def batches(draw, names: tuple[str, ...] = (), dense: bool = False, most: int = 5) -> list[Sequence]:
    """Sequences with rewards and the fields ``names``; a reward on the last loss token, with ``dense`` on others too."""
    sequences = []
    for _ in range(draw(st.integers(1, most))):
        mask = draw(masks())
        rewards = [draw(NUMBERS) * m if dense else 0.0 for m in mask]
        if any(mask):
            rewards[max(t for t, m in enumerate(mask) if m)] += draw(SCORES)
        fields = {name: [draw(NUMBERS) for _ in mask] for name in names}
        sequences.append(
            Sequence(
                mask, {"rewards": rewards, **fields}, draw(st.integers(0, 2)), draw(SCORES), sum(rewards)
            )
        )
    return sequences
