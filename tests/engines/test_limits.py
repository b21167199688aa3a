"""Layouts that Megatron would compute wrongly or not at all are refused, with the nearest that works."""

from __future__ import annotations

from typing import Any

import pytest

from engines.catalog import FSDP, MEGATRON
from engines.config import EngineConfig, LayoutConfig

DENSE = {
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "num_hidden_layers": 28,
}
MIXTURE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 768}

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"tensor_parallel_size": 16}, DENSE, "num_key_value_heads=8", "layout.tensor_parallel_size=8"),
    ({"tensor_parallel_size": 3}, DENSE, "num_attention_heads=16", "layout.data_parallel_size=3, layout.tensor_parallel_size=1"),
    ({"tensor_parallel_size": 2}, {**DENSE, "vocab_size": 97}, "the vocabulary is not padded", "layout.tensor_parallel_size=1"),
    ({"pipeline_parallel_size": 8}, DENSE, "num_hidden_layers=28", "layout.pipeline_parallel_size=4"),
    ({"pipeline_parallel_size": 4, "virtual_pipeline_parallel_size": 2}, DENSE, "=8 does not divide", "layout.virtual_pipeline_parallel_size=1"),
    ({"virtual_pipeline_parallel_size": 2}, DENSE, "layout.pipeline_parallel_size, which is 1", "layout.virtual_pipeline_parallel_size=1"),
    ({"sequence_parallel": True}, DENSE, "layout.tensor_parallel_size, which is 1", "layout.sequence_parallel=False"),
    ({"distributed_optimizer": True}, DENSE, "which are 1", "layout.distributed_optimizer=False"),
    ({"expert_parallel_size": 2, "data_parallel_size": 2}, DENSE, "the model has no experts", "layout.expert_parallel_size=1"),
    ({"expert_parallel_size": 8, "data_parallel_size": 4}, MIXTURE, "does not divide the 4 ranks", "layout.expert_parallel_size=4"),
    ({"expert_parallel_size": 3, "data_parallel_size": 6}, MIXTURE, "num_experts=128", "layout.expert_parallel_size=2"),
    ({"expert_tensor_parallel_size": 5, "data_parallel_size": 5}, MIXTURE, "moe_intermediate_size=768", "layout.expert_tensor_parallel_size=1"),
    ({"tensor_parallel_size": 2}, MIXTURE, "needs layout.sequence_parallel=True", "layout.sequence_parallel=True"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "model", "reason", "nearest"), REFUSED)
def test_a_layout_that_does_not_fit_is_refused_with_the_nearest(
    layout: dict[str, Any], model: dict[str, Any], reason: str, nearest: str
) -> None:
    text = MEGATRON.refuse_layout(EngineConfig(layout=layout), model)
    assert reason in text
    assert nearest in text.partition("nearest that works: ")[2]


@pytest.mark.parametrize(("layout", "model", "reason", "nearest"), REFUSED)
def test_the_nearest_layout_works(
    layout: dict[str, Any], model: dict[str, Any], reason: str, nearest: str
) -> None:
    text = MEGATRON.refuse_layout(EngineConfig(layout=layout), model)
    changes = dict(word.split("=") for word in text.partition("nearest that works: ")[2].split(", "))
    found = LayoutConfig.model_validate(
        {**layout, **{key.removeprefix("layout."): value for key, value in changes.items()}}
    )
    assert MEGATRON.refuse_layout(EngineConfig(layout=found), model) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral' is not served"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
    ],
)
def test_a_model_that_is_computed_differently_is_refused(change: dict[str, Any], reason: str) -> None:
    assert MEGATRON.refuse_model(DENSE) == ""
    assert reason in MEGATRON.refuse_model({**DENSE, **change})


def test_ranks_that_share_sequences_divide_the_heads() -> None:
    layout = LayoutConfig(context_parallel_size=4)
    assert FSDP.refuse_layout(EngineConfig(layout=layout), DENSE | {"num_attention_heads": 8}) == ""
    assert FSDP.refuse_layout(EngineConfig(layout=layout), DENSE | {"num_attention_heads": 6}) == (
        "layout.context_parallel_size=4 does not divide the model's num_attention_heads=6; "
        "nearest that works: layout.context_parallel_size=3"
    )
