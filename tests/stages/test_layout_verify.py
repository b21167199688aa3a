"""Layouts against one process on a shrunken model: what agrees is told from what does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.catalog import FSDP, MEGATRON
from engines.config import EngineConfig, LayoutConfig
from workflow.stages import layout_verify

LAYOUTS = [
    LayoutConfig(tensor_parallel_size=4, pipeline_parallel_size=2, virtual_pipeline_parallel_size=3),
    LayoutConfig(context_parallel_size=6, data_parallel_size=2),
    LayoutConfig(
        tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=4, data_parallel_size=2
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_the_shrunken_model_divides_as_the_layout_asks(layout: LayoutConfig, model_type: str) -> None:
    if layout.expert_parallel_size > 1:
        model_type = "qwen3_moe"
    elif layout.tensor_parallel_size > 1 and model_type == "qwen3_moe":
        layout = layout.model_copy(update={"sequence_parallel": True})
    small = layout_verify.shrunken({"model_type": model_type}, layout.model_dump())
    engine = EngineConfig(layout=layout)
    limits = FSDP if layout.context_parallel_size > 1 else MEGATRON
    assert limits.refuse_layout(engine, small) == ""


def test_ranks_that_compute_something_else_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [{"loss": 1.0, "grad_norm": 2.0}] * layout_verify.STEPS
    wrong = [*steps[:-1], {"loss": 1.0, "grad_norm": 2.001}]
    monkeypatch.setattr(
        layout_verify, "train", lambda engine, *rest: steps if engine.layout.world_size == 1 else wrong
    )
    assert _main(tmp_path, monkeypatch, "fsdp2") == 1
    assert "DIFFERS: relative difference 5.0e-04" in capsys.readouterr().out


def test_a_rank_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(tmp_path, monkeypatch, "fsdp2", pipeline_parallel_size=2) == 1
    assert "failed: RuntimeError: rank 0: UnsupportedConfigError" in capsys.readouterr().out


def _main(folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str, **layout: int) -> int:
    sizes = LayoutConfig(**(layout or {"data_parallel_size": 2})).model_dump()
    engine = {"backend": backend, "device": "cpu", "token_budget": 40, "layout": sizes}
    question = {"config": {"model_type": "qwen3"}, "engine": engine}
    (folder / "question.json").write_text(json.dumps(question), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["layout_verify", str(folder / "question.json")])
    return layout_verify.main()
