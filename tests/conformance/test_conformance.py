"""Every engine that is built on this machine, in every layout, is held against the contract and the reference."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

import pytest
import torch

from engines.catalog import device_present
from engines.registry import EngineRegistry
from engines.training.batch import AGGREGATIONS
from tests.conformance.check_contract import (
    check_budget,
    check_contract,
    check_dropout_masks,
    check_forward_only,
    check_modes,
    check_non_finite_step,
    check_residency,
)
from tests.conformance.check_numbers import (
    batches,
    check_bfloat16,
    check_bfloat16_sums,
    check_inference,
    check_schedule,
    check_training,
    check_uneven_ranks,
    check_value_head,
)
from tests.conformance.check_states import check_export, check_resume, check_save_is_neutral
from tests.conformance.subject import LAYOUTS, Subject
from tests.support.models import FAMILIES

TRIPLES = [(t.model_type, t.backend, t.device) for t in EngineRegistry.triples() if t.state == "built"]
EVERYWHERE = {
    "fsdp": ["world 1", "world 2", "world 4", "HSDP 2x2", "CP 4", "DP 2 x CP 2"],
    "fsdp2": ["world 1", "world 2", "world 4", "HSDP 2x2", "CP 2", "CP 4", "DP 2 x CP 2"],
    "megatron": ["world 1", "TP2xCP2+SP", "PP2xVPP2xDP2"],
}
"""Where the main checks are made. Every other layout of Megatron has its turn in test_megatron.py."""
SUBJECTS = [
    Subject(*triple, name)
    for triple in TRIPLES
    for name in EVERYWHERE[triple[1]]
    if triple[2] == "cpu" or LAYOUTS[name].world_size <= getattr(torch, triple[2]).device_count()
]
SHARED_BY_TWO = {"fsdp": "world 2", "fsdp2": "world 2", "megatron": "PP2"}
ON_TWO = [
    Subject(*triple, SHARED_BY_TWO[triple[1]])
    for triple in TRIPLES
    if triple[2] == "cpu" or getattr(torch, triple[2]).device_count() >= 2
]
PADDING_TOKEN = int(torch.cat([s["input_ids"] for s in batches(1)[0]]).mode().values)
"""A token that stands in the sequences several times."""
VALUE_MODELS = [subject for subject in SUBJECTS if subject.model_type == "value_model"]

ALLOWED = ("torch", "transformers", "safetensors")
everywhere = pytest.mark.parametrize("subject", SUBJECTS, ids=str)
on_two_ranks = pytest.mark.parametrize("subject", ON_TWO, ids=str)


def test_nothing_that_is_built_is_left_out() -> None:
    devices = [device for device in ("cpu", "cuda", "npu") if device_present(device)]
    keys = itertools.product(("language_model", "value_model"), ("fsdp", "fsdp2", "megatron"), devices)
    assert sorted(TRIPLES) == sorted(keys)
    assert len([subject for subject in SUBJECTS if subject.device == "cpu"]) == 32


def test_the_reference_knows_no_engine() -> None:
    tree = ast.parse((Path(__file__).parent / "reference.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    assert {name.partition(".")[0] for name in imported} <= {*sys.stdlib_module_names, *ALLOWED}


@everywhere
def test_training_equals_the_reference(subject: Subject) -> None:
    check_training(subject)


@everywhere
def test_inference_equals_the_reference(subject: Subject) -> None:
    check_inference(subject, temperature=0.7)


@everywhere
def test_export_equals_the_source(subject: Subject) -> None:
    check_export(subject)


@everywhere
def test_resuming_changes_no_bit(subject: Subject) -> None:
    check_resume(subject)


@everywhere
def test_uneven_ranks_finish(subject: Subject) -> None:
    check_uneven_ranks(subject)


@everywhere
def test_budget_is_agreed(subject: Subject) -> None:
    check_budget(subject)


@pytest.mark.parametrize(
    "subject", [s for s in ON_TWO if s.device == "cpu" and s.layout == "world 2"], ids=str
)
@pytest.mark.parametrize(
    ("source", "target"),
    [("world 2", "world 1"), ("world 2", "world 4"), ("world 1", "HSDP 2x2"), ("CP 2", "DP 2 x CP 2")],
)
def test_states_reshard(subject: Subject, source: str, target: str) -> None:
    check_resume(subject.but(layout=source), subject.but(layout=target))


@pytest.mark.parametrize("backends", [("fsdp", "fsdp2"), ("fsdp2", "fsdp")], ids="-".join)
def test_states_move_between_both_fsdp(backends: tuple[str, str]) -> None:
    source, target = (Subject("language_model", backend, layout="world 2") for backend in backends)
    check_resume(source, target, family="qwen3-tied")


@on_two_ranks
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(subject: Subject, family: str) -> None:
    check_training(subject, family)
    check_export(subject, family)
    check_resume(subject, family=family)


@on_two_ranks
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations(subject: Subject, aggregation: str) -> None:
    check_training(subject, aggregation=aggregation)


SPLITS = {
    "one sequence": {"dynamic_micro_batches": False, "micro_batch_size": 1},
    "ragged last": {"dynamic_micro_batches": False, "micro_batch_size": 4},
    "all at once": {"dynamic_micro_batches": False, "micro_batch_size": 100},
    "large budget": {"token_budget": 1000},
}


@on_two_ranks
@pytest.mark.parametrize("split", SPLITS)
def test_any_micro_batches(subject: Subject, split: str) -> None:
    check_training(subject, temperature=1.3, **SPLITS[split])
    check_inference(subject, **SPLITS[split])


@on_two_ranks
@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied"])
def test_a_padding_token_inside_a_sequence(subject: Subject, family: str) -> None:
    """Transformers gives the embedding of the padding token no gradient where it is read."""
    check_training(subject, family, architecture={"pad_token_id": PADDING_TOKEN})


@on_two_ranks
def test_activation_checkpointing(subject: Subject) -> None:
    check_training(subject, activation_checkpointing=True)


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_ranks_that_share_sequences_have_as_many_heads_as_they_need(
    backend: str, checkpointing: bool
) -> None:
    """3 heads of keys and values for 2 ranks: each is there twice; with checkpointing they are exchanged once more."""
    subject = Subject("language_model", backend, layout="CP 2")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    check_training(subject, architecture=heads, activation_checkpointing=checkpointing)


@on_two_ranks
def test_bfloat16(subject: Subject) -> None:
    check_bfloat16(subject)


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2", "megatron"])
@pytest.mark.parametrize("layout", ["world 1", "world 2"])
def test_bfloat16_adds_micro_batches_in_float32(backend: str, layout: str) -> None:
    check_bfloat16_sums(
        Subject(
            "language_model",
            backend,
            layout="DP2+DO" if (backend, layout) == ("megatron", "world 2") else layout,
        )
    )


@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("fsdp", "world 2"),
        ("fsdp2", "world 2"),
        *(("megatron", layout) for layout in ("world 1", "DP2+DO", "PP2")),
    ],
)
def test_bfloat16_starts_from_the_weights_that_are_in_the_files(
    model_type: str, backend: str, layout: str
) -> None:
    check_export(Subject(model_type, backend, layout=layout), dtype="bfloat16")


@on_two_ranks
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_learning_rate(subject: Subject, name: str) -> None:
    check_schedule(subject, name)


@on_two_ranks
def test_contract(subject: Subject) -> None:
    check_contract(subject)


@on_two_ranks
def test_forward_only(subject: Subject) -> None:
    check_forward_only(subject)


@on_two_ranks
def test_modes(subject: Subject) -> None:
    check_modes(subject)


@on_two_ranks
def test_dropout_does_not_depend_on_cuts(subject: Subject) -> None:
    check_resume(subject, attention_dropout=0.3)


@pytest.mark.parametrize(
    "subject",
    [
        Subject("language_model", backend, layout=layout)
        for backend, layouts in {
            "fsdp": ["world 2", "CP 2"],
            "fsdp2": ["CP 2", "DP 2 x CP 2"],
            "megatron": ["TP2", "CP2", "PP2"],
        }.items()
        for layout in layouts
    ],
    ids=str,
)
def test_every_rank_draws_dropout_masks_of_its_own(subject: Subject) -> None:
    check_dropout_masks(subject)


@on_two_ranks
def test_residency(subject: Subject) -> None:
    check_residency(subject)


@on_two_ranks
def test_non_finite_steps_are_skipped(subject: Subject) -> None:
    check_non_finite_step(subject)


@on_two_ranks
def test_saving_changes_no_bit(subject: Subject) -> None:
    check_save_is_neutral(subject)


@pytest.mark.parametrize("subject", VALUE_MODELS, ids=str)
def test_value_head(subject: Subject) -> None:
    check_value_head(subject)
