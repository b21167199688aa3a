"""Parts of the Megatron engine that need no ranks."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.config import LayoutConfig
from engines.training.base import BaseEngine
from engines.training.batch import PackedBatch
from engines.training.errors import UnsupportedConfigError
from engines.training.megatron.attention import Packing
from engines.training.megatron.cpu import _ANSWERS, on_cpu
from engines.training.megatron.model import mark_shared_weights
from engines.training.megatron.parallelize import alignment
from engines.training.megatron.residency import Parked
from tests.conformance.check_contract import recording
from tests.conformance.data import make_sequences
from tests.conformance.subject import Subject, pack
from tests.support.models import VOCAB_SIZE


def test_the_scope_of_the_cpu_leaves_nothing_behind() -> None:
    before = [getattr(owner, name) for owner, name, _ in _ANSWERS]
    with contextlib.suppress(KeyError), on_cpu(), on_cpu():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).cuda().device == torch.cuda.current_device()
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        raise KeyError
    assert [getattr(owner, name) for owner, name, _ in _ANSWERS] == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_tensors_travel_to_processes_without_megatron() -> None:
    assert b"megatron" not in pickle.dumps(torch.ones(2))


def test_the_scope_of_the_cpu_is_refused_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UnsupportedConfigError, match="uses CUDA already"), on_cpu():
        pass


def test_parked_storages_come_back_under_all_their_views() -> None:
    buffer = torch.arange(12.0)
    first, second = buffer[:6].view(2, 3), buffer[6:]
    parked = Parked([first, second, buffer])
    assert (parked.nbytes, buffer.untyped_storage().nbytes()) == (48, 0)
    parked.bring_back()
    assert torch.equal(buffer, torch.arange(12.0))
    second.zero_()
    assert buffer.sum() == first.sum() == 15


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_context_parallelism_share_the_rows_of_every_sequence(size: int) -> None:
    rules = alignment(LayoutConfig(context_parallel_size=size))
    lengths = [3, 17, 1, 8]
    padded = torch.tensor([0, *rules.padded(lengths)]).cumsum(0)
    packings = [Packing.of(padded, size, rank, torch.device("cpu")) for rank in range(size)]
    rows = torch.cat([packing.rows for packing in packings])
    assert sorted(rows.tolist()) == list(range(rules.rows(lengths)))
    assert len({packing.rows.numel() for packing in packings}) == 1
    for packing in packings:
        sequence = torch.bucketize(packing.rows, padded, right=True) - 1
        assert torch.equal(packing.positions, packing.rows - padded[sequence])


def test_padding_counts_against_the_budget() -> None:
    rules = alignment(LayoutConfig(context_parallel_size=2, tensor_parallel_size=3, sequence_parallel=True))
    assert (rules.sequence, rules.total, rules.ranks) == (4, 12, 2)
    assert rules.rows([1, 5]) == 12
    assert rules.rows([1, 5, 1]) == 24
    batch = PackedBatch.from_sequences({"input_ids": [torch.zeros(1), torch.zeros(5)]})
    assert rules.padded(batch.lengths.tolist()) == [4, 8]


@pytest.mark.parametrize(("layout", "order"), [("PP2", [9, 24, 17, 3]), ("TP2", [3, 17, 9, 24])])
def test_a_pipeline_runs_cheap_micro_batches_first_and_last(layout: str, order: list[int]) -> None:
    subject = Subject("language_model", "megatron", layout=layout)
    subject = subject.but(defect=recording(subject))
    for sizes in subject.run(_sizes, subject.model()):
        assert sizes == [(tokens, 1) for tokens in order]


def _sizes(subject: Subject, model: Path) -> list[tuple[int, int]]:
    engine = subject.engine(model, dynamic_micro_batches=False, micro_batch_size=1)
    with engine.train_mode():
        engine.train_batch(pack(make_sequences(0, VOCAB_SIZE, (3, 17, 9, 24))), subject.loss)
    return engine.sizes


MARKS = ("tensor_model_parallel", "partition_dim", "allreduce")


def _marks(engine: BaseEngine) -> dict[str, tuple[Any, ...]]:
    return {
        name: tuple(getattr(parameter, mark, None) for mark in MARKS)
        for name, parameter in engine.chunks[0].named_parameters()
    }


def _marked_anew(subject: Subject, model: Path) -> tuple[dict, dict]:
    engine = subject.engine(model, forward_only=True)
    first = _marks(engine)
    for name, parameter in engine.chunks[0].named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            del parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride
        if ".experts." in name:
            parameter.allreduce = True
    mark_shared_weights(engine.chunks[0])
    return first, _marks(engine)


@pytest.mark.parametrize(
    ("layout", "family", "experts"),
    [("TP2", "qwen3", set()), ("TP2+SP", "qwen3-moe", {False}), ("TP2xETP2+SP", "qwen3-moe", {True})],
)
def test_what_ranks_share_is_marked_where_megatron_does_not(
    layout: str, family: str, experts: set[bool]
) -> None:
    subject = Subject("language_model", "megatron", layout=layout)
    for megatrons, ours in subject.run(_marked_anew, subject.model(family)):
        assert ours == megatrons
        assert {(True, 0), (True, 1)} < {marks[:2] for marks in ours.values()}
        assert {marks[2] for name, marks in ours.items() if ".experts." in name} == experts
