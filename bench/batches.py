"""How evenly batches are cut: over data-parallel ranks, and into micro-batches. Counts only, so it is the same on every machine.

The workload: steps of 16 prompts x 8 samples with the lengths of bench/workload.py, a prompt of 32 tokens and a completion that ends
at each token with probability 1/64 and is cut at 256. Each step is one mini-batch on 4 data-parallel ranks with a token budget of 2,048.

- useful: tokens / rows of the matrix products of all ranks. Nothing is padded there, so all that is lost are the fillers of ranks that
  need fewer micro-batches than others;
- useful_in_attention: tokens / rows that attention computes, where sequences of similar lengths are padded to their longest (all
  devices but those on which torch's kernel for variable lengths serves);
- imbalance: cost of the dearest rank / mean cost of the ranks - 1, where cost is what the balancing weighs (matrices and attention);
- idle: share of the ranks' time lost when they meet after every micro-batch, each as long as its dearest one;
- beside it the same of other ways: sequences dealt in order, longest first to the cheapest rank (greedy), and micro-batches of 8
  sequences padded to their longest.

    python -m bench.batches --output results/bench/batches.json
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch

from bench.workload import (
    MAX_COMPLETION_LENGTH,
    PROMPT_LENGTH,
    PROMPTS_PER_STEP,
    SAMPLES_PER_PROMPT,
    VOCABULARY_SIZE,
)
from engines.config import EngineConfig
from engines.training.batch import MicroBatch, PackedBatch, split_micro_batches
from engines.training.batch.split import sequence_costs
from engines.training.packed_attention import Segments
from engines.workers.dispatch import spread

RANKS, BUDGET = 4, 2_048


def step_lengths(seed: int) -> list[int]:
    """Tokens of the sequences of one step: geometric completions behind prompts of one length."""
    stream = random.Random(seed)
    rate = math.log(1 - 1 / VOCABULARY_SIZE)
    return [
        PROMPT_LENGTH + min(1 + int(math.log(1 - stream.random()) / rate), MAX_COMPLETION_LENGTH)
        for _ in range(PROMPTS_PER_STEP * SAMPLES_PER_PROMPT)
    ]


def micro_batches(lengths: Sequence[int], shares: Sequence[Sequence[int]]) -> list[list[MicroBatch]]:
    """What each rank computes, equally many on all."""
    config = EngineConfig(token_budget=BUDGET)
    batches = [
        PackedBatch.from_sequences({"loss_mask": [torch.zeros(lengths[i]) for i in share]})
        for share in shares
    ]
    most = max(len(split_micro_batches(batch, config, forward_only=False)) for batch in batches)
    return [split_micro_batches(batch, config, forward_only=False, multiple=most) for batch in batches]


def attention_rows(batch: PackedBatch) -> int:
    """Rows that attention computes of a micro-batch, padding included."""
    return sum(count * length for count, length in Segments(batch.cu_seqlens, torch.device("cpu")).groups)


def greedy(costs: Sequence[int]) -> list[list[int]]:
    """Longest first, each to the rank that has the least so far."""
    shares: list[list[int]] = [[] for _ in range(RANKS)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        min(shares, key=lambda share: sum(costs[j] for j in share)).append(i)
    return shares


def imbalance(costs: Sequence[int], shares: Sequence[Sequence[int]]) -> float:
    """Cost of the dearest rank above the mean of all."""
    loads = [sum(costs[i] for i in share) for share in shares]
    return max(loads) / mean(loads) - 1


def measure(lengths: Sequence[int]) -> dict[str, float]:
    """All numbers of one step."""
    costs = sequence_costs(lengths)
    shares = spread(range(len(lengths)), lengths, RANKS)
    split = micro_batches(lengths, shares)
    batches = [micro.batch for rank in split for micro in rank]
    loads = [[sum(sequence_costs(micro.batch.lengths.tolist())) for micro in rank] for rank in split]
    waited = sum(max(together) for together in zip(*loads, strict=True)) * RANKS
    padded = sum(max(lengths[i : i + 8]) * len(lengths[i : i + 8]) for i in range(0, len(lengths), 8))
    return {
        "useful": sum(lengths) / sum(batch.num_tokens for batch in batches),
        "useful_in_attention": sum(lengths) / sum(map(attention_rows, batches)),
        "useful_padded": sum(lengths) / padded,
        "imbalance": imbalance(costs, shares),
        "imbalance_in_order": imbalance(costs, [range(r, len(lengths), RANKS) for r in range(RANKS)]),
        "imbalance_greedy": imbalance(costs, greedy(costs)),
        "idle": 1 - sum(map(sum, loads)) / waited,
        "fullest_micro_batch": max(batch.num_tokens for batch in batches) / BUDGET,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("results/bench/batches.json"))
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    steps = [measure(step_lengths(seed)) for seed in range(arguments.steps)]
    names = list(steps[0])
    result = {
        "mean": {name: mean(step[name] for step in steps) for name in names},
        "largest": {name: max(step[name] for step in steps) for name in names},
        "smallest": {name: min(step[name] for step in steps) for name in names if name.startswith("useful")},
        "ranks": RANKS,
        "token_budget": BUDGET,
        "steps": arguments.steps,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
