"""convert: a base model, whatever its source, becomes verified safetensors with its tokenizer in ``model/``.

Sources: an architecture (random weights), a local Hugging Face folder, a model of the Hub that was fetched before, or a package that
carries GGUF.
Verified before publishing: the written files are loaded again; every tensor and the logits on a fixed prompt are bit-equal,
the tokenizer gives the same ids, and the chat template and the end-of-sequence token are carried over.
Left out: quantised weights as they are (GGUF is dequantised), pickled weights (refused), anything from the network.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engines.model_folder import ModelFolderError, locate_gguf, vocabulary_size
from engines.streams import stream_key
from workflow.campaign.hub import is_hub, verify_fetched
from workflow.campaign.schema import DataConfig, ModelConfig
from workflow.data import tokenizer_texts
from workflow.data.tokenizer import CHAT_TEMPLATE, save_tokenizer, train_tokenizer
from workflow.stages.model_check import (
    check_logits,
    check_tensors,
    check_tokenizer,
    load_model,
    load_tokenizer,
    probe_logits,
)
from workflow.stages.runner import StageContext, StageResult


@dataclass
class Source:
    """A base model as it came, with what is known about it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    origin: dict[str, str] = field(default_factory=dict)


def main(context: StageContext) -> StageResult:
    """Convert the run's base model into ``model/``."""
    config = context.config
    model = config.model
    data = config.data if model.architecture is not None else None
    seed = config.seed if model.architecture is not None else None
    metrics = convert(model, context.folder / "model", seed=seed, data=data)
    return StageResult(
        files=[path.relative_to(context.folder) for path in sorted((context.folder / "model").iterdir())],
        metrics=metrics,
        seeds={} if seed is None else {"seed": seed},
    )


def convert(
    config: ModelConfig, folder: Path, seed: int | None = None, data: DataConfig | None = None
) -> dict[str, object]:
    """Write the model that ``config`` names into ``folder``, verify it, and return what was verified.

    Args:
        config: exactly one of architecture, path and package.
        folder: written anew.
        seed: root of the random weights (architecture).
        data: the problems whose training split the tokenizer is trained on (architecture).

    Raises:
        ModelFolderError: the source is damaged, incomplete, or does not belong together.
        ModelMismatch: what was written does not load as the same model.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if config.architecture is not None:
        source = from_architecture(config, folder, seed, data)
    elif is_hub(config.path):
        source = from_folder(verify_fetched(config.path), trust_remote_code=False)
        source.origin |= {"kind": "hub", "source": config.path}
    elif config.path is not None:
        source = from_folder(Path(config.path), config.trust_remote_code)
    else:
        source = from_package(config.package)
    model, tokenizer = source.model.eval(), source.tokenizer
    _cast(model, getattr(torch, config.dtype))
    _carry_special_tokens(model, tokenizer)
    model.config._name_or_path = tokenizer.name_or_path = config.name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors makes files that only their owner can read
    return verify(model, tokenizer, folder, config.trust_remote_code) | {"source": source.origin}


def verify(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, trust_remote_code: bool = False
) -> dict[str, object]:
    """Load ``folder`` again and compare it with what was meant; returns the record of the comparison."""
    reloaded = load_model(folder, trust_remote_code=trust_remote_code)
    tokens = check_tokenizer(tokenizer, load_tokenizer(folder, trust_remote_code))
    return {
        "architecture": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "vocab_size": vocabulary_size(model.config.to_dict()),
        "eos_token_id": reloaded.generation_config.eos_token_id,
        "tensors_equal": check_tensors(model.state_dict(), reloaded.state_dict()),
        "max_logit_difference": check_logits(probe_logits(model), probe_logits(reloaded), tolerance=0.0),
        **tokens,
    }


def from_architecture(config: ModelConfig, folder: Path, seed: int, data: DataConfig) -> Source:
    """A random model. Each matrix has its own stream, so no other parameter and no global generator can shift it."""
    texts = tokenizer_texts(data, CHAT_TEMPLATE)
    save_tokenizer(train_tokenizer(texts, config.tokenizer.vocab_size), folder)
    tokenizer = load_tokenizer(folder)
    settings = dict(config.architecture)
    rows = settings.setdefault("vocab_size", len(tokenizer))
    if rows < len(tokenizer):
        raise ModelFolderError(
            f"model.architecture.vocab_size={rows}: the tokenizer has {len(tokenizer)} tokens; leave it out or raise it"
        )
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    draw_weights(model, seed)
    return Source(model, tokenizer, {"kind": "architecture", "model_type": settings["model_type"]})


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw every matrix from N(0, initializer_range^2); vectors keep the architecture's constants (norms 1, biases 0)."""
    deviation = model.config.initializer_range
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            generator = torch.Generator().manual_seed(stream_key(seed, "init", name))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)


def from_folder(path: Path, trust_remote_code: bool) -> Source:
    """A local Hugging Face folder, complete and in safetensors."""
    model = load_model(path, trust_remote_code=trust_remote_code)
    origin = {"kind": "path", "model_type": model.config.model_type}
    card = path / "README.md"
    if card.is_file() and (found := re.search(r"^license:\s*(\S+)", card.read_text("utf-8"), re.MULTILINE)):
        origin["license"] = found[1]
    return Source(model, load_tokenizer(path, trust_remote_code), origin)


def from_package(package: str) -> Source:
    """The GGUF inside an installed package, dequantised into plain parameters."""
    path = locate_gguf(package)
    quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config
    with torch.random.fork_rng():
        model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    metadata = importlib.metadata.metadata(package.replace("_", "-"))
    origin = {
        "kind": "package",
        "package": f"{metadata['Name']} {metadata['Version']}",
        "file": path.name,
        "sha256": _sha256(path),
        "model_type": config.model_type,
    }
    if license_name := metadata.get("License-Expression") or metadata.get("License"):
        origin["license"] = license_name
    return Source(model, tokenizer, origin)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Change the type of what is saved, and of nothing else: rotary frequencies stay in float32, as after loading."""
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _carry_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Where the model does not say how sequences start, end and are padded, its tokenizer does.

    Raises:
        ModelFolderError: neither knows an end-of-sequence token.
    """
    if model.generation_config is None:
        model.generation_config = GenerationConfig()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for config in (model.generation_config, model.config):
            if getattr(config, name, None) is None:
                setattr(config, name, getattr(tokenizer, name))
    if model.generation_config.eos_token_id is None:
        raise ModelFolderError("neither the model nor its tokenizer has an end-of-sequence token (eos_token)")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
