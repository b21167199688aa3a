"""The head of a value model: from the model's folder, or drawn anew."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engines.streams import stream_key

VALUE_HEAD = "score.weight"
"""Its name on disk."""


def value_head(folder: Path, hidden_size: int, seed: int) -> Tensor:
    """(1, hidden_size) float32: what ``folder`` holds, else drawn from ``seed`` with standard deviation 0.1 / sqrt(hidden_size).

    Hidden states have unit scale after the last norm, so the first values are around 0.1.
    """
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if VALUE_HEAD in file.keys():  # noqa: SIM118 - not a dict
                return file.get_tensor(VALUE_HEAD).float()
    generator = torch.Generator().manual_seed(stream_key(seed, "value head"))
    return torch.empty(1, hidden_size).normal_(0.0, 0.1 * hidden_size**-0.5, generator=generator)
