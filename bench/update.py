"""One update of the fsdp2 engine against hand-written loops over the same batch: what does the engine cost?

The batch: 64 sequences of long-tailed lengths (exponential quantiles), 9,567 tokens; a Qwen3 of 4 layers x 256; one thread.
Three ways to make the same optimizer step, timed in turn:

- padded: micro-batches of 8 sequences, padded to their longest;
- bare: a packed loop as one writes it by hand: scaled_dot_product_attention per sequence, token budget 4,096;
- engine: fsdp2 at world size 1, ``fully_shard`` applied.

Before timing, the gradients of bare loop and engine are compared. ``ratio_to_bare_loop`` = bare time / engine time.

    python -m bench.update --output results/bench/update.json
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from engines.config import EngineConfig, OptimizerConfig
from engines.registry import EngineRegistry
from engines.training.batch import PackedBatch
from engines.training.process_group import init_process_group
from engines.training.schedule import Metrics, ModelOutputs

SEQUENCES, TOKENS, BUDGET, VOCABULARY = 64, 9_567, 4_096, 512
CLIP, RATE = 1.0, 1e-4


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """The simplest loss, so that what is timed is the model."""

    needs_entropy: bool = False

    def __call__(self, outputs: ModelOutputs, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        return -outputs.log_probs, {}


def long_tailed_lengths() -> list[int]:
    """Quantiles of an exponential distribution, shuffled; they sum up to TOKENS."""
    quantiles = [-math.log(1 - (i + 0.5) / SEQUENCES) for i in range(SEQUENCES)]
    lengths = [max(2, int(q * TOKENS / sum(quantiles))) for q in quantiles]
    lengths[-1] += TOKENS - sum(lengths)
    random.Random(0).shuffle(lengths)
    return lengths


def make_batch() -> PackedBatch:
    """All tokens but the first of each sequence are loss tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = long_tailed_lengths()
    ids = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]
    masks = [torch.cat([torch.zeros(1), torch.ones(length - 1)]) for length in lengths]
    return PackedBatch.from_sequences({"input_ids": ids, "loss_mask": masks})


def save_model(folder: Path) -> None:
    """A random Qwen3 of 4 layers x 256."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def per_segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    scaling: float,
    lengths: list[int],
    **_: Any,
) -> tuple[Tensor, None]:
    """One call per sequence: exact, and what one writes first."""
    parts = [tensor.split(lengths, dim=2) for tensor in (query, key, value)]
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


class HandWrittenLoop(ABC):
    """Forward, backward, clip and step on a plain transformers model."""

    def __init__(self, folder: Path, batch: PackedBatch, attention: str) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(folder, attn_implementation=attention).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
        self.sequences = list(batch.tokens["input_ids"].split(batch.lengths.tolist()))
        self.loss_tokens = TOKENS - SEQUENCES

    def gradients(self) -> dict[str, Tensor]:
        """Accumulate the gradients of the whole batch."""
        self.forward_backward()
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def update(self) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad()
        self.forward_backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()

    @abstractmethod
    def forward_backward(self) -> None:
        """Add the gradients of the whole batch to those there are."""


class PackedLoop(HandWrittenLoop):
    """Sequences in order, end to end, until the budget is full."""

    def forward_backward(self) -> None:
        waiting = list(self.sequences)
        while waiting:
            taken = [waiting.pop(0)]
            while waiting and sum(map(len, taken)) + len(waiting[0]) <= BUDGET:
                taken.append(waiting.pop(0))
            ids = torch.cat(taken)
            lengths = [len(sequence) for sequence in taken]
            positions = torch.cat([torch.arange(length) for length in lengths])
            labels = torch.cat([torch.cat([sequence[1:], torch.tensor([-100])]) for sequence in taken])
            logits = self.model(
                ids[None], position_ids=positions[None], use_cache=False, lengths=lengths
            ).logits[0]
            (cross_entropy(logits, labels, reduction="sum") / self.loss_tokens).backward()


class PaddedLoop(HandWrittenLoop):
    """Eight sequences at a time, padded to the longest of them."""

    def forward_backward(self) -> None:
        for start in range(0, SEQUENCES, 8):
            part = self.sequences[start : start + 8]
            ids = nn.utils.rnn.pad_sequence(part, batch_first=True)
            mask = nn.utils.rnn.pad_sequence(
                [torch.ones_like(sequence) for sequence in part], batch_first=True
            )
            labels = ids.masked_fill(mask == 0, -100)[:, 1:].flatten()
            logits = self.model(ids, attention_mask=mask, use_cache=False).logits[:, :-1].flatten(0, 1)
            (cross_entropy(logits, labels, reduction="sum") / self.loss_tokens).backward()


def make_engine(folder: Path) -> Any:
    """fsdp2 at world size 1."""
    init_process_group("cpu")
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        "cpu",
        config=EngineConfig(backend="fsdp2", device="cpu", token_budget=BUDGET),
        model_path=folder,
        optimizer=OptimizerConfig(lr=RATE, clip_grad_norm=CLIP),
    )
    engine.initialize()
    return engine


def largest_difference(engine: Any, batch: PackedBatch, expected: dict[str, Tensor]) -> float:
    """Over all tensors: norm of the gradients' difference / norm of the gradient."""
    with engine.train_mode():
        engine.forward_backward_batch(batch, NegativeLogLikelihood())
        found = dict(engine.gradients())
    return max(((found[name] - g).norm() / g.norm()).item() for name, g in expected.items())


def medians(updates: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """CPU seconds of each (one thread, so seconds on an idle machine), in turn: other load meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for repetition in range(repetitions + 1):
        for name, update in updates.items():
            start = time.process_time()
            update()
            if repetition:  # the first round warms up
                seconds[name].append(time.process_time() - start)
            print(f"  {name:8} {time.process_time() - start:6.2f} s", flush=True)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("results/bench/update.json"))
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    AttentionInterface.register("per_segment", per_segment_attention)
    batch = make_batch()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder)
        packed, padded = PackedLoop(folder, batch, "per_segment"), PaddedLoop(folder, batch, "sdpa")
        engine = make_engine(folder)
    difference = largest_difference(engine, batch, packed.gradients())
    if difference > 5e-6:
        raise SystemExit(
            f"gradients of engine and bare loop differ by {difference:.1e}: the timings would mean nothing"
        )
    with engine.train_mode():
        updates = {
            "bare": packed.update,
            "engine": lambda: engine.train_batch(batch, NegativeLogLikelihood()),
            "padded": padded.update,
        }
        seconds = medians(updates, arguments.repetitions)
    result = {
        "cpu_seconds": seconds,
        "ratio_to_bare_loop": seconds["bare"] / seconds["engine"],
        "packed_over_padded": seconds["padded"] / seconds["bare"],
        "largest_gradient_difference": difference,
        "sequences": SEQUENCES,
        "tokens": TOKENS,
        "longest": max(long_tailed_lengths()),
        "token_budget": BUDGET,
        "repetitions": arguments.repetitions,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
