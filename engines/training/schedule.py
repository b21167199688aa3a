"""Running micro-batches: what happens to each of them, and the plain loop over all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engines.training.batch import MicroBatch, PackedBatch

Metrics = dict[str, tuple[float, float]]
"""name -> (sum, count): merged by adding, shown as sum / count."""


def merge_metrics(into: Metrics, other: Metrics) -> None:
    """Add ``other`` to ``into``."""
    for name, (total, count) in other.items():
        before = into.get(name, (0.0, 0.0))
        into[name] = (before[0] + float(total), before[1] + float(count))


@dataclass(frozen=True)
class ModelOutputs:
    """What a model says about one micro-batch, aligned with its tokens; entries of first tokens are 0."""

    log_probs: Tensor | None = None
    """(tokens,) float32, of language models."""
    entropy: Tensor | None = None
    """(tokens,) float32, only when asked for."""
    values: Tensor | None = None
    """(tokens,) float32, of value models."""


class LossFunction(Protocol):
    """A picklable object, such as a frozen dataclass."""

    needs_entropy: bool

    def __call__(self, outputs: ModelOutputs, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        """Terms (tokens,), aligned with ``batch.tokens["weight"]``, and metrics. The loss is ``(terms * weight).sum()``."""
        ...


class MicroBatchStep:
    """What is done with each micro-batch, and what is remembered of it.

    A loop of one's own calls the step; a framework's schedule, which separates the two, calls ``engine.forward_micro_batch``
    and then ``finish`` where the outputs are.
    """

    def __init__(self, engine: Any, loss: LossFunction | None, entropy: bool, scale: float) -> None:
        self.engine = engine
        self.loss = loss
        self.entropy = entropy
        self.scale = scale
        self.metrics: Metrics = {}
        self.weighted_sum: Tensor | float = 0.0
        self.outputs: list[tuple[MicroBatch, dict[str, Tensor]]] = []

    def __call__(self, model: torch.nn.Module, micro_batch: MicroBatch) -> Tensor | None:
        """Forward and loss; the scaled loss is what to differentiate (None in a pass for outputs)."""
        return self.finish(self.engine.forward_micro_batch(model, micro_batch, self.entropy), micro_batch)

    def finish(self, outputs: ModelOutputs, micro_batch: MicroBatch) -> Tensor | None:
        """From outputs to the scaled loss; without a loss, keep the outputs (detached, on cpu) instead."""
        if self.loss is None:
            kept = {name: field for name, field in vars(outputs).items() if field is not None}
            if not micro_batch.is_filler:
                kept = {name: field.detach().float().cpu() for name, field in kept.items()}
                self.outputs.append((micro_batch, kept))
            return None
        terms, metrics = self.loss(outputs, micro_batch.batch)
        weight = micro_batch.batch.tokens["weight"]
        if terms.shape != weight.shape:
            raise ValueError(
                f"{type(self.loss).__name__} returned terms {tuple(terms.shape)}, not {tuple(weight.shape)}"
            )
        weighted = (terms * weight).sum()
        self.weighted_sum = self.weighted_sum + weighted.detach().double()
        if not micro_batch.is_filler:
            merge_metrics(self.metrics, metrics)
        return weighted * self.scale


def sequential_schedule(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    step: MicroBatchStep,
    forward_only: bool,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Forward and backward of one micro-batch after the other; all but the last run inside ``no_sync()``."""
    for position, micro_batch in enumerate(micro_batches):
        last = position == len(micro_batches) - 1
        with nullcontext() if last or forward_only else no_sync():
            loss = step(model, micro_batch)
            if not forward_only and loss is not None:
                loss.backward()
