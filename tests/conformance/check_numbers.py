"""The suite's checks: numbers. Each is a function of a subject and fails with :class:`Mismatch`.

Tolerances (float32): loss 1e-6 relative; a tensor's gradient 5e-6 of its norm; parameters 1e-5 after three AdamW steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.conformance.data import LENGTHS, Sequence, make_sequences
from tests.conformance.subject import (
    ADAMW,
    Subject,
    exported,
    first_gradient,
    merged,
    pack,
    require,
    require_close,
    require_close_tensors,
    share,
)
from tests.support.models import VOCAB_SIZE

LOSS, GRADIENT, PARAMETERS = 1e-6, 5e-6, 1e-5
OUTPUTS = 2e-5
"""Absolute, of log-probs, entropies and values that are of order 1 to 10."""

UNCLIPPED = {**ADAMW, "clip_grad_norm": 1e9}


def batches(count: int = 3, lengths: tuple[int, ...] = LENGTHS) -> list[list[Sequence]]:
    """The mini-batches of some steps, all different."""
    return [make_sequences(seed, VOCAB_SIZE, lengths) for seed in range(count)]


def check_training(
    subject: Subject,
    family: str = "qwen3",
    loss: Any = None,
    aggregation: str = "token-mean",
    temperature: float = 1.0,
    lengths: tuple[int, ...] = LENGTHS,
    architecture: dict[str, Any] | None = None,
    **config: Any,
) -> None:
    """Loss and its metrics, gradient of each tensor, its norm, and parameters after three clipped AdamW steps."""
    model, loss = subject.model(family, **(architecture or {})), loss or subject.loss
    steps = batches(lengths=lengths)
    how = {"aggregation": aggregation, "max_length": 64 if aggregation.endswith("-norm") else None}
    expected = subject.reference(model, temperature).train(steps, loss, ADAMW, **how)
    ranks = subject.run(train_on_rank, model, steps, loss, how, {"temperature": temperature, **config})
    for step, right in enumerate(expected.losses):
        found = merged([metrics[step] for metrics, _, _ in ranks])
        require_close(f"loss of step {step}", found["loss"], right, LOSS if step == 0 else 10 * LOSS)
        require_close(
            f"gradient norm of step {step}", found["grad_norm"], expected.gradient_norms[step], 1e-5
        )
        for name, whole in expected.metrics[step].items():
            require_close(f"metric {name} of step {step}", found[name], whole, 10 * LOSS)
        require(found["skipped_steps"] == 0, f"step {step} was skipped")
    for _, gradient, parameters in ranks:
        require_close_tensors("gradient of", gradient, expected.gradients, GRADIENT)
        require_close_tensors("parameter", parameters, expected.parameters, PARAMETERS, absolute=True)


def train_on_rank(
    subject: Subject,
    model: Path,
    steps: list[list[Sequence]],
    loss: Any,
    how: dict[str, Any],
    settings: dict[str, Any],
) -> tuple[list[dict], dict[str, Tensor], dict[str, Tensor]]:
    """Metrics of each step, the first step's gradient, and the parameters after all; called on a rank."""
    engine = subject.engine(model, optimizer=UNCLIPPED, **settings)
    gradient = first_gradient(engine, share(engine, steps[0]), loss, **how)
    engine = subject.engine(model, **settings)
    with engine.train_mode():
        metrics = [engine.train_batch(share(engine, step), loss, **how) for step in steps]
    return metrics, gradient, dict(exported(engine))


def check_uneven_ranks(subject: Subject) -> None:
    """Data-parallel ranks with 10, 1 and 0 sequences finish and agree with the reference."""
    model, steps = subject.model(), batches()
    expected = subject.reference(model).train(steps, subject.loss, ADAMW)
    ranks = subject.run(_train_unevenly, model, steps, timeout=40)
    for step, right in enumerate(expected.losses):
        found = merged([metrics[step] for metrics, _ in ranks])["loss"]
        require_close(f"loss of step {step}", found, right, 10 * LOSS)
    for _, parameters in ranks:
        require_close_tensors("parameter", parameters, expected.parameters, PARAMETERS, absolute=True)


def _train_unevenly(
    subject: Subject, model: Path, steps: list[list[Sequence]]
) -> tuple[list[dict], dict[str, Tensor]]:
    engine = subject.engine(model)
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    cuts = [0, *([len(LENGTHS) - 1] if size > 1 else []), *[len(LENGTHS)] * (size - 1 or 1)]
    with engine.train_mode():
        metrics = [
            engine.train_batch(pack(step[cuts[rank] : cuts[rank + 1]], step[0]), subject.loss)
            for step in steps
        ]
    return metrics, dict(exported(engine))


def check_inference(
    subject: Subject,
    family: str = "qwen3",
    temperature: float = 1.0,
    lengths: tuple[int, ...] = LENGTHS,
    **config: Any,
) -> None:
    """Outputs in the batch's order, whatever the micro-batches; entropies; log-probs at the temperature."""
    model, (sequences,) = subject.model(family), batches(1, lengths)
    reference = subject.reference(model, temperature)
    ranks = subject.run(_infer, model, sequences, {"temperature": temperature, **config})
    seen = set()
    for rank, size, is_source, without, outputs in ranks:
        if not is_source:
            require(not outputs and not without, f"rank {rank} is no source and returned {sorted(outputs)}")
            continue
        seen.add(rank)
        expected = reference.infer(sequences[rank::size])
        require("entropy" not in without, "entropy was returned without being asked for")
        require(outputs.keys() == expected.keys(), f"outputs {sorted(outputs)}, not {sorted(expected)}")
        for name, right in expected.items():
            found = outputs[name]
            kind = (found.dtype, found.device.type, tuple(found.shape))
            require(kind == (torch.float32, "cpu", tuple(right.shape)), f"{name} is {kind}")
            error = (found - right).abs().max().item()
            require(
                error <= OUTPUTS, f"{name} differs from the reference by {error:.2e}, allowed {OUTPUTS:.0e}"
            )
            if name in without:
                again = (without[name] - found).abs().max().item()
                require(again <= OUTPUTS, f"{name} changes by {again:.2e} when entropy is asked for")
    require(
        seen == set(range(ranks[0][1])), f"sources for data-parallel ranks {sorted(seen)} of {ranks[0][1]}"
    )


def _infer(subject: Subject, model: Path, sequences: list[Sequence], settings: dict[str, Any]) -> tuple:
    engine = subject.engine(model, **settings)
    batch = share(engine, sequences)
    with engine.eval_mode():
        without = engine.infer_batch(batch)
        outputs = engine.infer_batch(batch, entropy=True)
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    return rank, size, engine.is_mp_src_rank_with_outputs(), without, outputs


def check_bfloat16(subject: Subject) -> None:
    """In bfloat16 the same gradient to bfloat16's precision; weights and what is returned stay float32."""
    model, steps = subject.model(), batches()
    expected = subject.reference(model).train(steps, subject.loss, ADAMW)
    how: dict[str, Any] = {"aggregation": "token-mean", "max_length": None}
    for metrics, gradient, parameters in subject.run(
        train_on_rank, model, steps, subject.loss, how, {"dtype": "bfloat16"}
    ):
        for step in metrics:
            require(not step or step["skipped_steps"][0] == 0, "a step was skipped")
        cosine = _cosine(gradient, expected.gradients)
        require(cosine >= 0.995, f"cosine of the gradient with the reference's is {cosine:.4f}")
        require(cosine < 1 - 1e-9, "the gradient is float32's: nothing ran in bfloat16")
        for name, parameter in parameters.items():
            require(parameter.dtype == torch.float32, f"{name} became {parameter.dtype}")
        require_close_tensors(
            "parameter", parameters, expected.parameters, 2 * 3 * ADAMW["lr"], absolute=True
        )


def check_bfloat16_sums(subject: Subject) -> None:
    """Micro-batches are added in float32: 512 equal ones have the gradient of two, where a sum in bfloat16 would stop at 256."""
    model, sequence = subject.model(), make_sequences(0, VOCAB_SIZE)[1]
    (few, *_), (many, *_) = (
        subject.run(_mean_gradient, model, [sequence] * count, timeout=200) for count in (2, 512)
    )
    require_close_tensors("gradient", many, few, 1e-3)


def _mean_gradient(subject: Subject, model: Path, sequences: list[Sequence]) -> dict[str, Tensor]:
    one_by_one = {"dtype": "bfloat16", "dynamic_micro_batches": False, "micro_batch_size": 1}
    engine = subject.engine(model, optimizer=UNCLIPPED, **one_by_one)
    return first_gradient(engine, share(engine, sequences), subject.loss, aggregation="seq-mean-token-mean")


def _cosine(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    a, b = (
        torch.cat([tensors[name].flatten().double() for name in sorted(second)])
        for tensors in (first, second)
    )
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


def check_value_head(subject: Subject) -> None:
    """A head that is not in the folder is drawn from the seed alone, the same on every rank and layout, and it learns."""
    model = subject.but(model_type="language_model").model()
    heads = {}
    for seed in (0, 1):
        drawn = subject.run(_value_head, model, seed)
        for before, after in drawn:
            require(torch.equal(before, drawn[0][0]), "ranks drew different value heads")
            require(not torch.equal(before, after), "the value head did not learn")
        heads[seed] = drawn[0][0]
    require(not torch.equal(heads[0], heads[1]), "the value head does not depend on the seed")
    if subject.layout != "world 1":
        alone = subject.but(layout="world 1").run(_value_head, model, 0)[0][0]
        require(torch.equal(alone, heads[0]), "the value head depends on the layout")


def _value_head(subject: Subject, model: Path, seed: int) -> tuple[Tensor, Tensor]:
    engine = subject.engine(model, seed=seed)
    before = dict(exported(engine))["score.weight"]
    with engine.train_mode():
        engine.train_batch(share(engine, batches(1)[0]), subject.loss)
    return before, dict(exported(engine))["score.weight"]


def check_schedule(subject: Subject, name: str) -> None:
    """The learning rate steps once per optimizer step, whatever the micro-batches, and is the one that is used."""
    warmup, total, min_ratio = 2, 6, 0.1
    optimizer = {**ADAMW, "scheduler": {"name": name, "warmup_steps": warmup, "min_ratio": min_ratio}}
    schedule = {"name": name, "warmup": warmup, "total": total, "min_ratio": min_ratio}
    model, steps = subject.model(), batches(total + 1, LENGTHS[:5])
    expected = subject.reference(model).train(steps, subject.loss, {**ADAMW, "schedule": schedule})
    ranks = subject.run(_train_on_schedule, model, steps, optimizer, total)
    for step, right in enumerate(expected.rates):
        found = merged([metrics[step] for metrics, _ in ranks])["lr"]
        require_close(f"learning rate of step {step}", found, right, 1e-12)
    for _, parameters in ranks:
        require_close_tensors("parameter", parameters, expected.parameters, 2 * PARAMETERS, absolute=True)


def _train_on_schedule(
    subject: Subject, model: Path, steps: list[list[Sequence]], optimizer: dict[str, Any], total: int
) -> tuple[list[dict], dict[str, Tensor]]:
    engine = subject.engine(model, optimizer, total_steps=total)
    with engine.train_mode():
        metrics = [engine.train_batch(share(engine, step), subject.loss) for step in steps]
    return metrics, dict(exported(engine))
