"""Layouts are judged without a device: refused, or summed up against a device's memory, with what would do."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engines.architectures import max_positions
from engines.config import EngineConfig, LayoutConfig
from tests.campaign.layout_examples import EXAMPLE, PAGE, with_output
from workflow.campaign.layout_memory import BatchShape, estimate, in_flight
from workflow.campaign.layout_preflight import (
    Question,
    answer,
    model_configuration,
    spell,
    suggest,
    what_to_change,
)
from workflow.campaign.layout_sizes import megatron_stages, model_sizes
from workflow.cli import app

ROOT = Path(__file__).parents[2]
NAMES = ("qwen2-7b", "qwen3-30b-a3b", "qwen3-235b-a22b")


def question(name: str, memory: float, backend: str = "fsdp2", **engine: Any) -> Question:
    source, config = model_configuration(name, ROOT / "configs")
    settings = EngineConfig(backend=backend, device="cuda", dtype="bfloat16", **engine)
    return Question(source, config, settings, BatchShape(settings.token_budget), 4096, memory)


def preflight(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["preflight", *words])
    return done.exit_code, done.output


@pytest.mark.parametrize(("name", "billions"), zip(NAMES, (7.6156, 30.532, 235.094), strict=True))
def test_parameters_are_those_of_the_published_models(name: str, billions: float) -> None:
    source, config = model_configuration(name, ROOT / "configs")
    assert model_sizes(config, source).parameters / 1e9 == pytest.approx(billions, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [1, 2])
def test_the_ranks_hold_the_whole_model(name: str, stages: int) -> None:
    """The shares of tensor-parallel ranks add up, but for what every rank has: norms and the router."""
    source, config = model_configuration(name, ROOT / "configs")
    model = model_sizes(config, source)
    layout = LayoutConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=stages,
        expert_tensor_parallel_size=2 if model.experts else 1,
    )
    repeated = model.layers * (
        2 * model.hidden + 2 * model.head_dim * model.qk_norm + model.router_parameters
    )
    held = sum(held.all for held in megatron_stages(model, layout))
    assert 2 * held == model.parameters + repeated + model.hidden


REFUSED: list[tuple[list[str], str]] = [
    (["qwen2-7", "--memory", "80"], "did you mean 'qwen2-7b'?"),
    (["qwen2-7b", "--memory", "80", "--engine", "megatrom"], "did you mean 'megatron'?"),
    (["qwen2-7b", "--memory", "80", "--set", "token_buget=5"], "did you mean 'token_budget'?"),
    (["qwen2-7b", "--memory", "80", "--set", "dtype"], "key=value is needed"),
    (["qwen2-7b", "--memory", "80", "--set", "dtype=float32", "--set", "dtype.x=1"], "dtype has no keys below it"),
    (["qwen2-7b", "--memory", "80", "--sequence-length", "40000", "--set", "token_budget=50000"], "max_position_embeddings=32768"),
    (["qwen2-7b", "--memory", "80", "--sequence-length", "5000"], "more than token_budget=4096"),
    (["qwen2-7b", "--site", "local"], "site 'local' has cpu"),
    (["qwen2-7b", "--site", "daint"], "memory_per_device_gb of 'daint' is unknown"),
    (["qwen2-7b", "--site", "nowhere"], "site='nowhere'"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "reason"), REFUSED)
def test_what_cannot_be_answered_is_refused(words: list[str], reason: str) -> None:
    code, output = preflight(*words)
    assert code == 1
    assert reason in output


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "no transformers configuration"),
        ('{"model_type": "llama", "max_position_embeddings": 8192}', "hidden_size=None"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    code, output = preflight(str(tmp_path), "--memory", "80")
    assert code == 1
    assert reason in output


def test_an_illegal_layout_is_told_with_the_nearest() -> None:
    code, output = preflight(
        "qwen2-7b", "--memory", "80", "--engine", "megatron", "--set", "layout.tensor_parallel_size=8"
    )
    assert code == 1
    assert "not legal" in output
    assert "num_attention_heads=28" in output
    assert "layout.tensor_parallel_size=4" in output.partition("nearest that works")[2]


def test_the_parts_are_a_sum_and_fit_or_not() -> None:
    code, output = preflight(
        "qwen2-7b", "--memory", "80", "--set", "layout.data_parallel_size=8", "--set", "dtype=bfloat16"
    )
    assert code == 0
    line = next(line for line in output.splitlines() if line.startswith("parameters"))
    parts, total = line.split(" = ")
    numbers = [float(part.split()[-2]) for part in parts.split(" + ")]
    assert sum(numbers) == pytest.approx(float(total.split()[0]), abs=0.4)
    code, output = preflight(
        "qwen2-7b", "--memory", "40", "--set", "layout.data_parallel_size=8", "--set", "dtype=bfloat16"
    )
    assert code == 1
    assert "does not fit: 36.0 GB" in output
    assert "change: " in output


def test_a_site_says_what_a_device_has() -> None:
    code, output = preflight("tiny-qwen3", "--site", "local", "--device", "cpu", "--set", "token_budget=512")
    assert code == 0
    assert "90% of 4 GB" in output


def test_a_replica_counts() -> None:
    plain = question("qwen2-7b", 80, layout=LayoutConfig(data_parallel_size=8))
    with_replica = estimate(plain.sizes, plain.engine, plain.batch, rollout=True)
    without = estimate(plain.sizes, plain.engine, plain.batch)
    assert with_replica.total - without.total == 4 * plain.sizes.parameters


def test_single_changes_that_would_fit_are_named() -> None:
    asked = question("qwen2-7b", 70, layout=LayoutConfig(data_parallel_size=8))
    assert not answer(asked).fits
    assert any(
        change.startswith("activation_checkpointing=true would fit") for change in what_to_change(asked)
    )


def test_when_nothing_helps_more_devices_are_named() -> None:
    asked = question("qwen3-30b-a3b", 64, "megatron", layout=LayoutConfig(data_parallel_size=4))
    changes = what_to_change(asked)
    assert "still too much" in changes[0]
    assert "devices: engine=" in changes[1]


@pytest.mark.parametrize("memory", [64, 80])
@pytest.mark.parametrize(("name", "devices"), zip(NAMES, (8, 32, 256), strict=True))
def test_suggested_layouts_are_legal_and_fit(name: str, devices: int, memory: float) -> None:
    asked = question(name, memory)
    suggestions = suggest(asked, devices)
    assert suggestions
    for found in suggestions:
        assert found.engine.layout.world_size == devices
        assert found.fits
        assert not found.refusal


ROW = re.compile(
    r"^\| .* \| `(?P<name>[\w.-]+)` on (?P<devices>\d+) x (?P<memory>\d+) GB(?:, (?P<micro_batches>\d+) micro-batch)? "
    r"\| `(?P<engine>engine=[^`]*)` \|$",
    re.MULTILINE,
)
GUIDE = [found.groupdict() for found in ROW.finditer(PAGE.read_text(encoding="utf-8"))]


def test_the_guide_tells_every_kind_of_layout() -> None:
    engines = [row["engine"] for row in GUIDE]
    assert len(engines) == len(set(engines)) == 7
    for word in ("fsdp2", "megatron", "tensor_", "pipeline_", "expert_", "activation_checkpointing"):
        assert any(word in engine for engine in engines)


@pytest.mark.parametrize("row", GUIDE, ids=lambda row: f"{row['name']}-{row['devices']}x{row['memory']}")
def test_the_guide_and_the_suggestions_agree(row: dict[str, str]) -> None:
    asked = question(row["name"], float(row["memory"]))
    asked = replace(
        asked,
        sequence_length=min(4096, max_positions(asked.config)),
        batch=BatchShape(4096, micro_batches=int(row["micro_batches"] or 8)),
    )
    assert spell(suggest(asked, int(row["devices"]))[0].engine) == row["engine"]


@pytest.mark.parametrize(
    ("stages", "virtual", "stage", "micro_batches", "expected"),
    [(4, 1, 0, 8, 4), (4, 1, 3, 8, 1), (4, 1, 0, 2, 2), (4, 2, 0, 8, 5.5), (2, 2, 1, 1, 1)],
)
def test_micro_batches_in_flight(
    stages: int, virtual: int, stage: int, micro_batches: int, expected: float
) -> None:
    layout = LayoutConfig(pipeline_parallel_size=stages, virtual_pipeline_parallel_size=virtual)
    assert in_flight(layout, stage, micro_batches) == expected


def test_no_framework_is_loaded() -> None:
    code = (
        "import sys; from workflow.campaign import layout_preflight; "
        "sys.exit(str({'torch', 'transformers', 'ray'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.strip() == ""


def test_a_layout_is_trained_beside_one_process() -> None:
    words = ["tiny-qwen3", "--site", "local", "--device", "cpu", "--set", "token_budget=512", "--verify"]
    code, output = preflight(*words, "--set", "layout.data_parallel_size=2")
    assert code == 0, output
    assert "verified: relative difference" in output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--set", "layout.data_parallel_size=32"], "it has 32 ranks, at most 16"),
        (["--set", "layout.tensor_parallel_size=2"], "it is not legal"),
    ],
)
def test_a_layout_that_cannot_be_trained_here_is_not_called_verified(words: list[str], reason: str) -> None:
    code, output = preflight("tiny-qwen3", "--memory", "64", "--verify", *words)
    assert code == 1
    assert f"the layout is not trained: {reason}" in output


def test_the_page_shows_what_preflight_prints() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = [found[1] for found in EXAMPLE.finditer(page)]
    for name in NAMES:
        for memory in (64, 80):
            assert any(f"{name} " in command and f"--memory {memory}" in command for command in shown)
    assert with_output(page) == page, "python -m tests.campaign.layout_examples writes it anew"
