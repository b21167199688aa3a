"""How much of a save's time is hidden when it is done in the background.

    python -m bench.saves --output results/bench/saves.json

GRPO of a Qwen3 of 20 million parameters, whose state is 250 MB, in this process. The same three steps are done again and again from one
state: without any save, with a save after the first two that is waited for, and with the same saves in the background (the last of
which is waited for after the third step, if it is not done). In turn, so that other work on the machine meets all three; the steps are
the same bits, and so must be the states.

``hidden`` = 1 - (seconds in which the steps wait for a save in the background) / (seconds of a save that is waited for), over all rounds.
``steps_beside_none`` is how long the steps took beside those of no save: a core that hashes and writes is missing elsewhere.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from engines.checkpoint import StateStore, read_state
from workflow.campaign.code import source_root
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.slice import Slice
from workflow.data import PromptEncoder, load_problems
from workflow.manifest import write_json
from workflow.rl.rewards import Rewarder
from workflow.rl.saving import StateSaver
from workflow.rl.trainer import PPOTrainer
from workflow.stages.convert import convert
from workflow.stages.train import worker_groups

STEPS = 3
WAYS = ("none", "waited", "background")
CAMPAIGN = {
    "name": "saves",
    "common": [
        "model=tiny-qwen3",
        "model.architecture.hidden_size=512",
        "model.architecture.intermediate_size=1536",
        "model.architecture.num_hidden_layers=6",
        "model.architecture.num_attention_heads=8",
        "model.architecture.head_dim=64",
        "algorithm=grpo",
        "algorithm.steps=8",
        "algorithm.prompts_per_step=4",
        "algorithm.samples_per_prompt=4",
        "algorithm.mini_batch_size=16",
        "rollout.max_new_tokens=32",
        "data.heldout_size=8",
        "evaluate.problems=8",
    ],
    "runs": {"grpo": []},
}


def main() -> None:
    """Measure, write one JSON file and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("results/bench/saves.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as made, trainer_in(Path(made)) as trainer:
        result = measure(trainer, Path(made), args.rounds)
    write_json(args.output, result)
    print(json.dumps(result, indent=2))


@contextmanager
def trainer_in(folder: Path) -> Iterator[PPOTrainer]:
    """A trainer before its first step, with an untrained model."""
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump(CAMPAIGN))
    plan, (run,) = plan_campaign(read_options({"campaign": str(path)}), source_root())
    convert(run.config.model, folder / "model", seed=run.config.seed, data=run.config.data)
    config = Slice("train", plan.stages[plan.runs["grpo"].stages["train"]].config)
    with worker_groups(config, folder / "model", config.algorithm.steps) as groups:
        yield PPOTrainer(
            run="bench",
            algorithm=config.algorithm,
            rollout_config=config.rollout,
            data=config.data,
            problems=load_problems(config.data, "train"),
            encoder=PromptEncoder(folder / "model"),
            rewarder=Rewarder(config.reward, config.data),
            groups=groups,
        )


def measure(trainer: PPOTrainer, folder: Path, rounds: int) -> dict[str, Any]:
    """All ways in turn, after a round that is not counted: it fills the buffers."""
    trainer.step()
    begin = trainer.save(StateStore(folder / "begin"))
    steps: dict[str, list[float]] = defaultdict(list)
    waits: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        digests = {}
        for way in WAYS:
            trainer.load(begin)
            store = StateStore(folder / way)
            step_seconds, wait_seconds = train(trainer, store, way)
            digests[way] = [read_state(path)["digest"] for path in sorted(store.folder.glob("step*"))]
            shutil.rmtree(store.folder, ignore_errors=True)
            if number:
                steps[way].append(step_seconds)
                waits[way].append(wait_seconds)
        if digests["waited"] != digests["background"] or len(digests["waited"]) != STEPS - 1:
            raise SystemExit(f"the states are not the same: {digests}")
    return {
        "state_bytes": sum(file["bytes"] for file in read_state(begin)["files"].values()),
        "step_seconds": {way: sum(steps[way]) / rounds / STEPS for way in WAYS},
        "wait_seconds": {way: sum(waits[way]) / rounds / (STEPS - 1) for way in WAYS},
        "steps_beside_none": {way: sum(steps[way]) / sum(steps["none"]) for way in WAYS},
        "hidden": 1 - sum(waits["background"]) / sum(waits["waited"]),
    }


def train(trainer: PPOTrainer, store: StateStore, way: str) -> tuple[float, float]:
    """Seconds in the steps, and in which they waited for their saves."""
    stepping = waiting = 0.0
    with StateSaver(trainer, store, way == "background", lambda step: None, lambda: None) as saver:
        for step in range(STEPS):
            begun = time.perf_counter()
            trainer.step()
            done = time.perf_counter()
            if way != "none":
                saver.check()
                saver.save(wait=False) if step < STEPS - 1 else saver.finish()
            stepping += done - begun
            waiting += time.perf_counter() - done
    return stepping, waiting


if __name__ == "__main__":
    main()
