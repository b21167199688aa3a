"""Whether a layout is legal and fits its devices, what to change when it does not, and which layouts would do. Loads no framework."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines import catalog
from engines.architectures import max_positions
from engines.config import ConfigError, EngineConfig, LayoutConfig, nearest
from engines.limits import Limits
from engines.workers.spec import process_groups
from workflow.campaign.build import PlannedRun
from workflow.campaign.files import load_named, names_of
from workflow.campaign.forecast import read_model
from workflow.campaign.layout_memory import BatchShape, Memory, estimate
from workflow.campaign.layout_sizes import ModelSizes, model_sizes
from workflow.campaign.schema import ModelConfig
from workflow.campaign.site import UNKNOWN

LIMITS: dict[str, Limits] = {
    "fsdp2": catalog.FSDP,
    "fsdp": catalog.FSDP,
    "megatron": catalog.MEGATRON,
}
"""The engines whose memory is known."""
USABLE = 0.9
"""Of a device's memory: the rest is left to what is not counted, the framework, communication and fragmentation."""
GIB = 2**30
_ARCHITECTURES = "architecture"


@dataclass(frozen=True)
class Question:
    """What is asked."""

    source: str
    """Where the model's configuration stands, for messages."""
    config: Mapping[str, Any]
    """transformers configuration."""
    engine: EngineConfig
    batch: BatchShape
    sequence_length: int
    """The longest sequence."""
    memory_gb: float
    """Of each device, in units of 2**30 bytes."""
    devices_per_node: int = 8
    rollout: bool = False

    @property
    def sizes(self) -> ModelSizes:
        """Of the model."""
        return model_sizes(self.config, self.source)


@dataclass(frozen=True)
class Answer:
    """What is found: a refusal, or the memory of a legal layout."""

    engine: EngineConfig
    refusal: str = ""
    memory: Memory | None = None
    fits: bool = False


def model_configuration(name: str, configs: Path) -> tuple[str, dict[str, Any]]:
    """(where it stands, transformers configuration) of a model.

    Args:
        name: a file in configs/model or configs/architecture, a folder with config.json, or a path that ends in .json.

    Raises:
        ConfigError: there is no such model, or it is no configuration.
        ModelFolderError: what configs/model names is incomplete or damaged.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json":
        path = configs / _ARCHITECTURES / f"{name}.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON ({error})") from None
        if not isinstance(config, dict) or "model_type" not in config:
            raise ConfigError(f"{path}: no transformers configuration: it has no model_type")
        return str(path), _same_names(config)
    known = names_of("model", configs)
    if name not in known:
        known += sorted(file.stem for file in (configs / _ARCHITECTURES).glob("*.json"))
        raise ConfigError(
            f"model={name!r}: no folder with config.json, no file .json and no model of configs; {nearest(name, known)}"
        )
    model = load_named("model", name, configs, ModelConfig)
    facts = read_model(model)
    config = dict(facts.config)
    if model.tokenizer is not None:
        config.setdefault("vocab_size", model.tokenizer.vocab_size)
    return facts.source, _same_names(config)


def _same_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers writes the number of experts under another name than it reads it."""
    named = dict(config)
    if "num_local_experts" in named:
        named.setdefault("num_experts", named["num_local_experts"])
    return named


def answer(question: Question) -> Answer:
    """Legal or not, and what it needs.

    Raises:
        ConfigError: the engine's memory is not known, or the sequences do not fit the model or the token budget.
    """
    engine = question.engine
    limits = LIMITS.get(engine.backend)
    if limits is None:
        raise ConfigError(
            f"engine={engine.backend!r}: its memory is not known; {nearest(engine.backend, list(LIMITS))}"
        )
    _check_lengths(question)
    refusal = (
        limits.refuse_model(question.config)
        or limits.refuse_settings(engine)
        or limits.refuse_layout(engine, question.config)
    )
    if refusal:
        return Answer(engine, refusal)
    memory = estimate(question.sizes, engine, question.batch, question.rollout)
    return Answer(engine, memory=memory, fits=memory.total <= usable_bytes(question))


def usable_bytes(question: Question) -> float:
    """Of a device, for what is counted."""
    return USABLE * question.memory_gb * GIB


def _check_lengths(question: Question) -> None:
    room = max_positions(question.config)
    if room is not None and question.sequence_length > room:
        raise ConfigError(
            f"sequence_length={question.sequence_length}: more than max_position_embeddings={room} of {question.source}"
        )
    budget = question.batch.tokens * question.engine.layout.context_parallel_size
    if question.sequence_length > budget:
        raise ConfigError(
            f"sequence_length={question.sequence_length}: more than token_budget={question.batch.tokens} x "
            f"layout.context_parallel_size={question.engine.layout.context_parallel_size}"
        )


def memory_of_processes(run: PlannedRun) -> list[str]:
    """For each process group of a run, in words: what a rank of it needs, and whether the site's devices have it."""
    engines = {path: run.config.role_engine(path.partition(".")[0]) for path in run.devices if "." in path}
    groups = [["engine"], *process_groups(engines)] if "engine" in run.devices else process_groups(engines)
    return [_memory_of_group(run, paths, engines | {"engine": run.config.engine}) for paths in groups]


def _memory_of_group(run: PlannedRun, paths: list[str], engines: Mapping[str, EngineConfig]) -> str:
    told = f"memory of {', '.join(paths)} on each of {engines[paths[0]].layout.world_size} ranks"
    config = dict(run.model.config)
    if run.config.model.tokenizer is not None:
        config.setdefault("vocab_size", run.config.model.tokenizer.vocab_size)
    try:
        sizes = model_sizes(_same_names(config), run.model.source)
    except ConfigError as error:
        return f"{told}: not known ({error})"
    unknown = [engines[path].backend for path in paths if engines[path].backend not in LIMITS]
    if unknown:
        return f"{told}: not known of {', '.join(unknown)}"
    roles = [
        estimate(sizes, engines[path], BatchShape(engines[path].token_budget), path.startswith("actor"))
        for path in paths
    ]
    # One role computes at a time; the others only hold their states.
    states = sum(role.parameters + role.optimizer + role.rollout for role in roles)
    needed = states + max(role.gradients + role.activations + role.working for role in roles)
    site = run.config.site
    offered = site.devices[site.key_of(run.devices[paths[0]])].memory_per_device_gb
    if offered == UNKNOWN:
        return f"{told}: {gigabytes(needed)}; what a device has is unknown"
    verdict = "fits" if needed <= USABLE * offered * GIB else "does NOT fit"
    return f"{told}: {gigabytes(needed)}, {verdict} {offered:g} GB (see baton preflight)"


def what_to_change(question: Question) -> list[str]:
    """Single changes with which a layout that does not fit would; else what helps most, and the fewest devices that would do."""
    found: list[tuple[str, Answer]] = []
    for key, changed in _single_changes(question):
        tried = answer(changed)
        if tried.memory is not None:
            found.append((key, tried))
    fitting = [f"{key} would fit ({gigabytes(a.memory.total)})" for key, a in found if a.fits]
    if fitting:
        return fitting
    notes = []
    if found:
        key, best = min(found, key=lambda pair: pair[1].memory.total)
        notes.append(f"most helps {key}: {gigabytes(best.memory.total)}, still too much")
    size = question.engine.layout.world_size
    for devices in (size * 2**doubled for doubled in range(12)):
        if suggestions := suggest(question, devices):
            return [*notes, f"on {devices} devices: {spell(suggestions[0].engine)} fits"]
    return [*notes, "no layout of up to " + f"{size * 2**11} devices fits"]


def _single_changes(question: Question) -> Iterator[tuple[str, Question]]:
    engine, layout = question.engine, question.engine.layout
    if not engine.activation_checkpointing:
        yield "activation_checkpointing=true", _with(question, activation_checkpointing=True)
    sharing = layout.data_parallel_size * layout.context_parallel_size
    if engine.backend == "megatron" and sharing > 1 and not layout.distributed_optimizer:
        changed = layout.model_copy(update={"distributed_optimizer": True})
        yield "layout.distributed_optimizer=true", _with(question, layout=changed)
    halved = engine.token_budget // 2
    if halved * layout.context_parallel_size >= question.sequence_length:
        smaller = _with(question, token_budget=halved)
        yield f"token_budget={halved}", replace(smaller, batch=replace(question.batch, tokens=halved))
    if engine.dtype == "float32" and engine.device != "cpu":
        yield "dtype=bfloat16", _with(question, dtype="bfloat16")
    if question.rollout:
        yield "sampling in other processes (no rollout)", replace(question, rollout=False)


def _with(question: Question, **changes: Any) -> Question:
    return replace(question, engine=question.engine.model_copy(update=changes))


def suggest(question: Question, devices: int) -> list[Answer]:
    """Legal layouts of so many devices that fit, the plainest first.

    The order is that of docs/layouts.md: fsdp2 before megatron; without recomputing activations before with; then the fewest pipeline
    stages, expert-parallel and tensor-parallel ranks.
    """
    tried = (answer(_with(question, **changes)) for changes in _candidates(question, devices))
    return [found for found in tried if found.fits]


def _candidates(question: Question, devices: int) -> Iterator[dict[str, Any]]:
    recompute = (False, True)
    for again in recompute:
        layout = LayoutConfig(data_parallel_size=devices)
        yield {"backend": "fsdp2", "layout": layout, "activation_checkpointing": again}
    sizes = question.sizes
    powers = [2**n for n in range(devices.bit_length())]
    tensor = [n for n in powers if n <= question.devices_per_node]
    pipeline = [n for n in range(1, devices + 1) if sizes.layers % n == 0 and devices % n == 0]
    expert = [n for n in powers if sizes.experts and sizes.experts % n == 0] or [1]
    for again, stages, experts, size in itertools.product(recompute, pipeline, expert, tensor):
        if devices % (size * stages) or (devices // stages) % experts:
            continue
        data = devices // (size * stages)
        layout = LayoutConfig(
            tensor_parallel_size=size,
            pipeline_parallel_size=stages,
            expert_parallel_size=experts,
            data_parallel_size=data,
            sequence_parallel=size > 1,
            distributed_optimizer=data > 1,
        )
        yield {"backend": "megatron", "layout": layout, "activation_checkpointing": again}


def spell(engine: EngineConfig) -> str:
    """The settings of an engine that preflight is about, as overrides; those at their defaults are left out."""
    plain = LayoutConfig()
    words = [
        f"layout.{key}={str(value).lower()}"
        for key in LayoutConfig.model_fields
        if (value := getattr(engine.layout, key)) != getattr(plain, key)
    ]
    words += ["activation_checkpointing=true"] if engine.activation_checkpointing else []
    return " ".join([f"engine={engine.backend}", *words])


def gigabytes(size: float) -> str:
    """Bytes in the units of a site file, or a 1024th of them where that says more."""
    if 0 < size < GIB / 10:
        return f"{size / 2**20:,.1f} MB"
    return f"{size / GIB:,.1f} GB"
