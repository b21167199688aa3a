"""``python -m workflow.stages.layout_verify``: what ``baton preflight --verify`` runs, in a process of its own.

A layout and one process train a shrunken model of the same architecture on CPU ranks for three steps, from equal weights on equal
sequences; losses and gradient norms must agree. Ranks are forked after the framework is loaded, and meet in a file.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOLERANCE = 1e-5
"""Relative, of a loss or a gradient norm in float32."""
STEPS = 3
TIMEOUT_S = 300.0
_LENGTHS = (3, 17, 9, 24, 12, 30, 8, 21)


def shrunken(config: Mapping[str, Any], layout: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of the same architecture that the layout divides as it would the large one.

    Args:
        layout: fields of LayoutConfig.
    """
    tensor, stages = layout["tensor_parallel_size"], layout["pipeline_parallel_size"]
    layers = stages * layout["virtual_pipeline_parallel_size"]
    shared = math.lcm(tensor, layout["context_parallel_size"])
    small = {
        "model_type": config["model_type"],
        "hidden_size": 16 * shared,
        "intermediate_size": 24 * shared,
        "num_hidden_layers": max(2, layers),
        "num_attention_heads": 2 * shared,
        "num_key_value_heads": shared,
        "head_dim": 8,
        "vocab_size": 32 * shared,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }
    if str(config["model_type"]).endswith("_moe"):
        small |= {
            "num_experts": 2 * layout["expert_parallel_size"],
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24 * layout["expert_tensor_parallel_size"],
            "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        }
    return small


def main() -> int:
    """Train both ways and print what differs; 0 when they agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", type=Path, help="JSON: config, and engine with its layout")
    options = parser.parse_args()
    question = json.loads(options.question.read_text(encoding="utf-8"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore")
    try:
        return _verify(question["config"], question["engine"])
    except ImportError as error:
        print(
            f"refused: this environment lacks {error.name}: it cannot train with engine={question['engine']['backend']}"
        )
    except (RuntimeError, OSError, ValueError) as error:
        print(f"failed: {type(error).__name__}: {error}")
    return 1


def _verify(config: dict[str, Any], engine: dict[str, Any]) -> int:
    import torch

    from engines.config import EngineConfig
    from engines.registry import EngineRegistry

    torch.set_num_threads(1)  # before the ranks are forked: a pool of threads does not survive that
    asked = EngineConfig(**engine)
    EngineRegistry.get_engine_cls("language_model", asked.backend, "cpu")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        save_model(shrunken(config, engine["layout"]), folder / "model")
        alone = EngineConfig(**{**engine, "layout": {}})
        expected = train(alone, folder / "model", folder / "alone")
        found = train(asked, folder / "model", folder / "together")
    largest = 0.0
    for step, (one, several) in enumerate(zip(expected, found, strict=True)):
        for name, right in one.items():
            error = abs(several[name] - right) / max(abs(right), 1e-12)
            largest = max(largest, error)
            print(
                f"step {step} {name}: one process {right:.7g}, {asked.layout.world_size} ranks {several[name]:.7g}"
            )
    agree = largest <= TOLERANCE
    print(f"{'verified' if agree else 'DIFFERS'}: relative difference {largest:.1e}, allowed {TOLERANCE:.0e}")
    return 0 if agree else 1


def save_model(config: Mapping[str, Any], folder: Path) -> None:
    """A random model of ``config``; norms and biases are not what they start as, which would hide what is done with them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def train(engine: Any, model: Path, meeting: Path) -> list[dict[str, float]]:
    """Loss and gradient norm of each step, on as many forked ranks as the layout has.

    Raises:
        RuntimeError: a rank failed, with its error, or did not end in time.
    """
    context = multiprocessing.get_context("fork")
    pipes, ranks = [], []
    for rank in range(engine.layout.world_size):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, engine, model, meeting, send), daemon=True)
        process.start()
        send.close()
        pipes.append(receive)
        ranks.append(process)
    try:
        answers = [_answer(rank, pipe) for rank, pipe in enumerate(pipes)]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [_merged([answer[step] for answer in answers]) for step in range(STEPS)]


def _answer(rank: int, pipe: Any) -> list[dict[str, tuple[float, float]]]:
    try:
        answer = pipe.recv() if pipe.poll(TIMEOUT_S) else f"no end after {TIMEOUT_S:.0f} s"
    except EOFError:
        answer = "it died"
    if isinstance(answer, str):
        raise RuntimeError(f"rank {rank}: {answer}")
    return answer


def _merged(metrics: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    names = ("loss", "grad_norm")
    sums = {name: [one[name] for one in metrics if name in one] for name in names}
    return {name: sum(s for s, _ in pairs) / sum(count for _, count in pairs) for name, pairs in sums.items()}


def _rank(rank: int, config: Any, model: Path, meeting: Path, pipe: Any) -> None:
    try:
        pipe.send(_steps(rank, config, model, meeting))
        time.sleep(
            TIMEOUT_S
        )  # until the parent ends it: its end would break what a slower rank still has to receive
    except BaseException as error:  # told to the parent, whatever it is
        pipe.send(f"{type(error).__name__}: {error}")


def _steps(rank: int, config: Any, model: Path, meeting: Path) -> list[dict[str, tuple[float, float]]]:
    import torch
    import torch.distributed as dist

    from engines.config import OptimizerConfig
    from engines.registry import EngineRegistry
    from engines.training.batch import PackedBatch
    from engines.training.process_group import init_process_group
    from workflow.rl.losses import SftLoss

    size = config.layout.world_size
    init_process_group("cpu", rank, size, dist.FileStore(str(meeting), size), TIMEOUT_S)
    engine_class = EngineRegistry.get_engine_cls("language_model", config.backend, "cpu")
    engine = engine_class(config, model, optimizer=OptimizerConfig(lr=1e-3, eps=1e-6), total_steps=STEPS)
    engine.initialize()
    generator = torch.Generator().manual_seed(0)
    done = []
    with engine.train_mode():
        for _ in range(STEPS):
            rows = [torch.randint(0, 32, (length,), generator=generator) for length in _LENGTHS * 2]
            own = rows[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
            fields = {"input_ids": own, "loss_mask": [(torch.arange(len(row)) > 0).float() for row in own]}
            done.append(engine.train_batch(PackedBatch.from_sequences(fields), SftLoss()))
    dist.barrier()
    return done


if __name__ == "__main__":
    sys.exit(main())
