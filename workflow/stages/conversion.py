"""A model between Hugging Face files and Megatron's distributed checkpoint, verified before it appears.

Notable: what is compared is what lies on disk, from both sides: every tensor of either format is converted into the other, bit
for bit; both have exactly the tensors of the architecture; transformers and Megatron compute the same logits. The folder
appears by one rename after that. The bytes do not depend on how many ranks shared the work.
Left out: checkpoints without a record (an index is a pickle: it is read only after every file's digest matched).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from engines.catalog import MEGATRON
from engines.checkpoint.store import make_durable
from engines.checkpoint.verify import sha256
from engines.dist_checkpoint import Chunk, DistCheckpoint, write_index
from engines.hf_checkpoint import UnknownCheckpointLayout, on_disk_parameters
from engines.hf_files import WeightFiles, WeightReader
from engines.model_folder import ModelFolderError, check_model_folder
from engines.training.errors import UnsupportedConfigError
from engines.training.hf_export import parse_size
from engines.training.megatron.conversion import ModelParts, checkpoint_logits, differences, with_layers
from engines.training.megatron.model import read_config
from workflow.manifest import MANIFEST, check_files, describe_files, read_manifest
from workflow.stages.conversion_record import (
    RECORD,
    RELEASE,
    TRACKER,
    VERSION,
    ConversionRecord,
    Format,
    source_digest,
    verify_record,
    write_record,
)
from workflow.stages.model_check import PROBE_TOKENS, ModelMismatch, check_logits, load_model, probe_ids
from workflow.stages.provenance import package_versions
from workflow.stages.share import share

COMMON = {"checkpoint_version": 3.0, "iteration": 0}
"""What Megatron-LM asks of a checkpoint beside its tensors."""
TOLERANCE = 1e-5
"""Of the logits on the fixed prompt, in float32."""
FULL_LOGITS = 4_000_000_000
"""Parameters up to which the whole model is computed twice."""
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


@dataclass
class Measured:
    """What a conversion took."""

    ranks: int
    bytes: int
    """Of the weights."""
    convert_seconds: float = 0.0
    """Reading, converting and writing."""
    verify_seconds: float = 0.0
    """Hashing source and result, and comparing them."""
    convert_peak_bytes: int = 0
    """The most that a rank took above what the framework takes."""
    verify_peak_bytes: int = 0


@dataclass(frozen=True)
class Pair:
    """The same model in both formats. One of the two is being written."""

    hf: Path
    megatron: Path
    """The folder of the distributed checkpoint itself."""
    config: PretrainedConfig
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """On-disk name -> (type, shape)."""
    max_shard_size: int

    @property
    def blocks(self) -> range:
        """The layers, and what is outside of them."""
        return range(self.config.num_hidden_layers + 1)

    def files(self) -> WeightFiles:
        """Where each tensor lies in the Hugging Face folder that is written."""
        return WeightFiles(self.hf, self.kinds, self.max_shard_size)


Report = Callable[[str, int, int], None]
"""Told (what is done, blocks done, blocks in all)."""


def convert_checkpoint(
    source: Path,
    target: Path,
    to: Format,
    ranks: int = 1,
    full_logits: int = FULL_LOGITS,
    max_shard_size: str = "5GB",
    report: Report = lambda what, done, total: None,
) -> tuple[ConversionRecord, Measured]:
    """Convert the model in ``source`` into the new folder ``target``.

    Args:
        source: a Hugging Face folder, or a folder that this function made from one.
        target: appears by one rename when everything was verified; must not be there, unless it is this very result.
        ranks: processes that share the work; the result does not depend on it.
        full_logits: parameters above which logits are compared on the first and last layers only.
        max_shard_size: largest Hugging Face weight file.

    Returns:
        The record in ``target``, and what the conversion took.

    Raises:
        ModelFolderError: the source is missing, damaged or of another architecture than its configuration says, or the
            target is something else.
        UnsupportedConfigError: a model that Megatron does not compute as transformers does.
        ModelMismatch: what was written is not the same model.
    """
    begun = time.perf_counter()
    shard_size = parse_size(max_shard_size)
    origin = _hash_hf_source(source) if to == "megatron" else _hash_megatron_source(source)
    if target.exists():
        return _same_result(target, to, origin), Measured(0, 0)
    config = _read_config(source)
    work = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    (work / RELEASE if to == "megatron" else work).mkdir(parents=True)
    try:
        hf, megatron = (source, work / RELEASE) if to == "megatron" else (work, source / RELEASE)
        kinds = _kinds(config, hf if to == "megatron" else None, megatron)
        pair = Pair(hf, megatron, config, kinds, shard_size)
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in kinds.values())
        measured = Measured(ranks, size, verify_seconds=time.perf_counter() - begun)
        _write(pair, to, ranks, measured, report)
        begun = time.perf_counter()
        carried = _carry(source, work)
        verified = _verify(pair, ranks, full_logits, measured, report) | {"carried": carried}
        record = ConversionRecord(
            version=VERSION,
            to=to,
            source=origin,
            files=describe_files(work, sorted(path.relative_to(work) for path in work.iterdir())),
            verified=verified,
            packages=package_versions(),
        )
        write_record(work, record)
        work.rename(target)
        measured.verify_seconds += time.perf_counter() - begun
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return record, measured


def _hash_hf_source(source: Path) -> str:
    """Digest of a Hugging Face folder, compared with what the one who published it says about its files."""
    check_model_folder(source)
    if (source / RECORD).is_file():
        verify_record(source)
    elif (source.parent / MANIFEST).is_file():
        manifest = read_manifest(source.parent / MANIFEST)
        if problems := check_files(source.parent, manifest):
            raise ModelFolderError(problems[0])
    return source_digest(describe_files(source, [*_other_files(source), *_weight_files(source)]))


def _hash_megatron_source(source: Path) -> str:
    """Digest of a converted folder, every file of which is as its record says: only now may its index be opened."""
    record = verify_record(source)
    if record.to != "megatron":
        raise ModelFolderError(
            f"{source / RECORD}: says to={record.to!r}; expected a folder converted to 'megatron'"
        )
    return source_digest(record.files)


def _same_result(target: Path, to: Format, origin: str) -> ConversionRecord:
    """The record in ``target`` when it is what would be written."""
    if not (target / RECORD).is_file():
        raise ModelFolderError(f"{target}: exists already; give a folder that does not, or remove it")
    record = verify_record(target)
    if (record.to, record.source, record.version) != (to, origin, VERSION):
        raise ModelFolderError(
            f"{target}: exists already and was converted from something else; give another folder, or remove it"
        )
    return record


def _read_config(source: Path) -> PretrainedConfig:
    try:
        found = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{source / 'config.json'}: cannot be read ({error})") from None
    if reason := MEGATRON.refuse_model(found):
        raise UnsupportedConfigError(f"{source / 'config.json'}: {reason}")
    return read_config(source)


def _kinds(
    config: PretrainedConfig, hf: Path | None, megatron: Path
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """On-disk name -> (type, shape) of the source's tensors, which are exactly those of the architecture.

    Three tables must agree: transformers' model, Megatron's model, and the source's files.
    """
    expected = _transformers_shapes(config)
    describe = functools.partial(_describe, megatron if hf is None else None)
    ((shapes, of_checkpoint),), _ = share(1, functools.partial(ModelParts, config), describe, [0])
    if problem := differences(expected, shapes):
        raise UnsupportedConfigError(
            f"{config.model_type}: Megatron's model is not made of the tensors of transformers': {problem}"
        )
    if hf is None:
        return {name: of_checkpoint[name] for name in expected}
    reader = WeightReader(hf)
    if problem := differences(expected, {name: entry.shape for name, entry in reader.entries.items()}):
        raise ModelFolderError(
            f"{hf}: not the {config.architectures or config.model_type} of its config.json: {problem}"
        )
    return {name: (reader.dtype(name), shape) for name, shape in expected.items()}


def _transformers_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """On-disk name -> shape of every tensor that transformers' model of ``config`` has, in its order."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        return {name: tuple(tensor.shape) for name, tensor in on_disk_parameters(model).items()}
    except UnknownCheckpointLayout as error:
        raise UnsupportedConfigError(str(error)) from None


def _describe(megatron: Path | None, parts: ModelParts, block: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of Megatron's model, and of its checkpoint when there is one."""
    return parts.shapes(), {} if megatron is None else parts.kinds(DistCheckpoint(megatron))


def _write(pair: Pair, to: Format, ranks: int, measured: Measured, report: Report) -> None:
    """Write every tensor of one of the two formats, durably."""
    begun = time.perf_counter()
    advance = _count("converting", pair, report)
    if to == "megatron":
        open_both = functools.partial(_open_hf_source, pair)
        chunks, peak = share(ranks, open_both, _write_megatron_block, pair.blocks, advance)
        write_index(pair.megatron, itertools.chain(*chunks), COMMON)
        (pair.megatron.parent / TRACKER).write_text(RELEASE)
    else:
        pair.files().create()
        open_both = functools.partial(_open_megatron_source, pair)
        names, peak = share(ranks, open_both, _write_hf_block, pair.blocks, advance)
        if sorted(itertools.chain(*names)) != sorted(pair.kinds):
            raise ModelMismatch("the blocks do not hold every tensor once")
        for path in pair.hf.iterdir():
            make_durable(path)
    measured.convert_seconds = time.perf_counter() - begun
    measured.convert_peak_bytes = peak


def _open_hf_source(pair: Pair) -> tuple[ModelParts, WeightReader, Path]:
    return ModelParts(pair.config), WeightReader(pair.hf), pair.megatron


def _write_megatron_block(opened: tuple[ModelParts, WeightReader, Path], block: int) -> list[Chunk]:
    parts, source, folder = opened
    return parts.write_megatron(block, source, folder)


def _open_megatron_source(pair: Pair) -> tuple[ModelParts, DistCheckpoint, WeightFiles]:
    return ModelParts(pair.config), DistCheckpoint(pair.megatron), pair.files()


def _write_hf_block(opened: tuple[ModelParts, DistCheckpoint, WeightFiles], block: int) -> list[str]:
    parts, source, files = opened
    return parts.write_hf(block, source, files)


def _verify(pair: Pair, ranks: int, full_logits: int, measured: Measured, report: Report) -> dict[str, Any]:
    """Compare both formats as they lie on disk; returns what was found equal.

    Raises:
        ModelMismatch: anything differs.
    """
    open_both = functools.partial(_open_both, pair)
    found, peak = share(ranks, open_both, _compare_block, pair.blocks, _count("comparing", pair, report))
    compared = sorted(name for names, _ in found for name in names)
    if compared != sorted(pair.kinds) or set(compared) != set(WeightReader(pair.hf).entries):
        raise ModelMismatch("the two formats do not hold the same tensors, each once")
    if differing := sorted(name for _, names in found for name in names):
        raise ModelMismatch(f"{len(differing)} tensors differ after a round trip: {', '.join(differing[:3])}")
    parameters = sum(math.prod(shape) for _, shape in pair.kinds.values())
    last = pair.config.num_hidden_layers - 1
    layers = list(range(last + 1)) if parameters <= full_logits else sorted({0, last})
    ((difference, largest),), peak_of_logits = share(
        1, functools.partial(list, layers), functools.partial(_compare_logits, pair), [0]
    )
    measured.verify_peak_bytes = max(peak, peak_of_logits)
    return {
        "tensors_equal": len(compared),
        "parameters": parameters,
        "dtypes": sorted({str(dtype).removeprefix("torch.") for dtype, _ in pair.kinds.values()}),
        "tied_embeddings": bool(pair.config.tie_word_embeddings),
        "logits": {
            "max_difference": difference,
            "largest": largest,
            "tolerance": TOLERANCE,
            "tokens": PROBE_TOKENS,
            "layers": "all" if len(layers) == last + 1 else layers,
        },
    }


def _open_both(pair: Pair) -> tuple[ModelParts, WeightReader, DistCheckpoint]:
    return ModelParts(pair.config), WeightReader(pair.hf), DistCheckpoint(pair.megatron)


def _compare_block(
    opened: tuple[ModelParts, WeightReader, DistCheckpoint], block: int
) -> tuple[list[str], list[str]]:
    parts, files, checkpoint = opened
    return parts.compare(block, files, checkpoint)


def _compare_logits(pair: Pair, layers: list[int], block: int) -> tuple[float, float]:
    """(largest difference, largest value) of the logits that transformers and Megatron compute on the fixed prompt."""
    input_ids = probe_ids(pair.config.vocab_size)[0]
    expected = _transformers_logits(pair, layers, input_ids)
    got = checkpoint_logits(pair.config, DistCheckpoint(pair.megatron), input_ids, layers)
    return check_logits(expected, got, TOLERANCE), float(expected.abs().max())


@torch.no_grad()
def _transformers_logits(pair: Pair, layers: list[int], input_ids: torch.Tensor) -> torch.Tensor:
    if len(layers) == pair.config.num_hidden_layers:
        model = load_model(pair.hf, dtype=torch.float32)
    else:
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(
                with_layers(pair.config, layers), dtype=torch.float32
            ).eval()
        reader = WeightReader(pair.hf)
        for name, tensor in on_disk_parameters(model).items():
            tensor.copy_(
                reader.read(re.sub(r"(?<=\.layers\.)\d+", lambda found: str(layers[int(found[0])]), name))
            )
    return model(input_ids=input_ids[None], use_cache=False).logits[0].float()


def _carry(source: Path, work: Path) -> list[str]:
    """Copy everything that is neither weights nor a record; returns the names."""
    for path in _other_files(source):
        shutil.copyfile(source / path, work / path)
        if sha256(source / path) != sha256(work / path):
            raise ModelMismatch(f"{path}: not the same after copying")
    return [str(path) for path in _other_files(source)]


def _other_files(folder: Path) -> list[Path]:
    """What belongs to a model beside its weights, at the folder's top."""
    return sorted(
        path.relative_to(folder)
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(_WEIGHTS)
        and path.name not in (RECORD, MANIFEST, TRACKER)
    )


def _weight_files(folder: Path) -> list[Path]:
    return sorted({Path(entry.file) for entry in WeightReader(folder).entries.values()})


def _count(what: str, pair: Pair, report: Report) -> Callable[[int], None]:
    """A function that reports one block more each time."""
    numbers = itertools.count(1)
    return lambda block: report(what, next(numbers), len(pair.blocks))
