"""``baton preflight``: whether a layout is legal and fits, told without a device and without a framework."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from engines.architectures import max_positions
from engines.config import ConfigError, EngineConfig, parse
from engines.model_folder import ModelFolderError
from workflow.campaign.code import source_root
from workflow.campaign.layout_memory import PARTS, BatchShape
from workflow.campaign.layout_preflight import (
    USABLE,
    Answer,
    Question,
    answer,
    gigabytes,
    model_configuration,
    spell,
    suggest,
    usable_bytes,
    what_to_change,
)
from workflow.campaign.paths import replaced
from workflow.campaign.site import UNKNOWN, detect_site, load_site
from workflow.manifest import write_json

SHOWN = 3
"""Suggested layouts, at most."""
VERIFIED_RANKS = 16
"""Processes of --verify, at most."""


def preflight(
    model: Annotated[
        str,
        typer.Argument(help="a name in configs/model or configs/architecture, a folder, or a config.json"),
    ],
    engine: Annotated[str, typer.Option(help="fsdp2, fsdp or megatron")] = "fsdp2",
    set: Annotated[
        list[str] | None, typer.Option("--set", help="a key below engine and its value; may be repeated")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="longest; the token budget")] = None,
    micro_batches: Annotated[int, typer.Option(min=1, help="per rank and optimizer step")] = 8,
    memory: Annotated[float | None, typer.Option(min=0.1, help="GB of a device, instead of a site's")] = None,
    site: Annotated[str | None, typer.Option(help="a file in configs/site, or a path")] = None,
    device: Annotated[str, typer.Option(help="device key: cuda, npu or cpu")] = "cuda",
    rollout: Annotated[bool, typer.Option(help="a rollout replica in the same process")] = False,
    verify: Annotated[
        bool,
        typer.Option(
            help="also train the layout of a shrunken model on CPU ranks, and compare with one process"
        ),
    ] = False,
    devices: Annotated[
        int | None, typer.Option(min=1, help="suggest layouts of so many devices; those of the layout")
    ] = None,
) -> None:
    """Say whether a layout is legal and fits its devices, what to change, and which layouts would do. Exit code 1: it is not, or does
    not."""
    console = Console(width=160, highlight=False, soft_wrap=True)
    configs = source_root() / "configs"
    try:
        question = _question(
            model, engine, set or [], device, configs, sequence_length, micro_batches, rollout
        )
        question = _on_devices(question, memory, site, configs)
        found = answer(question)
        size = devices or question.engine.layout.world_size
        suggested = suggest(question, size)
        changes = what_to_change(question) if found.memory is not None and not found.fits else []
    except (ConfigError, ModelFolderError) as error:
        console.print(f"[red]refused:[/] {escape(str(error))}")
        raise typer.Exit(1) from None
    for line in [*describe(question, found), *(f"change: {change}" for change in changes)]:
        console.print(line, markup=False)
    console.print(
        f"layouts of {size} devices that fit, the plainest first:"
        if suggested
        else f"no layout of {size} devices fits"
    )
    for one in suggested[:SHOWN]:
        console.print(f"  {gigabytes(one.memory.total):>9}  {spell(one.engine)}", markup=False)
    verified = not verify or _verified(console, question, found)
    if not found.fits or not verified:
        raise typer.Exit(1)


def _verified(console: Console, question: Question, found: Answer) -> bool:
    """Train a shrunken model in the layout; in a process of its own, because that loads a framework."""
    ranks = question.engine.layout.world_size
    if found.refusal or ranks > VERIFIED_RANKS:
        why = (
            "it is not legal"
            if found.refusal
            else f"it has {ranks} ranks, at most {VERIFIED_RANKS} processes are started"
        )
        console.print(f"the layout is not trained: {why}", markup=False)
        return False
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "token_budget": 40,
        "layout": question.engine.layout.model_dump(),
    }
    settings |= {
        "backend": question.engine.backend,
        "activation_checkpointing": question.engine.activation_checkpointing,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "question.json"
        write_json(path, {"config": dict(question.config), "engine": settings})
        command = [sys.executable, "-m", "workflow.stages.layout_verify", str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    console.print(done.stdout.rstrip(), markup=False)
    return done.returncode == 0


def describe(question: Question, found: Answer) -> list[str]:
    """An answer in lines: what was asked, and the refusal or the sum."""
    lines = [
        f"{question.source}: {question.sizes.parameters / 1e9:,.2f} billion parameters",
        f"asked: {spell(question.engine)} dtype={question.engine.dtype}, {question.batch.tokens} tokens x "
        f"{question.batch.micro_batches} micro-batches on each of {question.engine.layout.world_size} devices",
    ]
    if found.memory is None:
        return [*lines, f"not legal: {found.refusal}"]
    held = found.memory
    parts = [f"{part} {gigabytes(getattr(held, part))}" for part in PARTS]
    where = (
        f"stage {held.stage} of the pipeline, " if question.engine.layout.pipeline_parallel_size > 1 else ""
    )
    verdict = "fits" if found.fits else "does not fit"
    return [
        *lines,
        f"legal; most is held at: {where}{held.moment}",
        f"{' + '.join(parts)} = {gigabytes(held.total)}",
        f"{verdict}: {gigabytes(usable_bytes(question))} are to be had ({USABLE:.0%} of {question.memory_gb:g} GB)",
    ]


def _question(
    model: str,
    backend: str,
    words: list[str],
    device: str,
    configs: Path,
    sequence_length: int | None,
    micro_batches: int,
    rollout: bool,
) -> Question:
    values = {"backend": backend, "device": device}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word}: key=value is needed")
        try:
            values = replaced(values, key, yaml.safe_load(value))
        except KeyError as error:
            raise ConfigError(f"{key}: {error.args[0]} has no keys below it") from None
    engine = parse(EngineConfig, values, path="engine")
    source, config = model_configuration(model, configs)
    source = source.removeprefix(f"{configs.parent}/")
    budget = engine.token_budget * engine.layout.context_parallel_size
    length = sequence_length or min(budget, max_positions(config) or budget)
    return Question(
        source, config, engine, BatchShape(engine.token_budget, micro_batches), length, 0.0, rollout=rollout
    )


def _on_devices(question: Question, memory: float | None, site: str | None, configs: Path) -> Question:
    if memory is not None and site is None:
        return replace(question, memory_gb=memory)
    place, key = load_site(site or detect_site(configs), configs), question.engine.device
    offered = place.devices.get(key)
    if offered is None:
        raise ConfigError(
            f"--device {key}: site {place.name!r} has {', '.join(place.devices)}; choose with --device, or give --memory"
        )
    if memory is None and offered.memory_per_device_gb == UNKNOWN:
        raise ConfigError(
            f"site.devices.{key}.memory_per_device_gb of {place.name!r} is unknown; set it, or give --memory"
        )
    return replace(
        question,
        memory_gb=memory or offered.memory_per_device_gb,
        devices_per_node=offered.devices_per_node,
    )
