"""Every loss in real engines: on more ranks, in other micro-batches and with shared sequences the gradient and the metrics stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.training.batch import AGGREGATIONS
from tests.conformance.check_numbers import UNCLIPPED
from tests.conformance.data import Sequence, make_sequences
from tests.conformance.subject import Subject, first_gradient, merged, pack, require_close_tensors, share
from tests.rl.test_losses import LOSS_NAMES, LOSSES
from tests.support.models import VOCAB_SIZE
from workflow.rl.losses import PolicyLoss, ValueLoss

ALONE = Subject("language_model", "fsdp2")
WAYS = {
    "one by one": (ALONE, {"dynamic_micro_batches": False, "micro_batch_size": 1}),
    "on two ranks": (ALONE.but(layout="world 2"), {"token_budget": 60}),
    "sequences shared by two ranks": (ALONE.but(layout="CP 2"), {"token_budget": 40}),
    "in a pipeline of Megatron": (ALONE.but(backend="megatron", layout="PP2"), {"token_budget": 60}),
}
Found = list[tuple[dict[str, tuple[float, float]], dict[str, Tensor]]]


def infer(subject: Subject, model: Path, sequences: list[Sequence]) -> Tensor:
    """Log-probs, or values, of all tokens; on a rank."""
    engine = subject.engine(model)
    with engine.eval_mode():
        (field,) = engine.infer_batch(pack(sequences)).values()
    return field


def learn(
    subject: Subject, model: Path, batches: list[list[Sequence]], losses: list[Any], how: dict[str, Any]
) -> Found:
    """Metrics and gradient of each loss on its mini-batch; on a rank."""
    found = []
    for number, (sequences, loss) in enumerate(zip(batches, losses, strict=True)):
        engine = subject.engine(model, optimizer=UNCLIPPED, **how)
        batch = share(engine, sequences)
        aggregation = {"aggregation": [*AGGREGATIONS][number % len(AGGREGATIONS)], "max_length": 16}
        with engine.train_mode():
            metrics = engine.forward_backward_batch(batch, loss, **aggregation, forward_only=True)
        found.append((metrics, first_gradient(engine, batch, loss, **aggregation)))
    return found


def mini_batch(loss: Any, sequences: list[Sequence], now: Tensor) -> list[Sequence]:
    """The sequences with all that the loss reads, near what the model says ``now``; a choice is made from all of them."""
    batch = pack(sequences)
    drawn = torch.randn(4, batch.num_tokens, generator=torch.Generator().manual_seed(1))
    old = now + 0.3 * drawn[0]
    batch = batch.with_tokens(
        old_log_probs=old,
        reference_log_probs=now + 0.3 * drawn[1],
        old_values=old,
        correction=drawn[2].abs(),
        noise=drawn[3],
    )
    if isinstance(loss, PolicyLoss) and loss.algorithm.surrogate.selects:
        batch = loss.select(batch, now)
    parts = {name: field.split(batch.lengths.tolist()) for name, field in batch.tokens.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(batch))]


def cases(value_model: bool) -> tuple[list[str], list[Any]]:
    """Names and losses for one kind of model."""
    chosen = [i for i, loss in enumerate(LOSSES) if isinstance(loss, ValueLoss) == value_model]
    return [LOSS_NAMES[i] for i in chosen], [LOSSES[i] for i in chosen]


@pytest.fixture(scope="module", params=["language_model", "value_model"])
def expected(request: Any) -> tuple[str, list[list[Sequence]], Found]:
    """Everything at once on one rank."""
    subject = ALONE.but(model_type=request.param)
    drawn = make_sequences(0, VOCAB_SIZE)
    sequences = [{**s, "advantages": s["advantages"] - 1.0} for s in drawn]  # of both signs
    (now,) = subject.run(infer, subject.model(), sequences)
    _, losses = cases(request.param == "value_model")
    batches = [mini_batch(loss, sequences, now) for loss in losses]
    (found,) = subject.run(learn, subject.model(), batches, losses, {"token_budget": 1000}, timeout=200)
    return request.param, batches, found


@pytest.mark.parametrize("way", WAYS)
def test_every_loss_learns_the_same(expected: tuple, way: str) -> None:
    model_type, batches, whole = expected
    names, losses = cases(model_type == "value_model")
    subject, how = WAYS[way]
    subject = replace(subject, model_type=model_type)
    ranks = subject.run(learn, subject.model(), batches, losses, how, timeout=200)
    for number, name in enumerate(names):
        metrics, right = whole[number]
        together = merged([found[number][0] for found in ranks])
        assert together.keys() == metrics.keys(), name
        for key, value in together.items():
            total, count = metrics[key]
            assert value == pytest.approx(total / count, rel=1e-5, abs=1e-6), (name, key)
        assert max(gradient.abs().max() for gradient in right.values()) > 1e-3, name
        for found in ranks:
            require_close_tensors(f"{name}: gradient of", found[number][1], right, 1e-5)
