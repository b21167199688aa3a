"""The suite's checks: how an engine behaves. The contract, modes, residency, refusals, and what is left untouched."""

from __future__ import annotations

import copy
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from engines.registry import EngineRegistry
from engines.streams import stream_key
from engines.training.base import BaseEngine
from engines.training.batch import MicroBatch, SequenceTooLongError
from engines.training.errors import AdapterNotSupported, EngineModeError, ForwardOnlyError, OffloadedPartError
from tests.conformance.check_numbers import OUTPUTS, batches
from tests.conformance.data import LENGTHS, Sequence
from tests.conformance.losses import PoisonedLoss
from tests.conformance.subject import (
    ADAMW,
    LAYOUTS,
    Mismatch,
    Subject,
    exported,
    merged,
    require,
    require_equal_tensors,
    save,
    share,
)

FINALS = [
    "initialize",
    "train_batch",
    "infer_batch",
    "forward_backward_batch",
    "train_mode",
    "eval_mode",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_data_parallel_group",
    "is_mp_src_rank_with_outputs",
    "is_param_offload_enabled",
    "is_optimizer_offload_enabled",
    "to",
    "get_per_tensor_param",
    "save_checkpoint",
    "load_checkpoint",
    "disable_adapter",
    "lr_scheduler_step",
]


def expect(error: type[Exception], call: Any, *args: Any, **named: Any) -> str:
    """Fail unless ``call`` raises ``error``; returns its message."""
    try:
        call(*args, **named)
    except error as raised:
        return str(raised)
    raise Mismatch(f"{getattr(call, '__name__', call)} did not raise {error.__name__}")


def check_contract(subject: Subject) -> None:
    """A real subclass under its key; what is final cannot be overridden; ranks are numbered; refusals have names."""
    engine_class = subject.engine_class
    require(issubclass(engine_class, BaseEngine), f"{engine_class} is no BaseEngine")
    require(engine_class.model_type == subject.model_type, f"model_type is {engine_class.model_type!r}")
    require(not engine_class.__abstractmethods__, f"abstract: {sorted(engine_class.__abstractmethods__)}")
    expect(TypeError, BaseEngine, None, Path())
    for name in FINALS:
        expect(TypeError, type, "Overriding", (engine_class,), {name: lambda self: None})
    ranks = subject.run(_contract, subject.model())
    sizes = {size for _, size, _, _ in ranks}
    require(len(sizes) == 1, f"ranks disagree about the data-parallel size: {sizes}")
    sources = sorted(rank for rank, _, is_source, _ in ranks if is_source)
    require(
        sources == list(range(*sizes)), f"sources of outputs are data-parallel ranks {sources} of {sizes}"
    )
    require(merged([m for *_, m in ranks])["lr"] > 0, "no learning rate among the metrics")
    counted = sum(metrics["loss"][1] for *_, metrics in ranks if metrics)
    require(counted == 1, f"the mini-batch's loss is counted {counted} times")


def _contract(subject: Subject, model: Path) -> tuple[int, int, bool, dict]:
    found = EngineRegistry.get_engine_cls(subject.model_type, subject.backend, subject.device)
    engine = subject.engine(model)
    require(isinstance(engine, found), f"the registry gave {found}")
    batch = share(engine, batches(1)[0])
    expect(AdapterNotSupported, engine.disable_adapter)
    with engine.eval_mode():
        expect(EngineModeError, engine.train_batch, batch, subject.loss)
    with engine.train_mode():
        expect(ValueError, engine.train_batch, batch, subject.loss, aggregation="mean")
        expect(ValueError, engine.train_batch, batch, subject.loss, aggregation="seq-mean-token-sum-norm")
        metrics = engine.train_batch(batch, subject.loss)
        kept = [p for p in engine.module.parameters() if p.grad is not None and p.grad.abs().max() > 0]
        require(not kept, "gradients are left after the optimizer step")
    names = {"loss", "grad_norm", "lr", "skipped_steps"}
    require(
        not engine.is_mp_src_rank_with_outputs() or names <= metrics.keys(), f"metrics are {sorted(metrics)}"
    )
    return (
        engine.get_data_parallel_rank(),
        engine.get_data_parallel_size(),
        engine.is_mp_src_rank_with_outputs(),
        metrics,
    )


def check_forward_only(subject: Subject) -> None:
    """An engine without optimizer gives the same outputs and weights, has no optimizer state, and refuses to train."""
    for outputs, expected in subject.run(_forward_only, subject.model()):
        require_equal_tensors("output", outputs, expected)


def _forward_only(subject: Subject, model: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    frozen, trainable = subject.engine(model, forward_only=True), subject.engine(model)
    batch = share(frozen, batches(1)[0])
    expect(ForwardOnlyError, frozen.train_batch, batch, subject.loss)
    expect(ForwardOnlyError, frozen.forward_backward_batch, batch, subject.loss)
    require(all(name.startswith("model.") for name in frozen.sharded_state()), "there is optimizer state")
    require_equal_tensors("weight", dict(exported(frozen)), dict(exported(trainable)))
    with frozen.eval_mode(), trainable.eval_mode():
        return frozen.infer_batch(batch), trainable.infer_batch(batch)


def check_modes(subject: Subject) -> None:
    """Dropout acts in training when the model has it, never in inference, and the mode is restored after each."""
    model, (sequences,) = subject.model(attention_dropout=0.5), batches(1)
    reference = subject.reference(model)
    right = copy.deepcopy(reference).train([sequences], subject.loss, ADAMW).losses[0]
    ranks = subject.run(_modes, model, sequences)
    for rank, size, inferred, _, _, trainings in ranks:
        expected = reference.infer(sequences[rank::size])
        for where, outputs in inferred.items():
            for name, field in outputs.items():
                error = (field - expected[name]).abs().max().item()
                require(error <= OUTPUTS, f"{name} {where} is off by {error:.2e}: dropout in inference?")
        require(trainings == [True, True, True, False], f"module.training was {trainings}")
    without = merged([metrics for _, _, _, metrics, _, _ in ranks])["loss"]
    require(
        abs(without - right) <= 1e-5 * abs(right),
        f"forward-only loss {without}, without dropout it is {right}",
    )
    trained = merged([metrics for *_, metrics, _ in ranks])["loss"]
    require(abs(trained - right) > 1e-3 * abs(right), f"loss in training is {trained}: no dropout")


def check_dropout_masks(subject: Subject) -> None:
    """Ranks that hold other sequences, or other heads, layers or rows of the same, draw other masks.

    The first rank of each share of the data draws from the stream that its data-parallel rank and the step name.
    """
    ranks = subject.run(_masks, subject.model(attention_dropout=0.5), batches(1)[0])
    for (first, (_, _, kept)), (second, (_, _, other)) in itertools.combinations(enumerate(ranks), 2):
        require(not torch.equal(kept, other), f"ranks {first} and {second} draw the same masks")
    for share_of_data in {rank for rank, _, _ in ranks}:
        seeds = [seed for rank, seed, _ in ranks if rank == share_of_data]
        expected = stream_key(0, "dropout", share_of_data, 0)
        require(seeds[0] == expected, f"the stream of data-parallel rank {share_of_data} is another")


def _masks(subject: Subject, model: Path, sequences: list[Sequence]) -> tuple[int, int, Tensor]:
    engine = subject.engine(model)
    with engine.train_mode(), Masks() as masks:
        engine.train_batch(share(engine, sequences), subject.loss)
    return engine.get_data_parallel_rank(), *masks.first


class Masks(TorchFunctionMode):
    """Notes what the first attention draws: the seed of its stream, and how much of each row of each head is kept."""

    first: tuple[int, Tensor] | None = None

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function is scaled_dot_product_attention and self.first is None:
            # Equal weights on values of 1: what is left of a row's sum is what was not dropped.
            query, key, value = args
            kept = function(query.detach() * 0, key.detach() * 0, torch.ones_like(value), **kwargs)
            self.first = torch.initial_seed(), kept
        return function(*args, **(kwargs or {}))


def _modes(subject: Subject, model: Path, sequences: list[Sequence]) -> tuple:
    engine = subject.engine(model)
    batch = share(engine, sequences)
    inferred, trainings = {}, []
    with engine.eval_mode():
        inferred["in eval_mode"] = engine.infer_batch(batch)
    with engine.train_mode():
        trainings.append(engine.module.training)
        inferred["in train_mode"] = engine.infer_batch(batch)
        trainings.append(engine.module.training)
        with engine.eval_mode():
            inferred["in eval_mode inside train_mode"] = engine.infer_batch(batch)
        trainings.append(engine.module.training)
        without = engine.forward_backward_batch(batch, subject.loss, forward_only=True)
        trained = engine.train_batch(batch, subject.loss)
    trainings.append(engine.module.training)
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    return rank, size, inferred, without, trained, trainings


def check_residency(subject: Subject) -> None:
    """An offloaded part cannot be used, on any device; scopes bring it back; results are those without offload."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = subject.run(_residency, subject.model(), Path(folder))
    for parked, plain in ranks:
        require_equal_tensors("parameter", parked, plain)


def _residency(subject: Subject, model: Path, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parked = subject.engine(model, offload={"parameters": True, "optimizer": True})
    plain = subject.engine(model)
    batch = share(parked, batches(1)[0])
    require(parked.is_param_offload_enabled and parked.is_optimizer_offload_enabled, "offload is not said")
    require(not plain.is_param_offload_enabled and not plain.is_optimizer_offload_enabled, "offload is said")
    _unusable(parked, batch, subject.loss)
    with parked.train_mode(), plain.train_mode():
        for engine in (parked, plain):
            engine.train_batch(batch, subject.loss)
    with parked.eval_mode():
        parked.infer_batch(batch)
    save(parked, folder, 1)
    _unusable(parked, batch, subject.loss)
    with plain.train_mode():
        plain.to("cpu", model=False, grad=False)
        expect(OffloadedPartError, plain.train_batch, batch, subject.loss)
        plain.infer_batch(batch)
        plain.to("device")
    with parked.train_mode(), plain.train_mode():
        for engine in (parked, plain):
            engine.train_batch(batch, subject.loss)
    return dict(exported(parked)), dict(exported(plain))


def _unusable(engine: BaseEngine, batch: Any, loss: Any) -> None:
    for call in (
        lambda: engine.infer_batch(batch),
        lambda: engine.train_batch(batch, loss),
        lambda: engine.forward_backward_batch(batch, loss),
        lambda: list(engine.get_per_tensor_param()),
    ):
        expect(OffloadedPartError, call)


def check_non_finite_step(subject: Subject) -> None:
    """A gradient that is not finite on one rank skips the step on all, says so, and leaves no trace in the next."""
    (good, bad) = batches(2)
    bad[-1]["poison"][-1] = 1.0
    for before, metrics, after, then, without in subject.run(_non_finite, subject.model(), good, bad):
        require(not metrics or metrics["skipped_steps"] == (1.0, 1.0), f"metrics say {metrics}")
        require_equal_tensors("parameter after a skipped step", after, before)
        require_equal_tensors("parameter after the next step", then, without)


def _non_finite(subject: Subject, model: Path, good: list[Sequence], bad: list[Sequence]) -> tuple:
    first, second = subject.engine(model), subject.engine(model)
    before = dict(exported(first))
    with first.train_mode(), second.train_mode():
        metrics = first.train_batch(share(first, bad), PoisonedLoss())
        after = dict(exported(first))
        first.train_batch(share(first, good), PoisonedLoss())
        second.train_batch(share(second, good), PoisonedLoss())
    return before, metrics, after, dict(exported(first)), dict(exported(second))


def check_budget(subject: Subject, timeout: float = 60) -> None:
    """The token budget is a hard cap; one rank's longer sequence is an error on all, after which training goes on."""
    noting = Subject(subject.model_type, subject.backend, subject.device, subject.layout, recording(subject))
    cap = 40 * LAYOUTS[subject.layout].context_parallel_size  # of the ranks that share a sequence
    lengths = (*LENGTHS[:-1], cap + 1)
    ranks = noting.run(_budget, subject.model(), batches(1)[0], batches(1, lengths)[0], timeout=timeout)
    for message, before, after, sizes, _ in ranks:
        said = str(cap + 1) in message and "token_budget" in message
        require(said, f"the error says: {message}")
        require_equal_tensors("parameter after the refusal", after, before)
        require(
            max(tokens for tokens, _ in sizes) <= cap,
            f"micro-batches of (tokens, sequences) {sizes}; the cap is {cap}",
        )
    require(len({len(sizes) for *_, sizes, _ in ranks}) == 1, "ranks ran different numbers of micro-batches")
    static = [sizes for *_, sizes in ranks]
    require(
        all(sequences <= 2 for sizes in static for _, sequences in sizes), f"of at most 2 sequences: {static}"
    )


def recording(subject: Subject) -> Any:
    """A class of engines that note (tokens, sequences) of every micro-batch as ``sizes``."""

    def record(engine_class: type[BaseEngine]) -> type[BaseEngine]:
        class Recording(subject.defect(engine_class) if subject.defect else engine_class):
            def forward_micro_batch(self, model: Any, micro_batch: MicroBatch, entropy: bool) -> Any:
                self.sizes = [
                    *getattr(self, "sizes", []),
                    (micro_batch.batch.num_tokens, len(micro_batch.batch)),
                ]
                return super().forward_micro_batch(model, micro_batch, entropy)

        return Recording

    return record


def _budget(subject: Subject, model: Path, sequences: list[Sequence], too_long: list[Sequence]) -> tuple:
    engine = subject.engine(model, token_budget=40, inference_token_budget=60)
    before = dict(exported(engine))
    with engine.train_mode():
        message = expect(SequenceTooLongError, engine.train_batch, share(engine, too_long), subject.loss)
        after = dict(exported(engine))
        engine.train_batch(share(engine, sequences), subject.loss)
        sizes = engine.sizes
        engine.infer_batch(share(engine, too_long))
    static = subject.engine(model, dynamic_micro_batches=False, micro_batch_size=2)
    with static.train_mode():
        static.train_batch(share(static, too_long), subject.loss)
    return message, before, after, sizes, static.sizes
