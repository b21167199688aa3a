"""The engine contract. What every engine does the same way is written once here and is final; a backend supplies hooks.

The loss is exact: the weight of each token is fixed for the whole mini-batch, over all data-parallel ranks, before anything
is split. So the number and size of micro-batches, ranks and shards change what is computed where, never what is computed.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.checkpoint import ShardIndex
from engines.checkpoint.shards import load_shards, write_shards
from engines.config import EngineConfig, OptimizerConfig
from engines.streams import stream_key
from engines.training.batch import (
    Aggregation,
    MicroBatch,
    PackedBatch,
    loss_totals,
    loss_weights,
    split_micro_batches,
)
from engines.training.determinism import compute_deterministically, set_variables
from engines.training.errors import (
    AdapterNotSupported,
    EngineModeError,
    ForwardOnlyError,
)
from engines.training.learning_rate import learning_rate
from engines.training.schedule import LossFunction, Metrics, MicroBatchStep, ModelOutputs, merge_metrics
from engines.training.scope import PARTS, BaseEngineCtx, Parking, Topology

logger = logging.getLogger(__name__)
ShardWrite = Callable[[Path, int, dict[str, Any], dict[str, Any]], ShardIndex]
"""(folder, rank, tensors, scalars) -> what this rank wrote, or is writing."""


class BaseEngine(ABC):
    """One role's model on one rank: forward, backward, optimizer step, weights out, state in and out."""

    model_type: str
    """ "language_model" or "value_model"; set by a subclass."""
    deterministic_variables: ClassVar[Mapping[str, str]] = {}
    """Environment variables that the backend's libraries read for ``config.deterministic``, beside those of the device."""

    # Set by the backend's ``build``.
    device: torch.device
    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    topology: Topology = Topology()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in vars(cls).items():
            inherited = [getattr(base, name, None) for base in cls.__mro__[1:]]
            if any(getattr(_function(other), "__final__", False) for other in inherited):
                raise TypeError(
                    f"{cls.__name__}.{name} overrides what is final in the engine contract: {member!r}"
                )

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        optimizer: OptimizerConfig | None = None,
        total_steps: int = 1,
        temperature: float = 1.0,
    ) -> None:
        """
        Args:
            config: with backend and device resolved.
            model_path: Hugging Face folder of the initial weights.
            optimizer: required unless ``config.forward_only``.
            total_steps: optimizer steps of the whole run, for the schedule.
            temperature: logits are divided by it.
        """
        if optimizer is None and not config.forward_only:
            raise ValueError(
                "an engine that trains needs an optimizer configuration (or engine.forward_only=true)"
            )
        if temperature <= 0:
            raise ValueError(f"temperature={temperature}: must be positive")
        self.config = config
        self.model_path = Path(model_path)
        self.optimizer_config = None if config.forward_only else optimizer
        self.total_steps = total_steps
        self.temperature = temperature
        self.scheduler_step = 0
        self._mode: str | None = None
        self.parking = Parking(self)

    # ---- hooks: what a backend supplies ------------------------------------------------------------------------------

    @abstractmethod
    def build(self) -> None:
        """Set ``device``, ``topology``, ``module`` and, unless forward only, ``optimizer``."""

    @abstractmethod
    def forward_micro_batch(self, model: nn.Module, micro_batch: MicroBatch, entropy: bool) -> ModelOutputs:
        """Outputs of whole sequences, differentiable unless gradients are off; entropy only when asked for."""

    @abstractmethod
    def run_schedule(
        self, micro_batches: Sequence[MicroBatch], step: MicroBatchStep, forward_only: bool
    ) -> None:
        """Run ``step`` on every micro-batch, with backward unless ``forward_only``; synchronise gradients once."""

    @abstractmethod
    def gradient_scale(self, num_micro_batches: int) -> float:
        """The number that undoes what the framework averages, over ranks or over micro-batches."""

    @abstractmethod
    def optimizer_step(self) -> Metrics:
        """Clip by the global norm and step; a non-finite norm skips the step. Returns ``grad_norm`` and ``skipped_steps``."""

    @abstractmethod
    def move(self, device: torch.device, model: bool, optimizer: bool, grad: bool) -> None:
        """Put the named parts on ``device``."""

    @abstractmethod
    def export_units(self) -> Iterator[tuple[str, Tensor]]:
        """(on-disk Hugging Face name, full tensor), one mapping unit at a time; collective, same order on all ranks."""

    @abstractmethod
    def sharded_state(self) -> dict[str, Any]:
        """``model.<name>`` and ``optimizer.<name>.<slot>``: tensors that know their place in the global ones."""

    @abstractmethod
    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Take over a ``sharded_state()`` that was filled in place. Collective."""

    def scalar_state(self) -> dict[str, Any]:
        """State in JSON, the same on all ranks."""
        return {"scheduler_step": self.scheduler_step}

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """Restore what ``scalar_state`` gave."""
        self.scheduler_step = int(state["scheduler_step"])
        self._apply_learning_rate()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None

    # ---- final: the contract's behaviour -----------------------------------------------------------------------------

    @final
    def initialize(self) -> None:
        """Build everything, then park what is configured to wait in host memory.

        Raises:
            DeterminismError: see :func:`engines.training.determinism.compute_deterministically`.
        """
        if self.config.deterministic:
            compute_deterministically(self.config.device)
            set_variables(self.deterministic_variables, f"backend {self.config.backend}")
        elif self.config.device == "cpu" and torch.get_num_threads() > 1:
            compute_deterministically("cpu")  # several threads add a row that is read often in any order
        self.build()
        self.module.eval()
        self._apply_learning_rate()
        self.parking.park(self.parking.configured)

    @final
    def train_batch(
        self,
        batch: PackedBatch,
        loss: LossFunction,
        aggregation: str | Aggregation = "token-mean",
        max_length: int | None = None,
    ) -> Metrics:
        """One optimizer step on this rank's share of a mini-batch; the learning-rate schedule advances by one. Collective.

        Returns:
            The loss's metrics, and ``loss`` (of the whole mini-batch, once ranks are added), ``grad_norm``, ``lr`` and
            ``skipped_steps``; empty on ranks that are no source of outputs.

        Raises:
            SequenceTooLongError: on all ranks, before anything changed.
            OffloadedPartError, EngineModeError, ForwardOnlyError: the engine cannot train now.
        """
        if self.optimizer is None:
            raise ForwardOnlyError("train_batch on an engine with engine.forward_only=true")
        self.parking.require("model", "optimizer", "grad")
        self.zero_grad()
        metrics = self.forward_backward_batch(batch, loss, aggregation, max_length)
        rate = self._rate()
        stepped = self.optimizer_step()
        self.zero_grad()
        if stepped["skipped_steps"][0]:
            logger.warning(
                "optimizer step %d skipped: gradient norm %s", self.scheduler_step, stepped["grad_norm"][0]
            )
        self.lr_scheduler_step()
        if not self.topology.is_source:
            return {}
        merge_metrics(metrics, {**stepped, "lr": (rate, 1.0)})
        return metrics

    @final
    def forward_backward_batch(
        self,
        batch: PackedBatch,
        loss: LossFunction,
        aggregation: str | Aggregation = "token-mean",
        max_length: int | None = None,
        forward_only: bool = False,
    ) -> Metrics:
        """Loss and, unless ``forward_only``, gradients of this rank's share of a mini-batch, added to those there are."""
        if not forward_only and self._mode == "eval":
            raise EngineModeError("training inside eval_mode(); use train_mode()")
        if not forward_only and self.config.forward_only:
            raise ForwardOnlyError("backward on an engine with engine.forward_only=true")
        self.parking.require("model", *(() if forward_only else ("grad",)))
        batch = batch.to(self.device)
        totals = loss_totals(batch, self.get_data_parallel_group())
        weight = loss_weights(batch, aggregation, totals, max_length)
        step = self._run(batch.with_tokens(weight=weight), loss, loss.needs_entropy, forward_only)
        if not self.topology.is_source:
            return {}
        # The weighted sums of the ranks add up to the mini-batch's loss, which counts once.
        counted = 1.0 if self.get_data_parallel_rank() == 0 else 0.0
        return {**step.metrics, "loss": (float(step.weighted_sum), counted)}

    @final
    def infer_batch(self, batch: PackedBatch, entropy: bool = False) -> dict[str, Tensor]:
        """Outputs without gradients: "log_probs" (and "entropy") or "values", each (total_tokens,) float32 on cpu.

        In the order of ``batch``; empty on ranks that are no source of outputs. Collective.
        """
        self.parking.require("model")
        step = self._run(batch.to(self.device), None, entropy, forward_only=True)
        if not self.topology.is_source:
            return {}
        if not step.outputs:  # this rank's share is empty
            names = (
                ("values",)
                if self.model_type == "value_model"
                else ("log_probs", *(("entropy",) if entropy else ()))
            )
            return {name: torch.zeros(0) for name in names}
        restored = {name: torch.zeros(batch.num_tokens) for name in step.outputs[0][1]}
        for micro_batch, outputs in step.outputs:
            rows = batch.token_rows(micro_batch.indices)
            for name, field in outputs.items():
                restored[name][rows] = field
        return restored

    @final
    def train_mode(self) -> BaseEngineCtx:
        """Scope for training: parameters, gradients and optimizer are on the device; gradients are dropped at its end."""
        return BaseEngineCtx(self, training=True)

    @final
    def eval_mode(self) -> BaseEngineCtx:
        """Scope for passes without gradients and for reading weights: parameters are on the device."""
        return BaseEngineCtx(self, training=False)

    @final
    def get_data_parallel_rank(self) -> int:
        """Which share of a batch this rank gets."""
        return self.topology.data_parallel_rank

    @final
    def get_data_parallel_size(self) -> int:
        """Into how many shares a batch is divided."""
        return self.topology.data_parallel_size

    @final
    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that get different shares; None when there is one share."""
        return self.topology.data_parallel_group

    @final
    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank returns outputs and metrics."""
        return self.topology.is_source

    @property
    @final
    def is_param_offload_enabled(self) -> bool:
        """Whether parameters wait in host memory outside scopes."""
        return self.config.offload.parameters

    @property
    @final
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether optimizer states and gradients wait in host memory outside training scopes."""
        return self.config.offload.optimizer

    @final
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Park parts in host memory ("cpu"), or bring them back ("device", or the engine's device key unless that is cpu).

        On a cpu engine a parked part stays where it is, and is as unusable as on any other device.
        """
        keys = {"cpu": "cpu", "device": "device"} | (
            {self.device.type: "device"} if self.device.type != "cpu" else {}
        )
        if device not in keys:
            raise ValueError(f"device={device!r}: must be one of {', '.join(keys)}")
        wanted = {"model": model, "optimizer": optimizer, "grad": grad}
        parts = [part for part in PARTS if wanted[part]]
        (self.parking.park if keys[device] == "cpu" else self.parking.bring_back)(parts)

    @final
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """(on-disk Hugging Face name, full tensor), read while the parameters are on the device. Collective."""
        self.parking.require("model")
        for unit in self.export_units():
            yield unit
            self.parking.require("model")

    @final
    def save_checkpoint(self, folder: Path, write: ShardWrite = write_shards) -> ShardIndex:
        """Write this rank's part of model, optimizer and scalars into ``folder``, named after the role. Collective.

        ``write`` is ``write_shards``, or the method ``ShardWriter.write``, which copies and lets the training go on.
        """
        with self.parking.suspended():
            return write(folder, _rank(), self.sharded_state(), self.scalar_state())

    @final
    def load_checkpoint(self, folder: Path) -> None:
        """Restore what ``save_checkpoint`` wrote into ``folder`` of a committed state, from any layout. Collective."""
        with self.parking.suspended():
            state = self.sharded_state()
            scalars = load_shards(folder.parent, folder.name, state)
            self.load_sharded_state(state)
            self.load_scalar_state(scalars)

    @final
    def disable_adapter(self) -> NoReturn:
        """Raises AdapterNotSupported: engines of this version train all weights."""
        raise AdapterNotSupported(
            f"{type(self).__name__} has no adapter: use a reference role for the base policy"
        )

    @final
    def lr_scheduler_step(self) -> None:
        """Advance the schedule by one optimizer step. ``train_batch`` does this itself, for skipped steps too."""
        self.scheduler_step += 1
        self._apply_learning_rate()

    # ---- shared mechanics --------------------------------------------------------------------------------------------

    def _run(
        self, batch: PackedBatch, loss: LossFunction | None, entropy: bool, forward_only: bool
    ) -> MicroBatchStep:
        topology = self.topology
        micro_batches = split_micro_batches(
            batch,
            self.config,
            forward_only,
            topology.data_parallel_group,
            topology.micro_batch_multiple,
            topology.alignment,
        )
        step = MicroBatchStep(self, loss, entropy, self.gradient_scale(len(micro_batches)))
        was_training = self.module.training
        self.module.train(not forward_only)
        try:
            with torch.set_grad_enabled(not forward_only), self._dropout_stream(forward_only):
                self.run_schedule(micro_batches, step, forward_only)
        finally:
            self.module.train(was_training)
        return step

    @contextmanager
    def _dropout_stream(self, forward_only: bool) -> Iterator[None]:
        """Scope in which torch's generator, which dropout draws from, depends on seed, rank and step only.

        Ranks that share sequences hold other heads, layers or rows of them, so they draw other masks.
        """
        if forward_only:
            yield
            return
        ranks = (self.get_data_parallel_rank(), self.scheduler_step, *self.topology.sharing_rank)
        key = stream_key(self.config.seed or 0, "dropout", *ranks)
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else None):
            torch.manual_seed(key)
            yield

    def _set_mode(self, mode: str | None) -> None:
        self._mode = mode
        self.module.train(mode == "train")

    def _rate(self) -> float:
        return learning_rate(self.optimizer_config, self.scheduler_step, self.total_steps)

    def _apply_learning_rate(self) -> None:
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _function(member: Any) -> Any:
    return member.fget if isinstance(member, property) else member
