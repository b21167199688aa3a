"""What Megatron costs here: an update of the engine beside a bare loop, and converting a model beside copying its weights.

``update`` is bench/megatron_update.py. ``conversion``: a dense Qwen3 of 0.5 GB with random float32 weights. Three things on one rank, each
read, written and made durable in the same run, in turn, the best of seven:

- copy: safetensors' own ``load_file`` and ``save_file`` of the same weights;
- to_megatron, to_hf: the conversion, without imports and without verification.

``ratio_to_copy`` = GB/s of the conversion / GB/s of the copy. Beside it: the time of the verification, and the most memory that a rank
took above what the framework takes, in parts of the weights.

The best, because a virtual machine may give memory that is free back to its host: to get it again costs more than all of the work, and
falls on whoever comes next. So each thing's last result is removed right before it is made anew.

    python -m bench.megatron --output results/bench/megatron.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.megatron_update import update
from engines.checkpoint.store import make_durable
from workflow.data.tokenizer import save_tokenizer, train_tokenizer
from workflow.stages.conversion import Measured, convert_checkpoint

REPEATS = 7


def main() -> None:
    """Measure both, into one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/bench/megatron.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # what Megatron says of packages that are not there
    result = {"update": update()}
    with tempfile.TemporaryDirectory() as folder:
        result["conversion"] = conversion(Path(folder))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


def conversion(folder: Path) -> dict[str, Any]:
    """Copy and convert a model in ``folder``, in turn."""
    source = build_model(folder / "source")
    copied, checkpoint, back = folder / "copied", folder / "megatron", folder / "hf"
    copies, runs = [], {"to_megatron": [], "to_hf": []}
    for _ in range(REPEATS):
        for name, origin, target in (("to_megatron", source, checkpoint), ("to_hf", checkpoint, back)):
            copied.unlink(missing_ok=True)
            copies.append(copy_seconds(source / "model.safetensors", copied))
            shutil.rmtree(target, ignore_errors=True)
            runs[name].append(convert_checkpoint(origin, target, name.removeprefix("to_"))[1])
    gigabytes = runs["to_hf"][0].bytes / 1e9
    rate = gigabytes / min(copies)
    return {
        "gigabytes": round(gigabytes, 3),
        "copy_gb_per_second": round(rate, 3),
    } | {name: _told(measured, rate) for name, measured in runs.items()}


def build_model(folder: Path) -> Path:
    """A random model with a tokenizer."""
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=3_072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(train_tokenizer(["0 1 2 3"] * 9, 100), folder)
    return folder


def copy_seconds(source: Path, target: Path) -> float:
    """Seconds of reading all weights and writing them again."""
    begun = time.perf_counter()
    save_file(load_file(source), target)
    make_durable(target)
    return time.perf_counter() - begun


def _told(runs: list[Measured], copy_rate: float) -> dict[str, float]:
    best = min(runs, key=lambda run: run.convert_seconds)
    rate = best.bytes / 1e9 / best.convert_seconds
    return {
        "gb_per_second": round(rate, 3),
        "ratio_to_copy": round(rate / copy_rate, 3),
        "verify_seconds": round(min(run.verify_seconds for run in runs), 2),
        "convert_peak_of_weights": round(best.convert_peak_bytes / best.bytes, 3),
        "verify_peak_of_weights": round(max(run.verify_peak_bytes for run in runs) / best.bytes, 3),
    }


if __name__ == "__main__":
    main()
