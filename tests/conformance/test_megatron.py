"""Megatron in every layout: each on two models or more, each architecture in five layouts or more."""

from __future__ import annotations

import pytest

from engines.training.errors import UnsupportedConfigError
from tests.conformance.check_numbers import check_inference, check_training
from tests.conformance.check_states import check_export, check_resume
from tests.conformance.subject import MEGATRON_LAYOUTS, Subject
from tests.support.ranks import RankFailed

TABLE = {
    "TP2": ("llama", "qwen2"),
    "TP2+SP": ("qwen3", "qwen3-moe"),
    "PP2": ("llama", "qwen3-tied"),
    "PP2xVPP2": ("qwen2", "qwen3-moe-tied"),
    "CP2": ("llama", "qwen3"),
    "DP2+DO": ("qwen2", "qwen3-moe"),
    "EP2xDP2": ("qwen3-moe", "qwen3-moe-tied"),
    "TP2xETP2+SP": ("qwen3-moe", "qwen3-moe-tied"),
    "TP2xPP2": ("llama", "qwen3-tied"),
    "TP2xCP2+SP": ("qwen2", "qwen3"),
    "PP2xVPP2xDP2": ("llama", "qwen3"),
    "TP2xPP2xDP2+SP+DO": ("llama", "qwen2"),
    "TP2xEP2xDP2+SP": ("qwen3-moe", "qwen3-moe-tied"),
    "PP2xEP2xDP2+DO": ("qwen3-moe", "qwen3-moe-tied"),
}
CASES = [(layout, family) for layout, families in TABLE.items() for family in families]
UNPACKED = {"dynamic_micro_batches": False, "micro_batch_size": 1}


def language_model(layout: str) -> Subject:
    return Subject("language_model", "megatron", layout=layout)


def test_the_table_is_complete() -> None:
    assert set(TABLE) == set(MEGATRON_LAYOUTS) - {"world 1"}
    assert all(len(families) > 1 for families in TABLE.values())
    for architecture in ("llama", "qwen2", "qwen3", "qwen3-moe"):
        names = {architecture, f"{architecture}-tied"}
        assert len({layout for layout, family in CASES if family in names}) >= 5


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_a_layout_computes_what_one_process_computes(layout: str, family: str) -> None:
    subject = language_model(layout)
    check_training(subject, family, temperature=0.8)
    check_inference(subject, family, **UNPACKED)
    check_export(subject, family)


@pytest.mark.parametrize(("layout", "family"), [(name, families[0]) for name, families in TABLE.items()])
def test_a_layout_resumes_bit_for_bit(layout: str, family: str) -> None:
    check_resume(language_model(layout), family=family)


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


def test_a_process_keeps_the_layout_that_it_joined() -> None:
    subject = language_model("TP2")
    with pytest.raises(RankFailed, match=r"tensor_parallel_size=1 \(is 2\).*processes of its own"):
        subject.run(_two_layouts, subject.model())


def _two_layouts(subject: Subject, model: object) -> None:
    subject.engine(model)
    subject.but(layout="PP2").engine(model)


def test_the_scope_of_the_cpu_leaves_nothing_behind_and_is_refused_beside_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from engines.training.megatron.cpu import _ANSWERS, on_cpu

    before = [getattr(owner, name) for owner, name, _ in _ANSWERS]
    with on_cpu(), on_cpu():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).cuda().device == torch.cuda.current_device()
    assert [getattr(owner, name) for owner, name, _ in _ANSWERS] == before
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UnsupportedConfigError, match="uses CUDA already"), on_cpu():
        pass
