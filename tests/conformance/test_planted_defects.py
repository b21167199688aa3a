"""The suite itself is tested: engines with one thing wrong, each of which the suite's own checks must name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import engines.training.fsdp.engine
from engines.training.base import BaseEngine
from engines.training.batch import MicroBatch, SequenceTooLongError
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
    check_inference,
    check_schedule,
    check_training,
    check_value_head,
)
from tests.conformance.check_states import check_export, check_resume
from tests.conformance.subject import Mismatch, Subject, local
from tests.support.ranks import RankFailed, RanksStuck

EngineClass = type[BaseEngine]


def off_by_one_label(good: EngineClass) -> EngineClass:
    class Bad(good):
        def forward_micro_batch(self, model: Any, micro_batch: MicroBatch, entropy: bool) -> Any:
            outputs = super().forward_micro_batch(model, micro_batch, entropy)
            return replace(outputs, log_probs=outputs.log_probs.roll(-1))

    return Bad


def leak_across_sequences(good: EngineClass) -> EngineClass:
    """Attention takes the whole micro-batch for one sequence; positions and labels are right."""
    segments = engines.training.fsdp.engine.Segments

    class Bad(good):
        def forward_micro_batch(self, model: Any, micro_batch: MicroBatch, entropy: bool) -> Any:
            with mock.patch.object(
                engines.training.fsdp.engine,
                "Segments",
                lambda bounds, device, shared: segments(bounds[[0, -1]], device, shared),
            ):
                return super().forward_micro_batch(model, micro_batch, entropy)

    return Bad


def mean_per_micro_batch(good: EngineClass) -> EngineClass:
    """Each micro-batch's weights add up to the same, whatever its number of loss tokens."""

    class Bad(good):
        def run_schedule(self, micro_batches: Sequence[MicroBatch], step: Any, forward_only: bool) -> None:
            weights = [m.batch.tokens.get("weight", torch.zeros(1)) for m in micro_batches]
            mean = sum(weight.sum() for weight in weights) / len(weights)
            changed = [
                replace(m, batch=m.batch.with_tokens(weight=weight / weight.sum().clamp(min=1e-9) * mean))
                for m, weight in zip(micro_batches, weights, strict=True)
                if "weight" in m.batch.tokens
            ]
            super().run_schedule(changed or micro_batches, step, forward_only)

    return Bad


def gradient_scale_missing(good: EngineClass) -> EngineClass:
    class Bad(good):
        def gradient_scale(self, num_micro_batches: int) -> float:
            return 1.0

    return Bad


def last_micro_batch_dropped(good: EngineClass) -> EngineClass:
    class Bad(good):
        def run_schedule(self, micro_batches: Sequence[MicroBatch], step: Any, forward_only: bool) -> None:
            super().run_schedule(micro_batches[:-1] or micro_batches, step, forward_only)

    return Bad


def gradients_not_zeroed(good: EngineClass) -> EngineClass:
    class Bad(good):
        def zero_grad(self) -> None:
            pass

    return Bad


def clipping_forgotten(good: EngineClass) -> EngineClass:
    class Bad(good):
        def optimizer_step(self) -> Any:
            self.optimizer_config = self.optimizer_config.model_copy(update={"clip_grad_norm": 1e9})
            return super().optimizer_step()

    return Bad


def clipping_of_each_rank_s_own_norm(good: EngineClass) -> EngineClass:
    class Bad(good):
        def _global_norm(self, gradients: list[Tensor]) -> Tensor:
            return torch.stack([g.double().norm() for g in gradients]).norm()

    return Bad


def temperature_ignored(good: EngineClass) -> EngineClass:
    class Bad(good):
        def build(self) -> None:
            self.temperature = 1.0
            super().build()

    return Bad


def order_not_restored(good: EngineClass) -> EngineClass:
    """Outputs come in the order of execution."""

    class Bad(good):
        def _run(self, batch: Any, *args: Any, **named: Any) -> Any:
            step = super()._run(batch, *args, **named)
            if step.outputs:
                names = step.outputs[0][1]
                joined = {name: torch.cat([outputs[name] for _, outputs in step.outputs]) for name in names}
                step.outputs = [(MicroBatch(batch, list(range(len(batch)))), joined)]
            return step

    return Bad


def tied_weight_exported_twice(good: EngineClass) -> EngineClass:
    class Bad(good):
        def export_units(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in super().export_units():
                yield name, tensor
                if name == "model.embed_tokens.weight":
                    yield "lm_head.weight", tensor

    return Bad


def last_shard_dropped_in_export(good: EngineClass) -> EngineClass:
    class Bad(good):
        def export_units(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in super().export_units():
                tensor = tensor.clone()
                tensor[len(tensor) // 2 :] = 0
                yield name, tensor

    return Bad


def last_unit_dropped_in_export(good: EngineClass) -> EngineClass:
    class Bad(good):
        def export_units(self) -> Iterator[tuple[str, Tensor]]:
            yield from list(super().export_units())[:-1]

    return Bad


def last_shard_dropped_in_save(good: EngineClass) -> EngineClass:
    """The last rank saves zeros."""

    class Bad(good):
        saving = True

        def sharded_state(self) -> dict[str, Any]:
            state = super().sharded_state()
            if self.saving and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                state = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            return state

        def load_sharded_state(self, state: dict[str, Any]) -> None:
            self.saving = False
            super().load_sharded_state(super().sharded_state() | state)

    return Bad


def scheduler_not_restored(good: EngineClass) -> EngineClass:
    class Bad(good):
        def load_scalar_state(self, state: dict[str, Any]) -> None:
            pass

    return Bad


def optimizer_not_restored(good: EngineClass) -> EngineClass:
    class Bad(good):
        def load_sharded_state(self, state: dict[str, Any]) -> None:
            super().load_sharded_state(state)
            for moments in self.optimizer.state.values():
                for tensor in moments.values():
                    local(tensor).zero_()

    return Bad


def optimizer_not_saved(good: EngineClass) -> EngineClass:
    class Bad(good):
        def sharded_state(self) -> dict[str, Any]:
            return {name: t for name, t in super().sharded_state().items() if name.startswith("model.")}

        def load_sharded_state(self, state: dict[str, Any]) -> None:
            super().load_sharded_state({**super().sharded_state(), **state})

    return Bad


def dropout_in_inference(good: EngineClass) -> EngineClass:
    class Bad(good):
        def run_schedule(self, micro_batches: Sequence[MicroBatch], step: Any, forward_only: bool) -> None:
            self.module.train()
            super().run_schedule(micro_batches, step, forward_only)

    return Bad


def dropout_never(good: EngineClass) -> EngineClass:
    class Bad(good):
        def run_schedule(self, micro_batches: Sequence[MicroBatch], step: Any, forward_only: bool) -> None:
            self.module.eval()
            super().run_schedule(micro_batches, step, forward_only)

    return Bad


def dropout_from_the_global_stream(good: EngineClass) -> EngineClass:
    class Bad(good):
        def _dropout_stream(self, forward_only: bool) -> AbstractContextManager[None]:
            return nullcontext()

    return Bad


def dropout_that_sharing_ranks_share(good: EngineClass) -> EngineClass:
    class Bad(good):
        def build(self) -> None:
            super().build()
            self.topology = replace(self.topology, sharing_rank=())

    return Bad


def scheduler_steps_per_micro_batch(good: EngineClass) -> EngineClass:
    class Bad(good):
        def run_schedule(self, micro_batches: Sequence[MicroBatch], step: Any, forward_only: bool) -> None:
            super().run_schedule(micro_batches, step, forward_only)
            self.scheduler_step += 0 if forward_only else len(micro_batches) - 1

    return Bad


def non_finite_steps_taken(good: EngineClass) -> EngineClass:
    class Bad(good):
        def _global_norm(self, gradients: list[Tensor]) -> Tensor:
            return super()._global_norm(gradients).nan_to_num(1.0)

    return Bad


def offloaded_parts_usable(good: EngineClass) -> EngineClass:
    class Bad(good):
        def build(self) -> None:
            super().build()
            self.parking.require = lambda *parts: None

    return Bad


def budget_of_each_rank_s_own(good: EngineClass) -> EngineClass:
    """Only the rank that has the long sequence notices."""

    class Bad(good):
        def _run(self, batch: Any, *args: Any, **named: Any) -> Any:
            if int(batch.lengths.max()) > self.config.token_budget:
                raise SequenceTooLongError("41 tokens, token_budget is 40")
            return super()._run(batch, *args, **named)

    return Bad


def value_of_the_token_itself(good: EngineClass) -> EngineClass:
    """values[t] has seen token t."""

    class Bad(good):
        def forward_micro_batch(self, model: Any, micro_batch: MicroBatch, entropy: bool) -> Any:
            outputs = super().forward_micro_batch(model, micro_batch, entropy)
            return replace(outputs, values=outputs.values.roll(-1))

    return Bad


def value_head_without_gradient(good: EngineClass) -> EngineClass:
    class Bad(good):
        def optimizer_step(self) -> Any:
            self.module.score.weight.grad = None
            return super().optimizer_step()

    return Bad


def value_head_ignores_the_seed(good: EngineClass) -> EngineClass:
    class Bad(good):
        def build(self) -> None:
            self.config = self.config.model_copy(update={"seed": 7})
            super().build()

    return Bad


def optimizer_though_forward_only(good: EngineClass) -> EngineClass:
    class Bad(good):
        def sharded_state(self) -> dict[str, Any]:
            return {**super().sharded_state(), "optimizer.step": torch.zeros(())}

    return Bad


def loss_counted_on_every_rank(good: EngineClass) -> EngineClass:
    class Bad(good):
        def optimizer_step(self) -> Any:
            return {**super().optimizer_step(), "loss": (0.0, 1.0)}

    return Bad


def metrics_averaged_per_micro_batch(good: EngineClass) -> EngineClass:
    """Each micro-batch counts once, whatever its number of loss tokens."""

    class Bad(good):
        def _run(self, batch: Any, loss: Any, *args: Any, **named: Any) -> Any:
            return super()._run(batch, Averaging(loss) if loss else None, *args, **named)

    return Bad


@dataclass(frozen=True)
class Averaging:
    """The loss ``good`` with metrics that are means."""

    good: Any

    def __call__(self, outputs: Any, batch: Any) -> Any:
        terms, metrics = self.good(outputs, batch)
        return terms, {name: (total / max(count, 1), 1.0) for name, (total, count) in metrics.items()}


@dataclass(frozen=True)
class Plant:
    """A defect, the check that must find it, and what the check's message must say."""

    defect: Callable[[EngineClass], EngineClass]
    check: Callable[..., None]
    says: str
    how: dict[str, Any] = field(default_factory=dict)
    layout: str = "world 1"
    model_type: str = "language_model"
    raises: type[AssertionError] = Mismatch


PLANTS = [
    Plant(off_by_one_label, check_inference, "log_probs differs"),
    Plant(off_by_one_label, check_training, "loss of step 0"),
    Plant(leak_across_sequences, check_inference, "differs from the reference"),
    Plant(leak_across_sequences, check_training, "loss of step 0"),
    Plant(mean_per_micro_batch, check_training, "loss of step 0"),
    Plant(metrics_averaged_per_micro_batch, check_training, "metric ratio of step 0"),
    Plant(gradient_scale_missing, check_training, "gradient norm of step 0", layout="world 2"),
    Plant(last_micro_batch_dropped, check_training, "loss of step 0"),
    Plant(gradients_not_zeroed, check_training, "gradient norm of step 1"),
    Plant(gradients_not_zeroed, check_contract, "gradients are left", raises=RankFailed),
    Plant(clipping_forgotten, check_training, "loss of step 1"),
    Plant(clipping_of_each_rank_s_own_norm, check_training, "gradient norm of step 0", layout="world 2"),
    Plant(temperature_ignored, check_inference, "log_probs differs", {"temperature": 0.7}),
    Plant(order_not_restored, check_inference, "differs from the reference"),
    Plant(
        tied_weight_exported_twice, check_export, "unexpected ['lm_head.weight']", {"family": "qwen3-tied"}
    ),
    Plant(last_shard_dropped_in_export, check_export, "not bit for bit equal", layout="world 2"),
    Plant(last_unit_dropped_in_export, check_export, "missing"),
    Plant(last_shard_dropped_in_save, check_resume, "loss of step 0", layout="world 2"),
    Plant(scheduler_not_restored, check_resume, "scalars"),
    Plant(optimizer_not_restored, check_resume, "restored state"),
    Plant(optimizer_not_saved, check_resume, "of step 1"),
    Plant(dropout_in_inference, check_modes, "dropout in inference?"),
    Plant(dropout_never, check_modes, "no dropout"),
    Plant(dropout_from_the_global_stream, check_resume, "of step 0", {"attention_dropout": 0.3}),
    Plant(dropout_that_sharing_ranks_share, check_dropout_masks, "draw the same masks", layout="CP 2"),
    Plant(scheduler_steps_per_micro_batch, check_schedule, "learning rate of step 0", {"name": "cosine"}),
    Plant(non_finite_steps_taken, check_non_finite_step, "metrics say"),
    Plant(offloaded_parts_usable, check_residency, "did not raise OffloadedPartError", raises=RankFailed),
    Plant(
        budget_of_each_rank_s_own,
        check_budget,
        "not finished",
        {"timeout": 10},
        layout="world 2",
        raises=RanksStuck,
    ),
    Plant(optimizer_though_forward_only, check_forward_only, "there is optimizer state", raises=RankFailed),
    Plant(value_of_the_token_itself, check_inference, "values differs", model_type="value_model"),
    Plant(value_head_without_gradient, check_value_head, "did not learn", model_type="value_model"),
    Plant(
        value_head_ignores_the_seed,
        check_value_head,
        "does not depend on the seed",
        layout="world 2",
        model_type="value_model",
    ),
    Plant(loss_counted_on_every_rank, check_contract, "counted", layout="world 2"),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.defect.__name__}-{plant.check.__name__}")
def test_a_planted_defect_is_caught(plant: Plant) -> None:
    subject = Subject(plant.model_type, "fsdp2", layout=plant.layout, defect=plant.defect)
    with pytest.raises(plant.raises) as caught:
        plant.check(subject, **plant.how)
    assert plant.says in str(caught.value)
