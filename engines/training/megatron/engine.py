"""The engine: tensor, pipeline, context, expert and data parallelism of Megatron-core behind the contract."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from engines.catalog import MEGATRON
from engines.limits import MegatronLimits
from engines.registry import EngineRegistry
from engines.training.base import BaseEngine
from engines.training.batch import MicroBatch, pipeline_order
from engines.training.errors import UnsupportedConfigError
from engines.training.megatron.export import export_units
from engines.training.megatron.forward import hidden_states, outputs, pack
from engines.training.megatron.model import TokenModel, build_chunks, read_config, transformer_config
from engines.training.megatron.parallelize import adamw, device_scope, join, topology, with_gradients
from engines.training.megatron.residency import Parked
from engines.training.megatron.state import Weights
from engines.training.process_group import local_device
from engines.training.schedule import Metrics, MicroBatchStep, ModelOutputs
from engines.training.value_head import VALUE_HEAD, value_head

DEVICES = ("cpu", "cuda")


class MegatronEngine(BaseEngine):
    """Models of Megatron-core. Of a pipeline each rank holds one part of the model, or several when it is interleaved."""

    limits: ClassVar[MegatronLimits] = MEGATRON
    """What it computes."""
    # Of Transformer Engine: no layer here is of it, and Megatron's deterministic mode refuses its attention without this.
    deterministic_variables: ClassVar[Mapping[str, str]] = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    optimizer: MegatronOptimizer | None = None
    chunks: list[TokenModel]
    """This rank's parts of the model, bare; ``module`` holds them with their gradients."""
    waiting: dict[str, Parked]
    """Parts in host memory, by the contract's names."""

    def build(self) -> None:
        layout = self.config.layout
        model = self._check_config()
        self.device = local_device(self.config.device)
        self.waiting = {}
        with self.scope(), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that Apex is not installed, and what Megatron deprecates of its own
            join(layout)
            self.topology = topology(layout)
            config = transformer_config(model, layout, self.config)
            self.chunks = [chunk.to(self.device) for chunk in build_chunks(model, config, self.model_type)]
            head = {}
            if self.model_type == "value_model":
                head[VALUE_HEAD] = value_head(self.model_path, model.hidden_size, self.config.seed or 0)
            wrapped: list[nn.Module] = list(self.chunks)
            if self.optimizer_config is None:
                for chunk in self.chunks:
                    chunk.requires_grad_(False)
            else:
                wrapped = with_gradients(self.chunks, layout)
                self.optimizer = adamw(wrapped, self.optimizer_config, layout)
            self.module = nn.ModuleList(wrapped)
            self.weights = Weights(self.chunks, self.optimizer)
            # Last: the optimizer's float32 weights are read too, which Megatron makes as copies of parameters that are rounded.
            self.weights.read_files(self.model_path, head)

    def _check_config(self) -> Any:
        """The model's configuration; refuses before any process group exists what planning refuses."""
        if reason := self.limits.refuse_settings(self.config):
            raise UnsupportedConfigError(f"engine.backend={self.config.backend}: {reason}")
        model = read_config(self.model_path, self.limits)
        if reason := self.limits.refuse_layout(self.config, model.to_dict()):
            raise UnsupportedConfigError(f"engine.backend={self.config.backend}: {self.model_path}: {reason}")
        return model

    def scope(self) -> AbstractContextManager[None]:
        """Scope for calls of Megatron."""
        return device_scope(self.device.type)

    def forward_micro_batch(
        self, model: nn.Module, micro_batch: MicroBatch, entropy: bool
    ) -> ModelOutputs | Tensor:
        """Outputs of whole sequences from the last part of the model, hidden states (rows, 1, hidden) from the others."""
        batch, layout = micro_batch.batch, self.config.layout
        packing, token_rows, size = pack(batch, self.topology.alignment, self.device)
        hidden = hidden_states(
            model, batch, packing, token_rows, size, self.config.moe_aux_loss_coefficient > 0
        )
        chunk = self.chunks[list(self.module).index(model)]
        if not chunk.post_process:
            return hidden
        return outputs(chunk, hidden, batch, packing, token_rows, size, layout, self.temperature, entropy)

    def run_schedule(
        self, micro_batches: Sequence[MicroBatch], step: MicroBatchStep, forward_only: bool
    ) -> None:
        parts = list(self.module)
        if self.config.layout.pipeline_parallel_size > 1:
            micro_batches = pipeline_order(micro_batches)

        def forward_step(batches: Iterator[MicroBatch], model: nn.Module) -> tuple[Tensor, Any]:
            micro_batch = next(batches)
            made = self.forward_micro_batch(model, micro_batch, step.entropy)
            if isinstance(made, Tensor):
                return made, None

            def finish(_: Tensor, **named: Any) -> tuple[Tensor, dict] | None:
                loss = step.finish(made, micro_batch)
                return None if loss is None else (loss, {})

            return (made.values if made.log_probs is None else made.log_probs), finish

        with self.scope():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(micro_batches) for _ in parts] if len(parts) > 1 else iter(micro_batches),
                model=parts if len(parts) > 1 else parts[0],
                num_microbatches=len(micro_batches),
                seq_length=1,  # every micro-batch tells its own
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=step.loss is None,
            )

    def gradient_scale(self, num_micro_batches: int) -> float:
        """Losses are averaged over micro-batches, gradients over data-parallel ranks."""
        return float(num_micro_batches * self.topology.data_parallel_size)

    def zero_grad(self) -> None:
        if self.optimizer is not None:
            with self.scope():
                for part in self.module:
                    part.zero_grad_buffer()
                self.optimizer.zero_grad()

    def optimizer_step(self) -> Metrics:
        with self.scope(), torch.no_grad():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            skipped = not math.isfinite(norm)
            limit = self.optimizer_config.clip_grad_norm
            if not skipped:
                if norm > limit:
                    gradients = [p.grad for p in self._stepped() if p.grad is not None]
                    torch._foreach_mul_(gradients, limit / (norm + 1e-6))
                self.optimizer.step_with_ready_grads()
        return {"grad_norm": (norm, 1.0), "skipped_steps": (float(skipped), 1.0)}

    def move(self, device: torch.device, model: bool, optimizer: bool, grad: bool) -> None:
        if self.device.type == "cpu":
            return  # host memory is the device's memory
        for part, wanted in (("model", model), ("optimizer", optimizer), ("grad", grad)):
            if wanted and device.type == "cpu":
                self.park(part)
            elif wanted:
                self.bring_back(part)

    def park(self, part: str) -> None:
        """Empty the storages of "model", "optimizer" or "grad" on the device; their content waits in host memory."""
        self.waiting[part] = Parked(self._tensors_of(part))

    def bring_back(self, part: str) -> None:
        """Refill what ``park`` emptied."""
        self.waiting.pop(part).bring_back()

    def _tensors_of(self, part: str) -> list[Tensor]:
        parameters = list(self.module.parameters())
        if part == "model":
            return [parameter.data for parameter in parameters]
        if self.optimizer is None:
            return []
        if part == "grad":
            return [parameter.main_grad for parameter in parameters]
        # Float32 copies of the weights are the optimizer's; what it steps in place is the model's.
        weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        stepped = [p for p in self._stepped() if p.untyped_storage().data_ptr() not in weights]
        states = [state for held in self.weights.held for state in held.kept()]
        return [*(p.data for p in stepped), *states]

    def _stepped(self) -> list[nn.Parameter]:
        """What the optimizers of dense weights and of experts step."""
        return [p for part in self.optimizer.chained_optimizers for p in part.get_parameters()]

    def export_units(self) -> Iterator[tuple[str, Tensor]]:
        return export_units(self.weights, self.device, self.scope)

    def sharded_state(self) -> dict[str, Any]:
        with self.scope(), torch.no_grad():
            return self.weights.sharded()

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        with self.scope(), torch.no_grad():
            self.weights.load_sharded(state)


@EngineRegistry.register(model_type="language_model", backend="megatron", device=DEVICES)
class MegatronLanguageModel(MegatronEngine):
    """Log-probs and entropy."""

    model_type = "language_model"


@EngineRegistry.register(model_type="value_model", backend="megatron", device=DEVICES)
class MegatronValueModel(MegatronEngine):
    """Values."""

    model_type = "value_model"
