"""Sequences of any length laid end to end, without padding: the one batch format inside an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass
class PackedBatch:
    """Flat per-token fields, per-sequence fields, and where each sequence starts.

    Entry ``t`` of a per-token field is about token ``t``: the first token of a sequence is predicted by nothing, so its
    ``loss_mask`` must be 0.
    """

    tokens: dict[str, Tensor]
    """Each (total_tokens, ...): "input_ids" int64, "loss_mask" float32, and whatever the loss reads."""
    sequences: dict[str, Tensor]
    """Each (num_sequences, ...)."""
    cu_seqlens: Tensor
    """(num_sequences + 1,) int64, on cpu: sequence i is tokens[cu_seqlens[i]:cu_seqlens[i + 1]]."""

    def __post_init__(self) -> None:
        total = int(self.cu_seqlens[-1])
        for name, field in self.tokens.items():
            if field.shape[0] != total:
                raise ValueError(
                    f"per-token field {name!r} has {field.shape[0]} entries; cu_seqlens ends at {total}"
                )
        for name, field in self.sequences.items():
            if field.shape[0] != len(self):
                raise ValueError(
                    f"per-sequence field {name!r} has {field.shape[0]} entries for {len(self)} sequences"
                )

    def __len__(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> Tensor:
        """(num_sequences,) int64, on cpu."""
        return self.cu_seqlens.diff()

    @property
    def position_ids(self) -> Tensor:
        """(total_tokens,) int64, restarting at 0 in each sequence, on the device of the tokens."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.lengths)
        positions = torch.arange(self.num_tokens) - starts
        device = self.tokens["input_ids"].device if "input_ids" in self.tokens else positions.device
        return positions.to(device)

    def token_rows(self, indices: Sequence[int]) -> Tensor:
        """(tokens of the sequences ``indices``,) int64, on cpu: where their tokens stand in this batch."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[index]
        shift = self.cu_seqlens[index] - (lengths.cumsum(0) - lengths)
        return torch.arange(int(lengths.sum())) + torch.repeat_interleave(shift, lengths)

    def select(self, indices: Sequence[int]) -> PackedBatch:
        """The sequences ``indices``, in the order given."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        rows = self.token_rows(indices)
        return PackedBatch(
            {name: field.index_select(0, rows.to(field.device)) for name, field in self.tokens.items()},
            {name: field.index_select(0, index.to(field.device)) for name, field in self.sequences.items()},
            _cumulative(self.lengths[index]),
        )

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its fields on ``device``; cu_seqlens stays on cpu."""
        return replace(
            self,
            tokens={name: field.to(device, non_blocking=True) for name, field in self.tokens.items()},
            sequences={name: field.to(device, non_blocking=True) for name, field in self.sequences.items()},
        )

    def with_tokens(self, **fields: Tensor) -> PackedBatch:
        """The same batch with further per-token fields; the tensors are shared, the dict is not."""
        return replace(self, tokens={**self.tokens, **fields})

    @staticmethod
    def concatenate(batches: Sequence[PackedBatch]) -> PackedBatch:
        """All sequences of ``batches``, which must have the same fields, in order."""
        first = batches[0]
        for other in batches[1:]:
            if other.tokens.keys() != first.tokens.keys() or other.sequences.keys() != first.sequences.keys():
                raise ValueError(
                    f"batches with different fields: {_field_names(first)} and {_field_names(other)}"
                )
        return PackedBatch(
            {name: torch.cat([batch.tokens[name] for batch in batches]) for name in first.tokens},
            {name: torch.cat([batch.sequences[name] for batch in batches]) for name in first.sequences},
            _cumulative(torch.cat([batch.lengths for batch in batches])),
        )

    @staticmethod
    def from_sequences(
        tokens: dict[str, list[Tensor]], sequences: dict[str, Tensor] | None = None
    ) -> PackedBatch:
        """From one tensor per sequence and field; the lists must agree in lengths."""
        lengths = {name: [len(entry) for entry in field] for name, field in tokens.items()}
        name, expected = next(iter(lengths.items()))
        for other, found in lengths.items():
            if found != expected:
                raise ValueError(
                    f"per-token fields {name!r} and {other!r} differ in lengths: {expected} and {found}"
                )
        flat = {key: torch.cat(field) if field else torch.empty(0) for key, field in tokens.items()}
        return PackedBatch(
            flat, dict(sequences or {}), _cumulative(torch.tensor(expected, dtype=torch.int64))
        )

    @staticmethod
    def from_tensordict(batch: TensorDict) -> PackedBatch:
        """From the border format: jagged fields are per token, plain ones per sequence."""
        fields = dict(batch.items())
        tokens = {name: field for name, field in fields.items() if field.is_nested}
        sequences = {name: field for name, field in fields.items() if not field.is_nested}
        if not tokens:
            raise ValueError(f"no jagged per-token field among {sorted(fields)}")
        if any(field.lengths() is not None for field in tokens.values()):  # a view with holes
            return PackedBatch.from_sequences(
                {name: list(f.unbind()) for name, f in tokens.items()}, sequences
            )
        offsets = next(iter(tokens.values())).offsets()
        return PackedBatch(
            {name: field.values() for name, field in tokens.items()},
            sequences,
            offsets.to("cpu", torch.int64),
        )

    def to_tensordict(self) -> TensorDict:
        """The border format; all jagged fields are built on one shared offsets tensor."""
        from tensordict import TensorDict

        def jagged(field: Tensor) -> Tensor:
            return torch.nested.nested_tensor_from_jagged(field, offsets=self.cu_seqlens)

        fields = {name: jagged(field) for name, field in self.tokens.items()}
        return TensorDict({**fields, **self.sequences}, batch_size=[len(self)])


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _field_names(batch: PackedBatch) -> list[str]:
    return sorted([*batch.tokens, *batch.sequences])
