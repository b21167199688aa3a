"""Weights out of a training state and into the safetensors files of a Hugging Face folder, one tensor after the other.

Memory: at most one shard (``max_shard_size``) is held, whatever the size of the model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from engines.checkpoint import StateKeyMismatch, read_state
from engines.checkpoint.shards import load_shards
from engines.hf_checkpoint import on_disk_views
from engines.model_folder import INDEX, SINGLE

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def state_weights(path: Path, role: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(on-disk Hugging Face name, full tensor) of ``role`` in the training state at ``path``, whatever layout wrote it.

    Raises:
        StateKeyMismatch: the state has no such role.
        StateDamaged, StateIncomplete: its files do not hold what its description says.
    """
    roles = read_state(path)["roles"]
    if role not in roles:
        raise StateKeyMismatch(f"{path}: no role {role!r}, it has {sorted(roles)}")
    for name, record in roles[role]["tensors"].items():
        if name.startswith("model."):
            tensor = torch.empty(record["shape"], dtype=getattr(torch, record["dtype"]))
            load_shards(path, role, {name: tensor}, partial=True)
            yield from on_disk_views(name.removeprefix("model."), tensor)


def parse_size(text: str) -> int:
    """``"5GB"`` -> bytes (powers of ten, as in Hugging Face's ``max_shard_size``)."""
    match = re.fullmatch(r"(\d+)(KB|MB|GB)", text)
    if match is None:
        raise ValueError(f"max_shard_size={text!r}: expected a number and KB, MB or GB, such as 5GB")
    return int(match[1]) * _UNITS[match[2]]


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_size: str = "5GB"
) -> list[Path]:
    """Write ``tensors`` (on-disk Hugging Face name, full tensor) into ``folder``; an index is added when one file is not enough.

    Args:
        folder: exists; gets ``model.safetensors``, or numbered shards and their index.
        tensors: each name once; a tensor larger than ``max_shard_size`` gets a shard of its own.
        max_shard_size: largest file, such as ``5GB``.

    Returns:
        The written files.

    Raises:
        ValueError: no tensor, or a name that comes twice.
    """
    limit = parse_size(max_shard_size)
    shard: dict[str, torch.Tensor] = {}
    shards: list[tuple[Path, list[str]]] = []
    held, total, seen = 0, 0, set()

    def flush() -> None:
        path = folder / f"shard-{len(shards) + 1:05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes files that only their owner can read
        shards.append((path, list(shard)))
        shard.clear()

    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"tensor {name!r} was handed over twice")
        seen.add(name)
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > limit:
            flush()
            held = 0
        shard[name] = tensor.detach().cpu().contiguous().clone()
        held, total = held + size, total + size
    if not seen:
        raise ValueError("no tensor to write")
    flush()
    return _name_shards(folder, shards, total)


def write_model_folder(
    folder: Path,
    base: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_size: str = "5GB",
) -> list[Path]:
    """``base`` with other weights: everything that is not weights (nor its README) is copied, ``config.json`` names the new dtype.

    Args:
        folder: written anew.
        base: Hugging Face folder of the model that ``tensors`` belong to.
        tensors: see :func:`write_weights`; the widest of their dtypes becomes the model's.

    Returns:
        The weight files.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in base.iterdir():
        if ".safetensors" not in path.name and path.name != "README.md":
            shutil.copyfile(path, folder / path.name)
    dtypes: set[str] = set()

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
            yield name, tensor

    files = write_weights(folder, noted(), max_shard_size)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = max(dtypes, key=lambda name: getattr(torch, name).itemsize)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return files


def _name_shards(folder: Path, shards: list[tuple[Path, list[str]]], total: int) -> list[Path]:
    """Final names, which hold the number of shards and so are known only now."""
    if len(shards) == 1:
        return [shards[0][0].rename(folder / SINGLE)]
    weight_map, files = {}, []
    for number, (path, names) in enumerate(shards, start=1):
        file = path.rename(folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        weight_map |= dict.fromkeys(names, file.name)
        files.append(file)
    index = folder / INDEX
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return [*files, index]
