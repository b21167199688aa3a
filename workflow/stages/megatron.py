"""megatron: the exported model as Megatron's distributed checkpoint, ``megatron/``, verified from disk in both directions.

Left out: the base model's. The megatron engine reads Hugging Face files itself, each rank its own part.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import torch

from workflow.stages.conversion import convert_checkpoint
from workflow.stages.runner import StageContext, StageResult


def main(context: StageContext) -> StageResult:
    """Convert the exported folder."""
    config = context.config.conversion
    torch.set_num_threads(1)  # before the ranks are forked: a pool of threads does not survive that
    source, target = context.input_path("model") / "export", context.folder / "megatron"
    for left in (target, *context.folder.glob(f".{target.name}.*")):  # of a start that was killed
        shutil.rmtree(left, ignore_errors=True)
    layers = json.loads((source / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    with context.progress("megatron", 2 * (layers + 1)) as bar:  # each block is converted, then compared
        record, measured = convert_checkpoint(
            source,
            target,
            "megatron",
            ranks=config.ranks,
            full_logits=config.full_logits,
            report=lambda what, done, total: bar.advance(),
        )
    files = sorted(path.relative_to(context.folder) for path in target.rglob("*") if path.is_file())
    return StageResult(files=files, metrics=record.verified, extra={"measured": asdict(measured)})
