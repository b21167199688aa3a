"""The estimate of a step's memory against tensors that are followed operation by operation, on shapes that no formula was made from."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch

from engines.config import EngineConfig
from tests.conformance.data import make_sequences
from tests.conformance.subject import LAYOUTS, Subject, share
from tests.support.memory_tracker import MemoryTracker
from workflow.campaign.layout_memory import BatchShape, estimate
from workflow.campaign.layout_sizes import model_sizes

TOLERANCE = 0.10
LENGTH, SEQUENCES = 72, 3
"""Of each micro-batch on a rank."""
WIDE = {
    "hidden_size": 48,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 208,
}
DEEP = {"hidden_size": 72, "intermediate_size": 104, "num_hidden_layers": 8, "vocab_size": 144}
EXPERTS = {
    "hidden_size": 56,
    "moe_intermediate_size": 88,
    "num_experts": 4,
    "num_experts_per_tok": 4,  # balanced, as the estimate takes them to be
    "vocab_size": 112,
}

CASES: list[tuple[str, str, str, dict[str, int], int, bool, str]] = [
    ("fsdp2", "world 1", "qwen2", WIDE, 1, False, "float32"),
    ("fsdp2", "world 2", "llama", DEEP, 3, True, "float32"),
    ("fsdp2", "CP 2", "qwen3", WIDE, 1, False, "float32"),
    ("fsdp2", "world 2", "qwen3-moe", EXPERTS, 2, False, "float32"),
    ("megatron", "world 1", "llama", DEEP, 1, True, "float32"),
    ("megatron", "TP2+SP", "qwen3", WIDE, 2, False, "float32"),
    ("megatron", "PP2", "qwen3", DEEP, 4, False, "float32"),
    ("megatron", "PP2xVPP2", "llama", DEEP, 4, False, "float32"),
    ("megatron", "DP2+DO", "qwen2", WIDE, 2, True, "float32"),
    ("megatron", "TP2xEP2xDP2+SP", "qwen3-moe", EXPERTS, 1, False, "float32"),
    ("megatron", "EP2xDP2", "qwen3-moe", EXPERTS, 1, True, "float32"),
    ("megatron", "TP2+SP", "qwen3-moe", EXPERTS, 2, True, "float32"),
    ("fsdp2", "world 2", "qwen3", DEEP, 1, False, "bfloat16"),
    ("fsdp", "world 2", "qwen3", DEEP, 2, True, "bfloat16"),
    ("megatron", "DP2+DO", "llama", WIDE, 1, False, "bfloat16"),
    ("fsdp", "world 2", "qwen3", WIDE, 2, False, "float32"),
]


@pytest.mark.parametrize(
    ("backend", "layout", "family", "sizes", "micro_batches", "recompute", "dtype"), CASES
)
def test_the_estimate_is_close_to_the_peak(
    backend: str,
    layout: str,
    family: str,
    sizes: dict[str, int],
    micro_batches: int,
    recompute: bool,
    dtype: str,
) -> None:
    subject = Subject("language_model", backend, layout=layout)
    model = subject.model(family, **sizes)
    settings = {"token_budget": LENGTH * SEQUENCES, "activation_checkpointing": recompute, "dtype": dtype}
    peak = max(subject.run(peak_on_rank, model, micro_batches, settings))
    engine = EngineConfig(backend=backend, device="cpu", layout=LAYOUTS[layout], **settings)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    batch = BatchShape(settings["token_budget"], micro_batches)
    found = estimate(model_sizes(config, str(model)), engine, batch)
    assert found.total == pytest.approx(peak, rel=TOLERANCE), f"{found}: {found.total / peak - 1:+.1%}"


def peak_on_rank(subject: Subject, model: Any, micro_batches: int, settings: dict[str, Any]) -> int:
    """Bytes, in a step after the first."""
    engine = subject.engine(model, **settings)
    layout = engine.config.layout
    shares = layout.data_parallel_size * layout.context_parallel_size
    sequences = make_sequences(0, 96, (LENGTH,) * (SEQUENCES * micro_batches * shares))
    batch = share(engine, sequences)
    with engine.train_mode():
        engine.train_batch(batch, subject.loss)
        gc.collect()
        there = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        tracker = MemoryTracker(there)
        del there
        with tracker:
            engine.train_batch(batch, subject.loss)
    return tracker.peak


def test_the_tracker_counts_a_storage_once_while_it_lives() -> None:
    held = torch.zeros(100)
    with MemoryTracker([held, held[:10]]) as tracker:
        doubled = held.view(10, 10) + 1
        assert tracker.held == 800
        del doubled
        assert tracker.held == 400
        held.untyped_storage().resize_(0)
        assert tracker.held == 0
    assert tracker.peak == 800
