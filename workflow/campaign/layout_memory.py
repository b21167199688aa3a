"""What a training step needs of each rank's memory: an estimate from configuration alone. Loads no framework.

Tensors are counted as they live at the worst of a few moments of a step. What a layer keeps for its backward pass follows Korthikanti
et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4, with the terms that the layers of these
engines really save; a test holds the sum against tensors that are followed operation by operation. Left out: the frameworks'
own memory, communication libraries, and what an allocator loses to fragmentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engines.config import EngineConfig, LayoutConfig
from workflow.campaign.layout_sizes import Held, ModelSizes, megatron_stages

FLOAT32 = 4
LOGITS_AT_ONCE = 1 << 22
"""Elements: the engines make logits a few rows at a time."""
LOGITS_COPIES = 4
"""Of those rows: log-softmax, its exponential, and two of the entropy's gradient."""
PER_TOKEN = 16
"""Numbers of a token beside the model: ids, positions, masks, log-probs, advantages."""


@dataclass(frozen=True)
class BatchShape:
    """What one rank is given in an optimizer step."""

    tokens: int
    """Rows of a micro-batch on this rank, at most: ``engine.token_budget``."""
    micro_batches: int = 8
    """Per rank and optimizer step."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the moment of a step at which it holds most."""

    moment: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """What forward passes keep until their backward passes, of all micro-batches in flight."""
    working: int
    """What exists beside them: gathered weights, logits, gradients on their way."""
    rollout: int
    """Weights of the rollout replica in the same process."""
    stage: int = 0
    """Of a pipeline."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part) for part in PARTS)


PARTS = ("parameters", "gradients", "optimizer", "activations", "working", "rollout")


def estimate(model: ModelSizes, engine: EngineConfig, batch: BatchShape, rollout: bool = False) -> Memory:
    """Memory of the rank that needs most, at its worst moment.

    Args:
        engine: with backend, layout, dtype and activation checkpointing; its layout is legal.
        rollout: a replica samples in the same process: the whole model in float32, as ``TransformersRollout`` keeps it.
    """
    replica = FLOAT32 * model.parameters if rollout else 0
    if engine.forward_only:
        return _forward_only(model, engine, batch, replica)
    find = megatron_moments if engine.backend == "megatron" else fsdp_moments
    return max(find(model, engine, batch, replica), key=lambda memory: memory.total)


def compute_bytes(engine: EngineConfig) -> int:
    """Of one number in forward and backward passes."""
    return 2 if engine.dtype == "bfloat16" else FLOAT32


# ---- what a layer keeps of each token --------------------------------------------------------------------------------


def kept_by_fsdp_layer(model: ModelSizes, shared: int = 1) -> float:
    """Numbers of a token that a layer of transformers keeps for its backward pass.

    Each norm keeps its input, the normalised input and its output. Attention keeps rotated queries and keys, values, its output and a
    log-sum-exp per head; where queries and keys have norms, also what goes in and their normalised form. The MLP keeps gate, up,
    silu(gate) and the product; of a mixture see :func:`_kept_by_experts`.

    Args:
        shared: ranks that exchange heads for tokens around attention, which keeps what they exchanged.
    """
    query, key = model.query, model.key_value
    attention = 2 * query + 2 * key + model.heads
    if model.qk_norm:
        attention += 2 * query + 2 * key + model.heads + model.key_value_heads
    if shared > 1:
        copies = math.lcm(model.key_value_heads, shared) // model.key_value_heads
        attention += query + 2 * (copies - 1) * key
    mlp = _kept_by_experts(model, FSDP_EXPERTS) if model.experts else 4 * model.intermediate
    return 6 * model.hidden + 2 + attention + mlp


def _kept_in_float32(model: ModelSizes, engine: EngineConfig) -> float:
    """Bytes of a token that a layer's norms keep beyond that in half precision.

    Those of transformers keep their input as a copy in float32. torch's, which Megatron has here, keep on a CPU the normalised input in
    float32 too; on accelerators they are one kernel that keeps neither.
    """
    if engine.dtype == "float32":
        return 0
    norms = 2 * model.hidden + (model.query + model.key_value if model.qk_norm else 0)
    if engine.backend != "megatron":
        return 2 * norms
    shared = engine.layout.tensor_parallel_size if engine.layout.sequence_parallel else 1
    return 4 * norms / shared if engine.device == "cpu" else 0


def kept_by_megatron_layer(model: ModelSizes, layout: LayoutConfig) -> float:
    """The same of Megatron's local layers, per row of this rank.

    The projections to queries, keys and values are one tensor, which stays; queries are copied out of it where groups of heads
    share keys. Rotation keeps the cosines and sines of queries and of keys. silu(gate) is multiplied with a copy of up.
    """
    tensor, context = layout.tensor_parallel_size, layout.context_parallel_size
    query, key = model.query, model.key_value
    attention = 3 * query + 3 * key + model.heads
    if model.qk_norm:
        copied = query if 1 < model.key_value_heads // tensor < model.heads // tensor else 0
        attention += query + copied + key + model.heads + model.key_value_heads
    if context > 1:  # keys and values of all ranks, in order, and the joined outputs of two chunks
        attention += 2 * key * context + query
    mlp = 5 * model.intermediate / tensor
    if model.experts:  # the tensor-parallel ranks share the rows, unless they share the experts' matrices
        shared = layout.expert_tensor_parallel_size
        mlp = _kept_by_experts(model, MEGATRON_EXPERTS, shared) * shared / tensor
    norms = (6 * model.hidden + 2) / (tensor if layout.sequence_parallel else 1)
    return norms + attention / tensor + 4 * model.head_dim + mlp


@dataclass(frozen=True)
class ExpertsKept:
    """Of a mixture's layer, per token."""

    intermediate: int
    """Times an expert's width, per chosen expert."""
    hidden: int
    """Times the model's width, per chosen expert."""
    choice: int
    """Numbers per chosen expert: its weight, and where the token went."""
    routing: float
    """Numbers per expert."""


FSDP_EXPERTS = ExpertsKept(intermediate=4, hidden=2, choice=10, routing=1)
MEGATRON_EXPERTS = ExpertsKept(intermediate=6, hidden=1, choice=8, routing=4.5)
"""Its experts multiply with a token's weight before their second matrix, which keeps one more product, and no output."""


def _kept_by_experts(model: ModelSizes, kept: ExpertsKept, expert_tensor: int = 1) -> float:
    """When tokens are balanced: the experts of a rank see as many as it has."""
    chosen = kept.intermediate * model.intermediate / expert_tensor + kept.hidden * model.hidden + kept.choice
    return model.experts_per_token * chosen + kept.routing * model.experts


# ---- FSDP ------------------------------------------------------------------------------------------------------------


def fsdp_moments(model: ModelSizes, engine: EngineConfig, batch: BatchShape, replica: int) -> list[Memory]:
    """Of the FSDP engines (Zhao et al., PyTorch FSDP, 2023, section 3.2).

    Each layer is a unit that is gathered for its forward and backward pass, embeddings and head are another that stays from the
    first to the last layer. Between the micro-batches of a step each rank keeps whole gradients, and from a backward pass to the next
    forward pass whole weights.
    """
    layout, size, rows = engine.layout, compute_bytes(engine), batch.tokens
    context = layout.context_parallel_size
    shards = (layout.shard_size or layout.data_parallel_size) * context
    layer, whole = model.layer_parameters, model.parameters
    root = whole - model.layers * layer
    # FSDP1 reduces in half precision after every micro-batch, and so keeps no whole gradients (``FSDP1Engine.no_sync``).
    accumulates = batch.micro_batches > 1 and not (engine.backend == "fsdp" and size < FLOAT32)
    kept = rows * (size * kept_by_fsdp_layer(model, context) + _kept_in_float32(model, engine))
    entry = size * rows * model.hidden
    before = entry if engine.activation_checkpointing else kept
    recomputed = kept if engine.activation_checkpointing else 0
    token = rows * (size * 2 * model.head_dim + FLOAT32 * PER_TOKEN)
    head = size * model.vocabulary * model.hidden
    backward = head + size * rows * _backward_width(model, 3, 2)
    backward += size * (_largest(model, layout) if accumulates else layer)
    accumulated = FLOAT32 * whole if accumulates else FLOAT32 * whole / shards * (batch.micro_batches > 1)

    def moment(name: str, gradients: float, activations: float, working: float) -> Memory:
        states = (FLOAT32 * whole / shards, gradients, 2 * FLOAT32 * whole / shards)
        return Memory(name, *(round(part) for part in (*states, activations, working, replica)))

    def gathered(layers: int) -> int:
        return size * (whole if shards == 1 else root + min(layers, model.layers) * layer)

    return [
        moment(
            "output head",
            accumulated,
            model.layers * before + 2 * entry + token,
            gathered(1) + head + _head_work(model.vocabulary, model.hidden, rows, size) + 2 * entry,
        ),
        moment(
            "backward of the last layer",
            accumulated,
            model.layers * before + recomputed + token,
            gathered(2) + backward,
        ),
        moment(
            "backward of the first layer",
            accumulated or FLOAT32 * (model.layers - 1) * layer / shards,
            before + recomputed + token,
            size * (whole if accumulates else root + layer) + backward,
        ),
        moment("optimizer step", FLOAT32 * whole / shards, 0, FLOAT32 * rows * PER_TOKEN),
    ]


# ---- Megatron --------------------------------------------------------------------------------------------------------


def megatron_moments(
    model: ModelSizes, engine: EngineConfig, batch: BatchShape, replica: int
) -> list[Memory]:
    """Of every pipeline stage."""
    layout = engine.layout
    return [
        memory
        for stage, held in enumerate(megatron_stages(model, layout))
        for memory in _stage_moments(model, engine, batch, replica, stage, held)
    ]


def in_flight(layout: LayoutConfig, stage: int, micro_batches: int) -> float:
    """Micro-batches of which a pipeline stage keeps all its layers' activations; a fraction when it is interleaved.

    One forward one backward: a stage is as many ahead as there are stages after it. Interleaved: Narayanan et al., Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (2021), section 2.2.
    """
    stages, virtual = layout.pipeline_parallel_size, layout.virtual_pipeline_parallel_size
    if virtual == 1:
        return min(micro_batches, stages - stage)
    ahead = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    return min(micro_batches * virtual, ahead) / virtual


def _stage_moments(
    model: ModelSizes, engine: EngineConfig, batch: BatchShape, replica: int, stage: int, held: Held
) -> list[Memory]:
    layout, size = engine.layout, compute_bytes(engine)
    tensor, stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    rows = batch.tokens
    entry = size * rows * model.hidden / (tensor if layout.sequence_parallel else 1)
    kept = rows * (size * kept_by_megatron_layer(model, layout) + _kept_in_float32(model, engine))
    layers = model.layers // stages
    flying = in_flight(layout, stage, batch.micro_batches)
    before = layers * (entry if engine.activation_checkpointing else kept)
    recomputed = kept if engine.activation_checkpointing else 0
    token = rows * (size * model.head_dim + FLOAT32 * PER_TOKEN)
    sent = flying * entry if stages > 1 else 0
    buffer = size * rows * model.hidden if layout.sequence_parallel else 0
    activations = flying * before + sent + token
    if engine.activation_checkpointing and model.experts:
        activations += layers * size * rows * _held_by_routers(model, layout)
    backward = size * rows * _megatron_backward_width(model, layout)

    def moment(name: str, activations: float, working: float) -> Memory:
        parts = (
            size * held.all,
            FLOAT32 * held.all,
            optimizer_bytes(engine, held),
            activations,
            working,
            replica,
        )
        return Memory(name, *(round(part) for part in parts), stage=stage)

    embedding = model.vocabulary * model.hidden // tensor
    moments = [
        moment(
            "backward of a layer",
            activations + recomputed,
            buffer + backward + size * _largest(model, layout),
        ),
        moment(
            "optimizer step", token, buffer + _step_work(engine, held, _largest(model, layout), embedding)
        ),
    ]
    if stage == stages - 1:
        work = (
            size * embedding
            + _head_work(model.vocabulary // tensor, model.hidden, rows, size)
            + 3 * size * rows * model.hidden
        )
        moments.append(moment("output head", activations + 2 * entry, buffer + work))
    return moments


def optimizer_bytes(engine: EngineConfig, held: Held) -> int:
    """Two moments, and float32 weights beside those of a shorter type (Rajbhandari et al., ZeRO, 2020, section 3)."""
    layout = engine.layout
    each = FLOAT32 * (2 if engine.dtype == "float32" else 3)
    if not layout.distributed_optimizer:
        return each * held.all
    sharing = layout.data_parallel_size * layout.context_parallel_size
    experts = sharing * layout.tensor_parallel_size
    experts /= layout.expert_parallel_size * layout.expert_tensor_parallel_size
    return round(each * (held.dense / sharing + held.experts / experts))


def _step_work(engine: EngineConfig, held: Held, largest: int, embedding: int) -> int:
    """AdamW of torch steps one tensor after the other on a CPU, on accelerators all at once, with a copy of the second moment."""
    if engine.device == "cpu":
        return 2 * FLOAT32 * max(largest, embedding)
    return optimizer_bytes(engine, held) // (2 if engine.dtype == "float32" else 3)


# ---- without training ------------------------------------------------------------------------------------------------


def _forward_only(model: ModelSizes, engine: EngineConfig, batch: BatchShape, replica: int) -> Memory:
    """Of a reference: weights, one layer's activations and the logits of the last."""
    layout, size = engine.layout, compute_bytes(engine)
    tensor = layout.tensor_parallel_size
    if engine.backend == "megatron":
        held = max(megatron_stages(model, layout), key=lambda held: held.all)
        parameters, gathered = size * held.all, 0
        kept = kept_by_megatron_layer(model, layout)
    else:
        shards = (layout.shard_size or layout.data_parallel_size) * layout.context_parallel_size
        parameters, gathered = FLOAT32 * model.parameters / shards, size * model.parameters
        kept = kept_by_fsdp_layer(model, layout.context_parallel_size)
    working = (
        gathered
        + size * batch.tokens * kept
        + _head_work(model.vocabulary // tensor, model.hidden, batch.tokens, FLOAT32)
    )
    return Memory("forward pass", round(parameters), 0, 0, 0, round(working), replica)


# ---- what both have --------------------------------------------------------------------------------------------------


def _head_work(vocabulary: int, hidden: int, rows: int, size: int) -> int:
    """Logits of as many rows as are made at once; of several such parts, gradients of the head are added in float32."""
    at_once = max(1, LOGITS_AT_ONCE // vocabulary)
    added = FLOAT32 * vocabulary * hidden if rows > at_once and size < FLOAT32 else 0
    return FLOAT32 * LOGITS_COPIES * vocabulary * min(rows, at_once) + added


def _largest(model: ModelSizes, layout: LayoutConfig) -> int:
    """The largest matrix of a layer on a rank: its gradient exists beside the buffer that it is added to."""
    split = layout.expert_tensor_parallel_size if model.experts else layout.tensor_parallel_size
    attention = model.hidden * (model.query + 2 * model.key_value) // layout.tensor_parallel_size
    return max(2 * model.hidden * model.intermediate // split, attention)


def _backward_width(model: ModelSizes, hidden: int, intermediate: int) -> float:
    """Numbers of a token that a layer's backward pass holds at once: gradients of its output and inside its MLP."""
    chosen = model.experts_per_token if model.experts else 1
    return hidden * model.hidden + chosen * intermediate * model.intermediate


def _megatron_backward_width(model: ModelSizes, layout: LayoutConfig) -> float:
    """The same of Megatron's layers.

    Of mixtures also tokens on their way to experts and back, and what one expert after the other works on; how often was measured and not
    derived.
    """
    tensor, split = layout.tensor_parallel_size, layout.expert_tensor_parallel_size
    if not model.experts:
        return 2 * model.hidden + 2 * model.intermediate / tensor
    inside = model.hidden + model.intermediate / split
    local = model.experts / layout.expert_parallel_size
    rows = model.experts_per_token * split / tensor
    return 2 * model.hidden + rows * (1.5 * model.hidden + inside / local)


def _held_by_routers(model: ModelSizes, layout: LayoutConfig) -> float:
    """Numbers of a token that a Megatron layer's router holds on to when activations are recomputed.

    It remembers the weights of the experts, and with them the start of the recomputed graph: the layer's input, its copy and its gradient.
    """
    routing = model.experts * 1.25 + 2 * model.experts_per_token
    return (3 * model.hidden + 2 * routing) / layout.tensor_parallel_size
