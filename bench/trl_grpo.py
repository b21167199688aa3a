"""Baseline: the throughput of TRL's GRPOTrainer on one CPU thread, in the fastest settings found for it.

Usage: `python trl_grpo.py --steps 3 --seed 0 --output OUT.json`. The workload (model, tokenizer, prompts) is
in `workload.py`. A step samples 8 completions for each of 16 prompts and makes one AdamW update from them, in
fp32 and without a KL term. One warm-up step is left out. `completion_tokens` counts sampled tokens up to and
including EOS and no padding; `seconds` is the wall time from the end of the warm-up to the end of the last
step.

Requirements: torch==2.13.0, transformers==5.18.0, trl==1.16.0, accelerate==1.15.0, datasets==4.7.0.

How the settings were found, by single timed steps on a shared two-core machine. Wall times there varied by a
factor of two and more, so sizes and attention were ranked by the processor time of the process
(`*cpu_seconds` in the output); the other comparisons are wall times of single runs, and coarse.

- Micro-batch size 8, 16, 32, 64: 10.1, 11.0, 10.9, 12.9 processor seconds for the update, and a peak resident
  set of 0.96, 1.36, 2.21, 3.58 GB. Hence 8 is the default, by a small margin in time and a large one in
  memory; 128 was not measured to the end. The size changes only the update: TRL samples the whole rollout of
  128 completions at once in any case.
- Attention: sdpa. Eager attention took within 3 % of the time in an isolated forward and backward pass with
  micro-batches of 8 and 16 and about a quarter more in the one pass measured at 32, and needs more memory.
- The cache of generation: the default, dynamic one. A static cache (`cache_implementation`) made generation
  about 1.8 times slower, presumably because attention then covers the full length from the first token on.
- Sampling: the default `generate`. Continuous batching (`use_transformers_continuous_batching`) runs on CPU
  and spends no work on finished completions, but with default settings its generation was about 2.7 times
  slower and it took 12 GB of memory. A hand-sized cache was not tried.
- `torch_compile` gave no gain that stood out from the noise. It is off.
- glibc's malloc settings (no trimming, no mmap) gave no gain that stood out from the noise. They are left
  alone.
- On by reasoning, not by a measurement: fused AdamW, no gradient checkpointing, no logging, saving,
  evaluation or reporting, no data loader workers, no shuffling. Dropout is 0 in the model's configuration
  already. `rollout_func` and vLLM would replace TRL's own sampling and were not considered.

To repeat the search, pass GRPOConfig fields: `--override '{"cache_implementation": "static"}'`.
"""

from __future__ import annotations

import os

# Read when torch and the tokenizers are imported, so they come before those imports.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import json
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import (
    MAX_COMPLETION_LENGTH,
    PROMPTS_PER_STEP,
    SAMPLES_PER_PROMPT,
    build_model,
    build_tokenizer,
    even_share,
    prompt_text,
    prompts,
)

ROLLOUT_SIZE = PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
WARM_UP_STEPS = 1
MICRO_BATCH_SIZES = (8, 16, 32, 64, 128)
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "tokenizers", "numpy")
Times = tuple[float, float]


def now() -> Times:
    """Return the wall clock and the processor time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def elapsed(starts: list[Times], stops: list[Times]) -> Times:
    """Return the wall and processor seconds summed over the intervals from `starts` to `stops`."""
    pairs = list(zip(starts, stops, strict=True))
    return sum(b[0] - a[0] for a, b in pairs), sum(b[1] - a[1] for a, b in pairs)


@dataclass
class Recorder(TrainerCallback):
    """Clock and token counter of one run, fed only through public hooks of the trainer.

    The trainer samples a whole rollout between the beginning of a step and the call of the reward function,
    and does everything else (advantages, forward, backward, optimizer) between that call and the end of the
    step. The three times of each step therefore separate generation from update without touching the trainer.

    Each time is a pair of the wall clock and the processor time of the process. The result is the wall time;
    on a machine with other users the processor time is the steadier of the two and shows when a run was
    disturbed.
    """

    begins: list[Times] = field(default_factory=list)
    rewards: list[Times] = field(default_factory=list)
    ends: list[Times] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the time before the rollout."""
        self.begins.append(now())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time after the optimizer's step."""
        self.ends.append(now())

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Score the completions; the ids end with EOS (or at the cap), so they count the true tokens."""
        self.rewards.append(now())
        self.tokens.append(sum(len(ids) for ids in completion_ids))
        return [even_share(ids) for ids in completion_ids]

    def summary(self) -> dict[str, float | int]:
        """Return tokens and seconds of the steps after the warm-up."""
        timed = slice(WARM_UP_STEPS, None)
        tokens = sum(self.tokens[timed])
        seconds, cpu_seconds = elapsed(self.ends[WARM_UP_STEPS - 1 : -1], self.ends[timed])
        generation, generation_cpu = elapsed(self.begins[timed], self.rewards[timed])
        update, update_cpu = elapsed(self.rewards[timed], self.ends[timed])
        return {
            "completion_tokens": tokens,
            "seconds": seconds,
            "completion_tokens_per_second": tokens / seconds,
            "generation_seconds": generation,
            "update_seconds": update,
            "cpu_seconds": cpu_seconds,
            "generation_cpu_seconds": generation_cpu,
            "update_cpu_seconds": update_cpu,
            "mean_completion_length": tokens / (len(self.tokens[timed]) * ROLLOUT_SIZE),
        }


def trainer_config(directory: str, args: argparse.Namespace) -> GRPOConfig:
    """Return the settings of the baseline (see the module's docstring for the search behind them)."""
    settings: dict[str, Any] = {
        "output_dir": directory,
        "seed": args.seed,
        "max_steps": args.steps + WARM_UP_STEPS,
        # The workload.
        "per_device_train_batch_size": args.micro_batch_size,
        "gradient_accumulation_steps": ROLLOUT_SIZE // args.micro_batch_size,
        "num_generations": SAMPLES_PER_PROMPT,
        "num_iterations": 1,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        # The machine.
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "shuffle_dataset": False,
        # No bookkeeping in the timed region.
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_completions": False,
    }
    return GRPOConfig(**(settings | args.override))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train for the warm-up and the timed steps and return the measurements."""
    recorder = Recorder()
    texts = [prompt_text(ids) for ids in prompts(args.seed, PROMPTS_PER_STEP * (args.steps + WARM_UP_STEPS))]
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=build_model(args.seed, args.attention),
            reward_funcs=recorder.reward,
            args=trainer_config(directory, args),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=build_tokenizer(Path(directory) / "tokenizer"),
            callbacks=[recorder],
        )
        trainer.train()
    return recorder.summary()


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process; the unit of getrusage differs between systems."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Measure TRL's GRPOTrainer on one CPU thread.")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one warm-up step")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights, the prompts and the sampling"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--micro-batch-size", type=int, choices=MICRO_BATCH_SIZES, default=MICRO_BATCH_SIZES[0]
    )
    parser.add_argument("--attention", default="sdpa", help="attention implementation of transformers")
    parser.add_argument("--override", type=json.loads, default={}, help="JSON object of GRPOConfig fields")
    return parser.parse_args()


def main() -> None:
    """Measure once and write the result."""
    args = parse_args()
    torch.set_num_threads(1)
    result = run(args)
    result |= {
        "peak_rss_bytes": peak_rss_bytes(),
        "steps": args.steps,
        "seed": args.seed,
        "micro_batch_size": args.micro_batch_size,
        "versions": {name: version(name) for name in PACKAGES},
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
