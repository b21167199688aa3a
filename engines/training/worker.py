"""One role on one rank: mini-batches, metrics, speed. It knows the engine contract and no backend."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from engines.checkpoint import ShardIndex
from engines.checkpoint.shards import write_shards
from engines.checkpoint.writer import ShardWriter
from engines.registry import EngineRegistry
from engines.training.base import BaseEngine
from engines.training.batch import Aggregation, PackedBatch
from engines.training.flops import peak_flops, training_flops
from engines.training.hf_export import write_model_folder
from engines.training.schedule import LossFunction, Metrics, merge_metrics
from engines.workers.spec import RoleSpec


class TrainingWorker:
    """A role's engine and what one does with it.

    Args:
        spec: the role, with backend and device resolved.
    """

    engine: BaseEngine

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self._writer = ShardWriter()

    def initialize(self) -> None:
        """Build the engine. The process group is there already. Collective."""
        spec = self.spec
        self.engine = EngineRegistry.new(
            spec.model_type,
            spec.engine.backend,
            spec.engine.device,
            config=spec.engine,
            model_path=spec.model_path,
            optimizer=spec.optimizer,
            total_steps=spec.total_steps,
            temperature=spec.temperature,
        )
        self.engine.initialize()
        self._initial_scalars = self.engine.scalar_state()
        self._peak_flops = peak_flops(self.engine.device, spec.engine)

    def update(
        self,
        mini_batches: list[PackedBatch],
        loss: LossFunction,
        aggregation: str | Aggregation = "token-mean",
        max_length: int | None = None,
    ) -> Metrics:
        """One optimizer step per mini-batch. Collective.

        Args:
            mini_batches: this data-parallel rank's share of each; a share may be empty.

        Returns:
            The engine's metrics, ``tokens_per_second`` (prompt tokens included; of all ranks, once their metrics are
            added) and, where the device's peak is known, ``mfu``. Empty on ranks that are no source of outputs.
        """
        started = time.perf_counter()
        metrics: Metrics = {}
        with self.engine.train_mode():
            for mini_batch in mini_batches:
                merge_metrics(metrics, self.engine.train_batch(mini_batch, loss, aggregation, max_length))
        if self.engine.is_mp_src_rank_with_outputs():
            merge_metrics(metrics, self._speed(mini_batches, time.perf_counter() - started))
        return metrics

    def infer(self, batch: PackedBatch, entropy: bool = False) -> dict[str, Tensor]:
        """Per-token outputs without gradients, (tokens,) each; empty off source ranks. Collective."""
        with self.engine.eval_mode():
            return self.engine.infer_batch(batch, entropy)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(on-disk Hugging Face name, full tensor), one after the other. Collective: read it to its end."""
        with self.engine.eval_mode():
            yield from self.engine.get_per_tensor_param()

    def save(self, folder: Path, background: bool = False) -> ShardIndex:
        """Write this rank's part into ``folder``, which is the state's folder for this role. Collective.

        With ``background`` it is copied and the files appear later; one state at a time.
        """
        return self.engine.save_checkpoint(folder, self._writer.write if background else write_shards)

    def check_save(self, wait: bool) -> None:
        """Raise what kept it from being written in the background; with ``wait``, once it is written. Not collective."""
        self._writer.check(wait)

    def load(self, folder: Path) -> None:
        """Restore the role from the committed training state ``folder``, written by any layout. Collective."""
        self.engine.load_checkpoint(folder / self.spec.name)

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder; rank 0 writes. Collective."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_model_folder(folder, self.spec.model_path, self.weights())
        else:
            for _ in self.weights():
                pass

    def reset(self) -> None:
        """Zero the optimizer's state and go back to step 0; the weights stay. Collective."""
        with self.engine.train_mode():
            state = self.engine.sharded_state()
            for name, tensor in state.items():
                if name.startswith("optimizer."):
                    getattr(tensor, "local", tensor).zero_()
            self.engine.load_sharded_state(state)
        self.engine.load_scalar_state(self._initial_scalars)

    def _speed(self, mini_batches: list[PackedBatch], seconds: float) -> Metrics:
        counted = 1.0 if self.engine.get_data_parallel_rank() == 0 else 0.0  # rates of ranks add up
        tokens = sum(mini_batch.num_tokens for mini_batch in mini_batches)
        speed = {"tokens_per_second": (tokens / seconds, counted)}
        if self._peak_flops is not None:
            lengths = [length for mini_batch in mini_batches for length in mini_batch.lengths.tolist()]
            layout = self.spec.engine.layout
            share = (
                layout.data_parallel_size / layout.world_size
            )  # of a sequence's work that this device does
            done = training_flops(self.spec.model_path, lengths) * share / seconds
            speed["mfu"] = (done / self._peak_flops, 1.0)
        return speed
