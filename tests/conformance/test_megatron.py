"""Megatron in every layout: each on two models or more, each architecture in five layouts or more."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from engines.training.scope import PARTS
from tests.conformance.check_numbers import GRADIENT, UNCLIPPED, check_inference, check_training
from tests.conformance.check_states import check_export, check_resume
from tests.conformance.data import make_sequences
from tests.conformance.layouts import END, PAGE, START
from tests.conformance.subject import (
    MEGATRON_LAYOUTS,
    Subject,
    exported,
    first_gradient,
    require_close_tensors,
    require_equal_tensors,
    share,
)
from tests.conformance.table import CASES, TABLE
from tests.conformance.test_conformance import PADDING_TOKEN
from tests.support.models import VOCAB_SIZE
from tests.support.ranks import RankFailed

UNPACKED = {"dynamic_micro_batches": False, "micro_batch_size": 1}


def language_model(layout: str) -> Subject:
    return Subject("language_model", "megatron", layout=layout)


def test_the_table_is_complete() -> None:
    assert set(TABLE) == set(MEGATRON_LAYOUTS) - {"world 1"}
    assert all(len(families) > 1 for families in TABLE.values())
    for architecture in ("llama", "qwen2", "qwen3", "qwen3-moe"):
        names = {architecture, f"{architecture}-tied"}
        assert len({layout for layout, family in CASES if family in names}) >= 5


def test_the_page_lists_every_case_of_the_table() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]
    rows = [
        [cell.strip() for cell in line.split("|")[1:4]]
        for line in table.splitlines()
        if "+" in line or "P" in line
    ]
    assert [(layout, family) for layout, _, family in rows if (layout, family) in CASES] == CASES


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_a_layout_computes_what_one_process_computes(layout: str, family: str) -> None:
    subject = language_model(layout)
    check_training(subject, family, temperature=0.8)
    check_inference(subject, family, **UNPACKED)
    check_export(subject, family)


@pytest.mark.parametrize(("layout", "family"), [(name, families[0]) for name, families in TABLE.items()])
def test_a_layout_resumes_bit_for_bit(layout: str, family: str) -> None:
    check_resume(language_model(layout), family=family)


@pytest.mark.parametrize("layout", ["TP2+SP", "PP2xVPP2", "CP2", "EP2xDP2"])
def test_auxiliary_losses_do_not_depend_on_the_layout(layout: str) -> None:
    alone, subject = language_model("world 1"), language_model(layout)
    model = subject.model("qwen3-moe")
    plain = alone.run(_gradient, model, 0.0)[0]
    expected = alone.run(_gradient, model, 0.1)[0]
    assert max(float((plain[name] - expected[name]).abs().max()) for name in plain) > 1e-3
    for found in subject.run(_gradient, model, 0.1):
        require_close_tensors("gradient of", found, expected, GRADIENT)


def _gradient(subject: Subject, model: Path, coefficient: float) -> dict[str, Tensor]:
    """Of sixteen micro-batches of one sequence each: the split is the same in every layout."""
    engine = subject.engine(model, optimizer=UNCLIPPED, moe_aux_loss_coefficient=coefficient, **UNPACKED)
    sequences = make_sequences(0, VOCAB_SIZE, (8, 13, 30, 7) * 4)
    return first_gradient(engine, share(engine, sequences), subject.loss)


@pytest.mark.parametrize("layout", ["world 1", "TP2", "TP2+SP", "CP2", "TP2xCP2+SP"])
def test_a_padding_token_inside_a_sequence(layout: str) -> None:
    check_training(language_model(layout), "qwen3-tied", architecture={"pad_token_id": PADDING_TOKEN})


@pytest.mark.parametrize("layout", ["TP2+SP", "CP2", "TP2xPP2xDP2+SP+DO"])
def test_a_value_head_learns_the_same_in_every_layout(layout: str) -> None:
    check_training(Subject("value_model", "megatron", layout=layout), "qwen2")


@pytest.mark.parametrize(
    ("source", "target", "family"),
    [
        ("TP2", "PP2", "qwen3-tied"),
        ("PP2", "DP2+DO", "qwen2"),
        ("DP2+DO", "TP2xCP2+SP", "qwen3"),
        ("PP2xVPP2", "TP2+SP", "llama"),
        ("TP2xEP2xDP2+SP", "PP2xEP2xDP2+DO", "qwen3-moe"),
        ("EP2xDP2", "TP2xETP2+SP", "qwen3-moe-tied"),
    ],
)
def test_states_reshard(source: str, target: str, family: str) -> None:
    check_resume(language_model(source), language_model(target), family=family)


def test_states_move_between_fsdp2_and_megatron() -> None:
    fsdp = Subject("language_model", "fsdp2", layout="world 2")
    check_resume(fsdp, language_model("TP2"), family="qwen3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["DP2+DO", "PP2"])
def test_what_was_parked_trains_on_as_if_it_had_stayed(layout: str, dtype: str) -> None:
    subject = language_model(layout)
    for waiting, parked, plain in subject.run(_parked, subject.model(), dtype):
        assert waiting == 0
        require_equal_tensors("parameter", parked, plain)


def _parked(subject: Subject, model: Path, dtype: str) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    first, second = subject.engine(model, dtype=dtype), subject.engine(model, dtype=dtype)
    sequences = make_sequences(0, VOCAB_SIZE)
    for engine in (first, second):
        with engine.train_mode():
            engine.train_batch(share(engine, sequences), subject.loss)
    for part in PARTS:
        first.park(part)
    waiting = sum(tensor.untyped_storage().nbytes() for part in PARTS for tensor in first._tensors_of(part))
    for part in PARTS:
        first.bring_back(part)
    for engine in (first, second):
        with engine.train_mode():
            engine.train_batch(share(engine, sequences), subject.loss)
    return waiting, dict(exported(first)), dict(exported(second))


def test_a_process_keeps_the_layout_that_it_joined() -> None:
    subject = language_model("TP2")
    with pytest.raises(RankFailed, match=r"tensor_parallel_size=1 \(is 2\).*processes of its own"):
        subject.run(_two_layouts, subject.model())


def _two_layouts(subject: Subject, model: object) -> None:
    subject.engine(model)
    subject.but(layout="PP2").engine(model)
