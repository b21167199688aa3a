"""Which blocks of the tensors in a model's files this rank's parameters are made of.

Megatron fuses and shards: one parameter holds rows of the query, key and value projections of some heads. Seen from outside,
every parameter is a list of :class:`Unit`, each a rectangular block of one tensor under its on-disk Hugging Face name. Weights are
read, exported, saved and restored by that one map.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.core import parallel_state
from torch import Tensor, nn

from engines.training.megatron.model import TokenModel
from engines.training.value_head import VALUE_HEAD


@dataclass(frozen=True)
class Unit:
    """A block of an on-disk tensor, and where a parameter holds it."""

    name: str
    """On disk."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    owned: bool
    """Whether this rank is the one that speaks for the block, of all that hold a copy."""
    select: Callable[[Tensor], Tensor]
    """From a tensor of the parameter's shape to the block's elements, as a view in their order."""

    def read(self, tensor: Tensor) -> Tensor:
        """The block out of a tensor of the parameter's shape; a view where it lies in one piece."""
        return self.select(tensor).reshape(self.shape)

    def write(self, tensor: Tensor, block: Tensor) -> None:
        """Put the block into a tensor of the parameter's shape."""
        place = self.select(tensor)
        place.copy_(block.reshape(place.shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the block lies in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.shape, strict=True))


def units_of(chunks: list[TokenModel]) -> Iterator[tuple[nn.Parameter, list[Unit]]]:
    """Every parameter of this rank with the units that it consists of, in order."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            yield parameter, _units(chunk, name, parameter)


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Parameters of a layer that every tensor-parallel rank has whole."""


def _units(chunk: TokenModel, name: str, parameter: nn.Parameter) -> list[Unit]:
    place = _Place.dense()
    if name == "embedding.word_embeddings.weight":
        return [place.sharded("model.embed_tokens.weight", parameter, 0)]
    if name == "decoder.final_layernorm.weight":
        return [place.whole("model.norm.weight", parameter)]
    if name == "output_layer.weight":
        if parameter.shape[0] == 1:
            return [place.whole(VALUE_HEAD, parameter)]
        if chunk.share_embeddings_and_output_weights:  # the last pipeline rank's copy of the first's
            return [place.copy().sharded("model.embed_tokens.weight", parameter, 0)]
        return [place.sharded("lm_head.weight", parameter, 0)]
    layer, inside = _LAYER.fullmatch(name).groups()
    prefix = f"model.layers.{chunk.decoder.layers[int(layer)].layer_number - 1}"
    if inside in _WHOLE:
        return [place.whole(f"{prefix}.{_WHOLE[inside]}", parameter)]
    if expert := _EXPERT.fullmatch(inside):
        place = _Place.expert()
        first = (
            parallel_state.get_expert_model_parallel_rank()
            * chunk.decoder.layers[int(layer)].mlp.num_local_experts
        )
        prefix, inside = f"{prefix}.mlp.experts.{first + int(expert[1])}", f"mlp.{expert[2]}"
    elif inside.startswith("mlp."):
        prefix = f"{prefix}.mlp"
    kind = inside.split(".")[-1]
    if inside.startswith("self_attention.linear_qkv."):
        return place.query_key_value(f"{prefix}.self_attn", kind, parameter, chunk)
    if inside == "self_attention.linear_proj.weight":
        return [place.sharded(f"{prefix}.self_attn.o_proj.weight", parameter, 1)]
    if inside == "mlp.linear_fc1.weight":
        return place.gate_and_up(prefix, parameter)
    if inside == "mlp.linear_fc2.weight":
        return [place.sharded(f"{prefix}.down_proj.weight", parameter, 1)]
    raise ValueError(f"parameter {name} of {type(chunk).__name__} has no counterpart on disk")


@dataclass(frozen=True)
class _Place:
    """Where this rank stands among those that share a matrix, and whether it speaks for them."""

    rank: int
    size: int
    first_replica: bool

    @classmethod
    def dense(cls) -> _Place:
        state = parallel_state
        return cls(
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
            state.get_data_parallel_rank(with_context_parallel=True) == 0,
        )

    @classmethod
    def expert(cls) -> _Place:
        state = parallel_state
        return cls(
            state.get_expert_tensor_parallel_rank(),
            state.get_expert_tensor_parallel_world_size(),
            state.get_expert_data_parallel_rank() == 0,
        )

    def copy(self) -> _Place:
        """The same place, that speaks for nobody."""
        return _Place(self.rank, self.size, False)

    def whole(self, name: str, parameter: nn.Parameter) -> Unit:
        shape, owned = tuple(parameter.shape), self.first_replica and self.rank == 0
        return Unit(name, shape, (0,) * len(shape), shape, owned, lambda tensor: tensor)

    def sharded(self, name: str, parameter: nn.Parameter, dimension: int) -> Unit:
        return self._block(name, tuple(parameter.shape), dimension, lambda tensor: tensor)

    def gate_and_up(self, prefix: str, parameter: nn.Parameter) -> list[Unit]:
        """Each rank has its rows of the one over its rows of the other."""
        rows, columns = parameter.shape[0] // 2, parameter.shape[1]
        return [
            self._block(f"{prefix}.{name}.weight", (rows, columns), 0, _rows(start, rows))
            for name, start in (("gate_proj", 0), ("up_proj", rows))
        ]

    def query_key_value(
        self, prefix: str, kind: str, parameter: nn.Parameter, chunk: TokenModel
    ) -> list[Unit]:
        """Group after group: the group's query heads, its key head, its value head."""
        config = chunk.config
        groups = config.num_query_groups // self.size
        width = config.kv_channels
        queries = config.num_attention_heads // config.num_query_groups * width
        rest = tuple(parameter.shape[1:])
        return [
            self._block(
                f"{prefix}.{name}.{kind}", (groups * rows, *rest), 0, _rows_of_groups(groups, start, rows)
            )
            for name, start, rows in (
                ("q_proj", 0, queries),
                ("k_proj", queries, width),
                ("v_proj", queries + width, width),
            )
        ]

    def _block(
        self, name: str, shape: tuple[int, ...], dimension: int, select: Callable[[Tensor], Tensor]
    ) -> Unit:
        whole = tuple(n * self.size if d == dimension else n for d, n in enumerate(shape))
        offsets = tuple(n * self.rank if d == dimension else 0 for d, n in enumerate(shape))
        return Unit(name, whole, offsets, shape, self.first_replica, select)


def _rows(start: int, count: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[start : start + count]


def _rows_of_groups(groups: int, start: int, count: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.unflatten(0, (groups, -1))[:, start : start + count]
