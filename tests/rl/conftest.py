"""What tests of the trainer share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rl.training import train_slice
from workflow.stages.convert import convert


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """An untrained model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = train_slice(folder)[1]
    convert(config.model, folder / "model", seed=config.seed, data=config.data)
    return folder / "model"
