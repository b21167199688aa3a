"""One update of the megatron engine against a bare loop of megatron-core: what does the engine cost?

Both have the same model (a Qwen3 of 4 layers x 256), the same weights, layout and batch, cut into micro-batches of at most 4,096 tokens.
On one rank and on two of tensor parallelism, each with two batches:

- equal: 64 sequences of 128 tokens, which the bare loop takes as matrices;
- long_tailed: the batch of bench/update.py, which the bare loop takes packed.

Updates are made in turn, and both sides' losses and gradient norms are compared at each. ``ratio_to_bare_loop`` = the median, over the
updates, of bare time / engine time: by CPU seconds of all ranks (seconds on an idle machine), and by seconds of the slowest rank.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.megatron_loop import BareLoop, Rows, matrices, packs
from bench.update import BUDGET, CLIP, RATE, VOCABULARY, NegativeLogLikelihood, make_batch, save_model
from engines.config import EngineConfig, LayoutConfig, OptimizerConfig
from engines.registry import EngineRegistry
from engines.training.batch import PackedBatch
from tests.support.ranks import run_ranks

SEQUENCES, LENGTH = 64, 128
TOLERANCE = 1e-5
"""Relative, of a loss or a gradient norm."""
UPDATES = 11
Seconds = list[tuple[float, float]]
"""Of each update, (bare, engine)."""


@dataclass(frozen=True)
class Timed:
    """What one rank measured."""

    cpu: Seconds
    wall: Seconds
    difference: float
    """The largest relative one, of losses and gradient norms."""


def update(updates: int = UPDATES) -> dict[str, Any]:
    """Both layouts, both batches."""
    result: dict[str, Any] = {"updates": updates, "token_budget": BUDGET}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for name, ranks in (("one_rank", 1), ("tensor_parallel_2", 2)):
            layout = LayoutConfig(tensor_parallel_size=ranks)
            result[name] = {}
            for batch in ("equal", "long_tailed"):
                timed = run_ranks(ranks, in_turn, Path(folder), layout, batch, updates, timeout=1_800)
                result[name][batch] = told(timed)
                print(f"  {name}, {batch}: {result[name][batch]}", flush=True)
    return result


def in_turn(folder: Path, layout: LayoutConfig, batch_name: str, updates: int) -> Timed:
    """On each rank: time both sides, one update after the other; the first of each warms up.

    Raises:
        ValueError: the two sides do not compute the same.
    """
    batch, micro_batches = (equal_batch(), matrices) if batch_name == "equal" else (make_batch(), packs)
    rows = micro_batches(list(batch.tokens["input_ids"].split(batch.lengths.tolist())))
    engine = make_engine(folder, layout)
    with engine.scope():
        bare = BareLoop(folder, layout, engine.chunks[0].state_dict())
    cpu, wall, difference = [], [], 0.0
    with engine.train_mode():
        for _ in range(updates + 1):
            expected, bare_cpu, bare_wall = timed(lambda: bare_update(engine, bare, rows))
            got, engine_cpu, engine_wall = timed(lambda: engine_update(engine, batch))
            cpu.append((bare_cpu, engine_cpu))
            wall.append((bare_wall, engine_wall))
            pairs = zip(expected, got, strict=True)
            difference = max([difference, *(abs(a - b) / abs(a) for a, b in pairs if b is not None)])
    if difference > TOLERANCE:
        raise ValueError(f"losses of engine and bare loop differ by {difference:.1e}: timings mean nothing")
    return Timed(cpu[1:], wall[1:], difference)


def bare_update(engine: Any, bare: BareLoop, rows: list[Rows]) -> tuple[float, float]:
    """(loss, gradient norm)"""
    with engine.scope():
        return bare.update(rows)


def engine_update(engine: Any, batch: PackedBatch) -> tuple[float | None, float | None]:
    """(loss, gradient norm); None where this rank tells none."""
    metrics = engine.train_batch(batch, NegativeLogLikelihood())
    return tuple(metrics[name][0] if name in metrics else None for name in ("loss", "grad_norm"))


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """(result, CPU seconds, seconds), begun on all ranks together."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def told(ranks: list[Timed]) -> dict[str, Any]:
    """The numbers of all ranks as one."""
    cpu = _over_ranks(sum, [rank.cpu for rank in ranks])
    wall = _over_ranks(max, [rank.wall for rank in ranks])
    bare, engine = (round(statistics.median(side), 3) for side in zip(*cpu, strict=True))
    return {
        "ratio_to_bare_loop": round(statistics.median(a / b for a, b in cpu), 3),
        "ratio_by_wall_clock": round(statistics.median(a / b for a, b in wall), 3),
        "cpu_seconds": {"bare": bare, "engine": engine},
        "largest_difference": max(rank.difference for rank in ranks),
    }


def _over_ranks(together: Callable[[tuple[float, ...]], float], ranks: list[Seconds]) -> Seconds:
    return [tuple(map(together, zip(*update, strict=True))) for update in zip(*ranks, strict=True)]


def equal_batch() -> PackedBatch:
    """All tokens but the first of each sequence are loss tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = list(torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=generator))
    return PackedBatch.from_sequences(
        {"input_ids": ids, "loss_mask": [(torch.arange(LENGTH) > 0).float() for _ in ids]}
    )


def make_engine(folder: Path, layout: LayoutConfig) -> Any:
    """The megatron engine; the ranks have met."""
    config = EngineConfig(backend="megatron", device="cpu", layout=layout, token_budget=BUDGET)
    engine = EngineRegistry.new(
        "language_model",
        "megatron",
        "cpu",
        config=config,
        model_path=folder,
        optimizer=OptimizerConfig(lr=RATE, clip_grad_norm=CLIP),
    )
    engine.initialize()
    return engine
