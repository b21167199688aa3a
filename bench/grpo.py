"""GRPO end to end (rollout, reward, update) in completion tokens per second, against TRL's GRPOTrainer in the same run.

Both train the same random model on the same prompts, on one thread in float32, each in a process of its own, so that
peak memory is each one's own. Ours is what a run uses: the fsdp2 engine on one rank, the rollout, weight sync, and the
GRPO advantages and loss of ``workflow/rl``.

    python -m bench.grpo --trl-python .venv-trl/bin/python --output results/bench/grpo.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET_RATIO = 1.5
HERE = Path(__file__).parent
ROLE = "actor"


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trl-python",
        type=Path,
        help="interpreter of an environment with TRL; without it, only ours is measured",
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one to warm up")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling")
    parser.add_argument("--output", type=Path, default=Path("results/bench/grpo.json"))
    parser.add_argument("--ours-only", action="store_true", help="measure ours in this very process")
    return parser.parse_args()


def main() -> None:
    """Measure both and write one JSON file."""
    args = parse_args()
    if args.ours_only:
        result = measure(args.steps, args.seed)
    else:
        result = compare(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run each side in its own process, one after the other."""
    result: dict[str, Any] = {"target_ratio": TARGET_RATIO}
    result["ours"] = run([sys.executable, "-m", "bench.grpo", "--ours-only"], args)
    if args.trl_python is not None:
        result["trl"] = run([str(args.trl_python), str(HERE / "trl_grpo.py")], args)
        speed, memory = "completion_tokens_per_second", "peak_rss_bytes"
        result["ratio_to_trl"] = result["ours"][speed] / result["trl"][speed]
        # On a busy machine this ratio is the steadier one: both sides run on one thread.
        per_cpu_second = [
            side["completion_tokens"] / side["cpu_seconds"] for side in (result["ours"], result["trl"])
        ]
        result["cpu_ratio_to_trl"] = per_cpu_second[0] / per_cpu_second[1]
        result["memory_ratio_to_trl"] = result["ours"][memory] / result["trl"][memory]
    return result


def run(command: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """The JSON that ``command`` writes, on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        options = ["--steps", str(args.steps), "--seed", str(args.seed), "--output", str(output)]
        subprocess.run([*command, *options], check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())


def measure(steps: int, seed: int) -> dict[str, Any]:
    """Ours: one warm-up step, then ``steps`` timed ones."""
    import resource

    import torch

    from bench.workload import PROMPTS_PER_STEP, build_model, prompts

    torch.set_num_threads(1)
    all_prompts = prompts(seed, PROMPTS_PER_STEP * (steps + 1))
    with tempfile.TemporaryDirectory() as folder:
        build_model(seed).save_pretrained(folder)
        with worker_group(Path(folder)) as group:
            times = [
                iteration(group, step, all_prompts[PROMPTS_PER_STEP * step : PROMPTS_PER_STEP * (step + 1)])
                for step in range(steps + 1)
            ][1:]
    total = {name: sum(step[name] for step in times) for name in times[0]}
    seconds = total["generation_seconds"] + total["update_seconds"]
    return {
        **total,
        "seconds": seconds,
        "cpu_seconds": total["generation_cpu_seconds"] + total["update_cpu_seconds"],
        "completion_tokens_per_second": total["completion_tokens"] / seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "steps": steps,
        "seed": seed,
    }


def worker_group(model: Path) -> Any:
    """The actor on one fsdp2 rank in this process, with its rollout."""
    from bench.workload import MAX_COMPLETION_LENGTH
    from engines.config import EngineConfig, OptimizerConfig, RolloutConfig
    from engines.workers.group import build_groups
    from engines.workers.spec import RoleSpec

    engine = EngineConfig(backend="fsdp2", device="cpu", token_budget=2048)
    group = build_groups([RoleSpec(ROLE, "language_model", engine, model, OptimizerConfig(lr=1e-6))])[ROLE]
    group.add_rollout(RolloutConfig(max_new_tokens=MAX_COMPLETION_LENGTH), model)
    return group


def iteration(group: Any, step: int, prompts: list[list[int]]) -> dict[str, float]:
    """One step of GRPO: sample, score, compare within each prompt's samples, update, sync."""
    import torch

    from bench.workload import MAX_COMPLETION_LENGTH, SAMPLES_PER_PROMPT, even_share
    from engines.rollout.base import Request, SamplingParams
    from engines.streams import stream_key
    from workflow.campaign.schema import AlgorithmConfig
    from workflow.rl.advantages.groups import grpo
    from workflow.rl.batches import border, on_last_loss_token, rollout_batch
    from workflow.rl.losses import PolicyLoss

    started, cpu_started = time.perf_counter(), time.process_time()
    places = [(i, sample) for i in range(len(prompts)) for sample in range(SAMPLES_PER_PROMPT)]
    requests = [Request(prompts[i], stream_key("bench", step, i, sample)) for i, sample in places]
    responses = group.generate(requests, SamplingParams(max_new_tokens=MAX_COMPLETION_LENGTH))
    generated, cpu_generated = time.perf_counter(), time.process_time()
    batch = rollout_batch([prompts[i] for i, _ in places], responses, [i for i, _ in places])
    scores = torch.tensor([even_share(response.token_ids) for response in responses], dtype=torch.float64)
    algorithm = AlgorithmConfig(name="grpo")
    batch = batch.with_tokens(
        old_log_probs=batch.tokens["rollout_log_probs"], rewards=on_last_loss_token(scores, batch)
    )
    batch = batch.with_tokens(**grpo(batch, algorithm))
    group.update(
        ROLE,
        border(batch, "old_log_probs", "advantages"),
        PolicyLoss(algorithm),
        mini_batch_size=len(requests),
    )
    group.sync_weights(ROLE)
    return {
        "completion_tokens": sum(len(response.token_ids) for response in responses),
        "generation_seconds": generated - started,
        "update_seconds": time.perf_counter() - generated,
        "generation_cpu_seconds": cpu_generated - cpu_started,
        "update_cpu_seconds": time.process_time() - cpu_generated,
    }


if __name__ == "__main__":
    main()
