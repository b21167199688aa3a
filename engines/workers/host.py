"""What one process hosts: one rank of one or several roles, and a rollout replica beside them.

The same object serves in the controller's process and as a Ray actor; its methods take and return plain data and
tensors only, and take what an update computes (loss, aggregation) as something picklable.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from engines.config import RolloutConfig
from engines.rollout.base import BaseRollout, Request, Response, SamplingParams
from engines.sync.naive import NaiveCheckpointEngine
from engines.training.batch import Aggregation, PackedBatch
from engines.training.determinism import compute_deterministically
from engines.training.process_group import init_process_group, local_device
from engines.training.schedule import LossFunction, Metrics
from engines.training.worker import TrainingWorker
from engines.workers.spec import RoleSpec


class NoRolloutError(RuntimeError):
    """Sampling or weight sync was asked of a group without ``add_rollout``."""


@dataclass(frozen=True)
class RankPlace:
    """What the controller must know of one role on one rank to dispatch and collect."""

    data_parallel_rank: int
    data_parallel_size: int
    is_source: bool


class RankHost:
    """One rank. All its methods that touch an engine are collective over the group's ranks."""

    def __init__(self, specs: list[RoleSpec]) -> None:
        self._device = specs[0].engine.device
        self._deterministic = any(spec.engine.deterministic for spec in specs)
        self._workers = {spec.name: TrainingWorker(spec) for spec in specs}
        self._rollout: BaseRollout | None = None
        self._owns_process_group = False

    def initialize(
        self, rank: int = 0, world_size: int = 1, store: dist.Store | None = None
    ) -> dict[str, RankPlace]:
        """Join the other ranks and build every role's engine."""
        if self._deterministic:  # before the device is touched, by anybody
            compute_deterministically(self._device)
        self._owns_process_group = not dist.is_initialized()
        init_process_group(self._device, rank, world_size, store)
        places = {}
        for name, worker in self._workers.items():
            worker.initialize()
            engine = worker.engine
            places[name] = RankPlace(
                engine.get_data_parallel_rank(),
                engine.get_data_parallel_size(),
                engine.is_mp_src_rank_with_outputs(),
            )
        return places

    def update(
        self,
        role: str,
        mini_batches: list[TensorDict],
        loss: LossFunction,
        aggregation: str | Aggregation,
        max_length: int | None,
    ) -> Metrics:
        """Train on this rank's share of each mini-batch."""
        batches = [PackedBatch.from_tensordict(mini_batch) for mini_batch in mini_batches]
        return self._workers[role].update(batches, loss, aggregation, max_length)

    def infer(self, role: str, batch: TensorDict, entropy: bool) -> dict[str, Tensor]:
        """Per-token outputs of this rank's share; empty off source ranks."""
        return self._workers[role].infer(PackedBatch.from_tensordict(batch), entropy)

    def save(self, role: str, folder: Path, background: bool) -> Any:
        """This rank's ``ShardIndex``."""
        return self._workers[role].save(folder, background)

    def check_save(self, role: str, wait: bool) -> None:
        """Raise what kept ``role``'s part from being written in the background."""
        self._workers[role].check_save(wait)

    def load(self, role: str, folder: Path) -> None:
        """Restore ``role`` from a committed training state."""
        self._workers[role].load(folder)

    def export(self, role: str, folder: Path) -> None:
        """Write a Hugging Face folder."""
        self._workers[role].export(folder)

    def reset(self, role: str) -> None:
        """Drop ``role``'s optimizer state and step."""
        self._workers[role].reset()

    def add_rollout(self, config: RolloutConfig, model_path: Path) -> None:
        """Build this rank's replica."""
        from engines.rollout.transformers import TransformersRollout

        self._rollout = TransformersRollout(model_path, config, local_device(self._device))

    def sync_weights(self, role: str) -> None:
        """Copy ``role``'s weights into this rank's replica."""
        NaiveCheckpointEngine(self._replica()).transfer(self._workers[role].weights())

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Response]:
        """Responses of this rank's share of the requests. Not collective."""
        return self._replica().generate(requests, params)

    def shutdown(self) -> None:
        """Leave the process group, if this host joined it."""
        self._workers, self._rollout = {}, None
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
            self._owns_process_group = False

    def _replica(self) -> BaseRollout:
        if self._rollout is None:
            raise NoRolloutError("this group has no rollout replicas: call add_rollout first")
        return self._rollout
