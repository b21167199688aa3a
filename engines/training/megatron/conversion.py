"""A model between Hugging Face files and Megatron's distributed checkpoint, one parameter at a time.

No weight stays in memory: the model is built without storage, only to ask Megatron where each parameter lies in a checkpoint
(its sharded state) and :mod:`mapping` which on-disk tensors it is made of. One process sees the whole model, as if it had one
rank; a checkpoint's chunks are regions of whole tensors, so any layout loads what is written here, and what any layout
wrote is read here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from engines.config import LayoutConfig
from engines.dist_checkpoint import Chunk, ChunkFile, DistCheckpoint, DistCheckpointError
from engines.hf_files import WeightFiles, WeightReader
from engines.model_folder import ModelFolderError
from engines.training.megatron.attention import Packing
from engines.training.megatron.mapping import Unit, units_of
from engines.training.megatron.model import TokenModel, build_chunks, transformer_config
from engines.training.megatron.parallelize import device_scope, join
from engines.training.process_group import init_process_group

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_STACKED = "decoder.layers."
"""Keys of what every layer has: one tensor over all layers, the layer being its first axis."""


@dataclass
class Part:
    """One parameter of Megatron's model."""

    name: str
    units: list[Unit]
    """The on-disk tensors that it is made of."""
    sharded: ShardedTensor | ShardedTensorFactory
    """Where it lies in a checkpoint, by Megatron's own account; without data."""
    shape: tuple[int, ...]
    objects: list[str] = field(default_factory=list)
    """Keys of what Megatron keeps beside it and is empty without Transformer Engine."""

    def from_hf(self, source: WeightReader) -> Tensor:
        """The parameter, out of the on-disk tensors.

        Raises:
            ModelFolderError: the tensors are of several types, which one parameter cannot hold.
        """
        dtypes = {unit.name: source.dtype(unit.name) for unit in self.units}
        if len(set(dtypes.values())) > 1:
            raise ModelFolderError(
                f"{source.folder}: {dtypes}: Megatron holds these in one parameter of one type"
            )
        if len(self.units) == 1:
            return source.read(self.units[0].name).reshape(self.shape)
        tensor = torch.empty(self.shape, dtype=next(iter(dtypes.values())))
        for unit in self.units:
            unit.write(tensor, source.read(unit.name))
        return tensor

    def to_hf(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(on-disk name, tensor), out of the parameter."""
        for unit in self.units:
            yield unit.name, unit.read(tensor)

    def pieces(self, tensor: Tensor) -> list[ShardedTensor]:
        """The regions of the checkpoint's tensors that the parameter fills, with their data."""
        if isinstance(self.sharded, ShardedTensorFactory):
            return replace(self.sharded, data=tensor).build()
        return [replace(self.sharded, data=tensor, dtype=tensor.dtype)]

    def from_checkpoint(self, checkpoint: DistCheckpoint, layers: Sequence[int] | None = None) -> Tensor:
        """The parameter, out of a checkpoint.

        Args:
            layers: the layer of the checkpoint that stands in the place of each layer of the model; its own when not given.

        Raises:
            DistCheckpointError: the checkpoint does not hold it.
        """
        read = []
        for piece in self.pieces(torch.empty(self.shape, device="meta")):
            offsets = list(piece.global_offset)
            if layers is not None and piece.key.startswith(_STACKED):
                offsets[0] = layers[offsets[0]]
            sizes = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
            read.append(checkpoint.read(piece.key, offsets, sizes).reshape(piece.local_shape))
        return self.sharded.merge_fn(read) if isinstance(self.sharded, ShardedTensorFactory) else read[0]


class ModelParts:
    """The parts of a model in blocks: what is outside of the layers, then one block a layer.

    The process that makes one belongs to Megatron, with one rank, from then on.

    Args:
        config: of the model.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        with _one_rank(), torch.device("meta"):
            chunks = build_chunks(config, transformer_config(config, LayoutConfig()))
            self.blocks = _blocks(chunks[0], config.num_hidden_layers)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """On-disk name -> shape of every tensor that Megatron's model is made of."""
        return {unit.name: unit.shape for block in self.blocks for part in block for unit in part.units}

    def kinds(self, checkpoint: DistCheckpoint) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """On-disk name -> (type, shape) of what ``checkpoint`` holds, which is this model, complete and nothing more.

        Raises:
            DistCheckpointError: tensors are missing, unknown, or have other shapes.
        """
        expected, found = {}, {}
        for part in (part for block in self.blocks for part in block):
            for piece in part.pieces(torch.empty(part.shape, device="meta")):
                expected[piece.key] = tuple(piece.global_shape)
                chunks = checkpoint.tensors.get(piece.key)
                for unit in part.units if chunks else []:
                    found[unit.name] = (chunks[0].dtype, unit.shape)
        shapes = {key: chunks[0].shape for key, chunks in checkpoint.tensors.items()}
        if problem := differences(expected, shapes):
            raise DistCheckpointError(f"{checkpoint.folder}: not the model of its config.json: {problem}")
        return found

    def write_megatron(self, block: int, source: WeightReader, folder: Path) -> list[Chunk]:
        """Write one block into a file of its own in the checkpoint's ``folder``."""
        with ChunkFile(folder, f"__{block}_0.distcp") as file:
            for part in self.blocks[block]:
                for piece in part.pieces(part.from_hf(source)):
                    data = piece.data.reshape((1,) * piece.prepend_axis_num + tuple(piece.local_shape))
                    file.append(piece.key, data, piece.global_offset, piece.global_shape)
                for key in part.objects:
                    file.append_object(key, None)
        return file.chunks

    def write_hf(self, block: int, source: DistCheckpoint, files: WeightFiles) -> list[str]:
        """Write one block into its places in ``files``; returns the on-disk names."""
        names = []
        for part in self.blocks[block]:
            for name, tensor in part.to_hf(part.from_checkpoint(source)):
                files.write(name, tensor)
                names.append(name)
        return names

    def compare(
        self, block: int, files: WeightReader, checkpoint: DistCheckpoint
    ) -> tuple[list[str], list[str]]:
        """Convert one block both ways and compare with what is on disk, bit for bit.

        Returns:
            (on-disk names that were compared, those of them that differ).
        """
        names, differing = [], []
        for part in self.blocks[block]:
            in_checkpoint = part.from_checkpoint(checkpoint)
            back = part.from_hf(files)
            same = _same_bits(in_checkpoint, back)
            del back
            for name, tensor in part.to_hf(in_checkpoint):
                names.append(name)
                if not (same and _same_bits(tensor, files.read(name))):
                    differing.append(name)
        return names, differing


@torch.no_grad()
def checkpoint_logits(
    config: PretrainedConfig, checkpoint: DistCheckpoint, input_ids: Tensor, layers: Sequence[int]
) -> Tensor:
    """What Megatron's model computes in float32 with the weights of ``checkpoint``: (tokens, vocabulary).

    Args:
        config: of the whole model.
        input_ids: (tokens,), one sequence.
        layers: of the checkpoint, in the order in which the model has them.
    """
    small = with_layers(config, layers)
    parts = [part for block in ModelParts(small).blocks for part in block]
    with _one_rank():
        model = build_chunks(small, transformer_config(small, LayoutConfig()))[0].eval()
        parameters = dict(model.named_parameters())
        for part in parts:
            parameters[part.name].copy_(part.from_checkpoint(checkpoint, layers))
        packing = Packing.of(torch.tensor([0, len(input_ids)]), 1, 0, input_ids.device)
        hidden = model(
            input_ids=input_ids[None],
            position_ids=packing.positions[None],
            attention_mask=None,
            packed_seq_params=packing,
        )
        return hidden[:, 0].float() @ model.head_weight().T.float()


def with_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """The configuration of the same model with these layers only."""
    small = deepcopy(config)
    small.num_hidden_layers = len(layers)
    if types := getattr(config, "layer_types", None):
        small.layer_types = [types[layer] for layer in layers]
    return small


def differences(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """What tells two sets of named shapes apart, for people; empty when nothing does."""
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys())
    other = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    texts = [f"{len(missing)} tensors are missing ({', '.join(missing[:3])})"] if missing else []
    texts += [f"{len(unknown)} are unknown ({', '.join(unknown[:3])})"] if unknown else []
    texts += [f"{name} is {list(found[name])}, {list(expected[name])} is expected" for name in other[:1]]
    return "; ".join(texts)


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Scope in which Megatron knows one rank, this process, on its CPU."""
    init_process_group("cpu")
    with device_scope("cpu"):
        join(LayoutConfig())
        yield


def _blocks(chunk: TokenModel, layers: int) -> list[list[Part]]:
    blocks: list[list[Part]] = [[] for _ in range(layers + 1)]
    sharded = chunk.sharded_state_dict()
    for (name, parameter), (_, units) in zip(chunk.named_parameters(), units_of([chunk]), strict=True):
        part = Part(name, units, replace(sharded[name], data=None), tuple(parameter.shape))
        blocks[_block_of(name)].append(part)
    for name, place in sharded.items():
        if isinstance(place, ShardedObject) and (block := blocks[_block_of(name)]):
            block[-1].objects.append(place.unique_key)
    return blocks


def _block_of(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) + 1 if found else 0


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same bytes; unlike equality, that holds for NaN and tells 0 from -0."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))
