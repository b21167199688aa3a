"""Growth: the time of a step in the number of its tokens, and memory over many iterations.

python -m bench.growth --output results/bench/growth.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import tempfile
import time
from pathlib import Path

import torch

from bench.grpo import ROLE, iteration, worker_group
from bench.workload import VOCABULARY_SIZE, build_model, prompts
from engines.training.batch import PackedBatch
from engines.workers.group import WorkerGroup
from workflow.rl.batches import border
from workflow.rl.losses import SftLoss

LENGTH = 128
SEQUENCES = (16, 32, 64, 128)
REPEATS = 3
PROMPTS = 4
SETTLED = 50
"""Iterations after which memory must not grow: allocators and caches have seen every size by then."""


def main() -> None:
    """Measure both and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("results/bench/growth.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        build_model(0).save_pretrained(folder)
        with worker_group(Path(folder)) as group:
            result = {"step_time": step_time(group), "memory": memory(group, args.iterations)}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def step_time(group: WorkerGroup) -> dict[str, object]:
    """CPU seconds of an update for growing numbers of tokens; the exponent of the fitted power law is 1 when linear."""
    points = []
    for count in SEQUENCES:
        batch = random_batch(count)
        update(group, batch)
        started = time.process_time()
        for _ in range(REPEATS):
            update(group, batch)
        points.append((count * LENGTH, (time.process_time() - started) / REPEATS))
    logs = torch.tensor([[math.log(tokens), math.log(seconds)] for tokens, seconds in points])
    centred = logs - logs.mean(0)
    exponent = (centred[:, 0] * centred[:, 1]).sum() / centred[:, 0].square().sum()
    return {
        "points": [{"tokens": tokens, "seconds": seconds} for tokens, seconds in points],
        "exponent": float(exponent),
    }


def memory(group: WorkerGroup, iterations: int) -> dict[str, object]:
    """Resident bytes after each of ``iterations`` iterations of GRPO (rollout, reward, update, sync).

    Growth is the slope of a line fitted to the iterations after ``SETTLED``, with its standard error: the lengths of
    the samples are random, so no two single iterations can be compared.
    """
    resident = []
    for step in range(iterations):
        iteration(group, step, prompts(step, PROMPTS))
        resident.append(resident_bytes())
    slope, error = fitted_slope(resident[min(SETTLED, iterations // 2) :])
    return {
        "iterations": iterations,
        "first_bytes": resident[0],
        "last_bytes": resident[-1],
        "largest_bytes": max(resident),
        "growth_per_iteration_bytes": slope,
        "growth_per_iteration_standard_error": error,
        "every_tenth": resident[::10],
    }


def fitted_slope(values: list[int]) -> tuple[float, float]:
    """Slope of the least-squares line through ``values`` at 0, 1, 2 and so on, and the slope's standard error."""
    y = torch.tensor(values, dtype=torch.float64)
    x = torch.arange(len(values), dtype=torch.float64)
    x = x - x.mean()
    slope = (x * y).sum() / x.square().sum()
    residuals = y - y.mean() - slope * x
    error = (residuals.square().sum() / (len(values) - 2) / x.square().sum()).sqrt()
    return float(slope), float(error)


def random_batch(sequences: int) -> PackedBatch:
    """Sequences of ``LENGTH`` random tokens, all but the first of each in the loss."""
    generator = torch.Generator().manual_seed(sequences)
    ids = torch.randint(VOCABULARY_SIZE, (sequences, LENGTH), generator=generator)
    mask = torch.ones(LENGTH)
    mask[0] = 0
    return PackedBatch.from_sequences({"input_ids": list(ids), "loss_mask": [mask] * sequences})


def update(group: WorkerGroup, batch: PackedBatch) -> None:
    """One optimizer step."""
    group.update(ROLE, border(batch), SftLoss(), mini_batch_size=len(batch))


def resident_bytes() -> int:
    """Of this process, without what its allocator keeps of freed blocks: that follows the largest batch so far."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
