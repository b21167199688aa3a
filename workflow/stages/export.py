"""export: the policy of a training state becomes a Hugging Face folder, ``export/``, that opens anywhere.

Notable: the weights come from the state's shards alone, so the export needs no engine and depends on no layout.
Verified before publishing: the folder is opened with AutoModelForCausalLM; its logits on a fixed prompt are those of the
base model with the state's weights put in, within 1e-5.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from engines.hf_checkpoint import on_disk_parameters
from engines.training.hf_export import state_weights, write_model_folder
from workflow.reporting.model_card import model_card
from workflow.stages.model_check import (
    ModelMismatch,
    check_logits,
    check_tokenizer,
    load_model,
    load_tokenizer,
    probe_logits,
)
from workflow.stages.runner import StageContext, StageResult

TOLERANCE = 1e-5
ROLE = "actor"


def main(context: StageContext) -> StageResult:
    """Export the actor of the last training state."""
    base, state = context.input_path("base") / "model", context.input_path("model")
    folder = context.folder / "export"
    metrics = export(state, base, folder, context.config.export.max_shard_size)
    (folder / "README.md").write_text(model_card(context.config, context.inputs), encoding="utf-8")
    files = sorted(path.relative_to(context.folder) for path in folder.iterdir())
    return StageResult(files=files, metrics=metrics)


def export(state: Path, base: Path, folder: Path, max_shard_size: str) -> dict[str, object]:
    """Write the actor of ``state`` into ``folder`` with all that is not weights taken from ``base``, and verify it.

    Args:
        state: folder of a training state.
        base: the model that training started from.
        folder: written anew.
        max_shard_size: largest safetensors file, such as ``5GB``.

    Raises:
        StateError: the state is damaged or has no actor.
        ModelMismatch: the state does not hold the weights of ``base``'s architecture, or the export gives other logits.
    """
    files = write_model_folder(folder, base, state_weights(state, ROLE), max_shard_size)
    expected = model_of_state(state, base)
    exported = load_model(folder)
    return {
        "parameters": sum(parameter.numel() for parameter in exported.parameters()),
        "dtype": str(expected.dtype).removeprefix("torch."),
        "weight_files": sum(path.suffix == ".safetensors" for path in files),
        "max_logit_difference": check_logits(probe_logits(expected), probe_logits(exported), TOLERANCE),
        "tolerance": TOLERANCE,
        **check_tokenizer(load_tokenizer(base), load_tokenizer(folder)),
    }


@torch.no_grad()
def model_of_state(state: Path, base: Path) -> PreTrainedModel:
    """The model in ``base`` with every weight replaced by the actor's in ``state``; it never saw the exported files.

    Raises:
        ModelMismatch: a weight is missing, unknown, or of another shape.
    """
    model = load_model(base, dtype=torch.float32)
    weights = on_disk_parameters(model)
    missing = set(weights)
    for name, tensor in state_weights(state, ROLE):
        if name not in weights or weights[name].shape != tensor.shape:
            known = tuple(weights[name].shape) if name in weights else "no such tensor"
            raise ModelMismatch(
                f"{state}: {name} has shape {tuple(tensor.shape)}, {type(model).__name__} has {known}"
            )
        weights[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ModelMismatch(
            f"{state}: {len(missing)} weights of the model are missing: {sorted(missing)[:3]}"
        )
    return model
