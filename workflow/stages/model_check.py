"""Proof that a written model folder is the model that was meant: reload it and compare. Used by convert and export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engines.model_folder import ModelFolderError, check_model_folder
from engines.streams import stream_key

PROBE_TEXTS = ("Sort: 3 1 2", "What is 17 + 25?\n", "  two  spaces, a tab\tand a newline\n", "Grüße, 你好")
PROBE_TOKENS = 32


class ModelMismatch(RuntimeError):
    """The files that were written do not give the model that was meant."""


def load_model(
    folder: Path, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """The causal language model in ``folder``, from safetensors only, complete for its architecture.

    Raises:
        ModelFolderError: a file is missing or damaged, or the tensors are not those of the architecture.
    """
    check_model_folder(folder)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # reported below, with its name
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            names = sorted(map(str, info[kind]))
            raise ModelFolderError(
                f"{folder}: {len(names)} {kind.replace('_', ' ')} for {type(model).__name__}: {', '.join(names[:3])}"
            )
    return model.eval()


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in ``folder``; nothing is fetched."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def probe_ids(vocabulary: int) -> torch.Tensor:
    """A fixed prompt, the same on every machine: (1, PROBE_TOKENS) ids below ``vocabulary``."""
    return torch.tensor([[stream_key("model-check", i) % vocabulary for i in range(PROBE_TOKENS)]])


@torch.no_grad()
def probe_logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits on the fixed prompt: (PROBE_TOKENS, vocabulary), float32."""
    return model(input_ids=probe_ids(model.config.vocab_size), use_cache=False).logits[0].float()


def check_tensors(expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> int:
    """Every tensor bit-equal, type included; returns how many.

    Raises:
        ModelMismatch: naming the tensors that differ.
    """
    if wrong := sorted(set(expected) ^ set(got)):
        raise ModelMismatch(f"{len(wrong)} tensors stand on one side only: {wrong[:3]}")
    differing = [
        name
        for name, tensor in expected.items()
        if tensor.dtype != got[name].dtype or not torch.equal(tensor.cpu(), got[name].cpu())
    ]
    if differing:
        raise ModelMismatch(f"{len(differing)} tensors differ after reloading: {differing[:3]}")
    return len(expected)


def check_logits(expected: torch.Tensor, got: torch.Tensor, tolerance: float) -> float:
    """Largest absolute difference, at most ``tolerance``.

    Raises:
        ModelMismatch: it is larger, or not a number.
    """
    difference = float((expected - got).abs().max())
    if not difference <= tolerance:
        raise ModelMismatch(
            f"logits on the fixed prompt differ by {difference}, at most {tolerance} is allowed"
        )
    return difference


def check_tokenizer(expected: PreTrainedTokenizerBase, got: PreTrainedTokenizerBase) -> dict[str, object]:
    """Both tokenizers give the same ids, special tokens and chat prompts; says also whether decoding undoes encoding.

    Raises:
        ModelMismatch: they do not.
    """
    for text in PROBE_TEXTS:
        if expected(text)["input_ids"] != got(text)["input_ids"]:
            raise ModelMismatch(f"the reloaded tokenizer gives other ids for {text!r}")
    for field in ("eos_token_id", "pad_token_id", "bos_token_id", "chat_template"):
        if getattr(expected, field) != getattr(got, field):
            raise ModelMismatch(
                f"the reloaded tokenizer has {field}={getattr(got, field)!r}, not {getattr(expected, field)!r}"
            )
    lossless = all(
        got.decode(got(text, add_special_tokens=False)["input_ids"], clean_up_tokenization_spaces=False)
        == text
        for text in PROBE_TEXTS
    )
    return {
        "tokenizer_size": len(got),
        "tokenizer_lossless": lossless,
        "chat_template": got.chat_template is not None,
    }
