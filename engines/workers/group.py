"""A worker group: all ranks of the roles that share an engine, a device and a layout, behind one object.

The controller (the trainer) calls a group as if there were one rank. A group cuts batches into mini-batches from
global indices, spreads each over the data-parallel ranks, calls every rank, and puts what the source ranks return
back in order. Only plain data and tensors cross the border.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from engines.config import RolloutConfig
from engines.rollout.base import Request, Response, SamplingParams
from engines.training.batch import Aggregation, PackedBatch
from engines.training.schedule import LossFunction, Metrics, merge_metrics
from engines.workers import dispatch
from engines.workers.host import RankHost, RankPlace
from engines.workers.spec import RoleSpec, process_groups, total_ranks


class WorkerError(RuntimeError):
    """A rank died or raised; the message holds its role, rank, the reason and where its log is."""


class WorkerGroup(ABC):
    """The ranks of one or several roles. Usable as a context manager that shuts the ranks down."""

    def __init__(self, specs: list[RoleSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self._places: dict[str, list[RankPlace]] = {}

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def _call(self, method: str, arguments: list[tuple]) -> list[Any]:
        """Run ``RankHost.method(*arguments[rank])`` on every rank and return the results by rank.

        Raises:
            WorkerError: for the first rank that raised or died; the group is then unusable.
        """

    def _initialize(self) -> list[dict[str, RankPlace]]:
        """Build every role's engine on every rank; the roles' places by rank."""
        return self._everywhere("initialize")

    @abstractmethod
    def shutdown(self) -> None:
        """Free all that the group holds. May be called twice."""

    def initialize(self) -> None:
        """Build every role's engine on every rank. Called by ``build_groups``."""
        places = self._initialize()
        self._places = {name: [place[name] for place in places] for name in self.specs}

    def update(
        self,
        role: str,
        batch: TensorDict,
        loss: LossFunction,
        *,
        mini_batch_size: int,
        epochs: int = 1,
        shuffle_key: int | None = None,
        aggregation: str | Aggregation = "token-mean",
        max_length: int | None = None,
        select: Callable[[PackedBatch, Tensor], PackedBatch] | None = None,
    ) -> Metrics:
        """Train ``role``: one optimizer step per mini-batch and epoch.

        Args:
            batch: jagged per-token fields and (sequences,) per-sequence fields.
            loss: picklable.
            mini_batch_size: sequences of a mini-batch, over all data-parallel ranks.
            shuffle_key: names the permutation drawn anew in each epoch; None keeps the order.
            aggregation: a name of ``AGGREGATIONS``, or a function, picklable.
            max_length: the L of the aggregation ``seq-mean-token-sum-norm``.
            select: called with each whole mini-batch, right before its step, and ``role``'s log-probs of it (tokens,) at
                that moment; returns it with further per-token fields. Costs a pass without gradients per mini-batch.

        Returns:
            (sum, count) per metric.
        """
        packed = PackedBatch.from_tensordict(batch)
        steps = dispatch.plan_mini_batches(len(packed), mini_batch_size, epochs, shuffle_key)
        if select is None:
            return self._update(role, packed, steps, loss, aggregation, max_length)
        metrics: Metrics = {}
        for indices in steps:
            mini_batch = packed.select(indices)
            outputs = PackedBatch.from_tensordict(self.infer(role, mini_batch.to_tensordict()))
            chosen, everything = select(mini_batch, outputs.tokens["log_probs"]), [list(range(len(indices)))]
            merge_metrics(metrics, self._update(role, chosen, everything, loss, aggregation, max_length))
        return metrics

    def _update(
        self,
        role: str,
        packed: PackedBatch,
        steps: list[list[int]],
        loss: LossFunction,
        aggregation: str | Aggregation,
        max_length: int | None,
    ) -> Metrics:
        """One optimizer step on each of the given sets of sequences."""
        lengths, places = packed.lengths.tolist(), self._places[role]
        spread = [dispatch.spread(indices, lengths, places[0].data_parallel_size) for indices in steps]
        chunks = [
            [packed.select(shares[rank]).to_tensordict() for shares in spread]
            for rank in range(places[0].data_parallel_size)
        ]
        results = self._call(
            "update",
            [(role, chunks[place.data_parallel_rank], loss, aggregation, max_length) for place in places],
        )
        metrics: Metrics = {}
        for result in results:  # empty off source ranks
            merge_metrics(metrics, result)
        return metrics

    def infer(self, role: str, batch: TensorDict, entropy: bool = False) -> TensorDict:
        """``role``'s outputs without gradients, jagged, in the order of ``batch``.

        Fields: ``log_probs`` (and ``entropy`` when asked for) of a language model, ``values`` of a value model.
        """
        packed = PackedBatch.from_tensordict(batch)
        places = self._places[role]
        size = places[0].data_parallel_size
        shares = dispatch.spread(range(len(packed)), packed.lengths.tolist(), size)
        chunks = [packed.select(share).to_tensordict() for share in shares]
        results = self._call("infer", [(role, chunks[place.data_parallel_rank], entropy) for place in places])
        outputs = {
            place.data_parallel_rank: result
            for place, result in zip(places, results, strict=True)
            if place.is_source
        }
        return dispatch.collect(
            [outputs[rank] for rank in range(size)], shares, packed.lengths
        ).to_tensordict()

    def save(self, role: str, folder: Path, background: bool = False) -> list[Any]:
        """Write ``role``'s part of a training state; the ``ShardIndex`` of each rank.

        With ``background`` every rank copies its part, and its file appears later, whole.
        """
        return self._everywhere("save", role, folder, background)

    def check_save(self, role: str, wait: bool = False) -> None:
        """Raise what kept a rank from writing its part in the background; with ``wait``, once all of them have written it.

        Raises:
            StateError, OSError, WorkerError: it was not written.
        """
        self._everywhere("check_save", role, wait)

    def load(self, role: str, folder: Path) -> None:
        """Restore ``role`` from a training state of any world size and layout."""
        self._everywhere("load", role, folder)

    def export(self, role: str, folder: Path) -> None:
        """Write ``role``'s weights as a Hugging Face folder (rank 0 writes)."""
        self._everywhere("export", role, folder)

    def reset(self, role: str) -> None:
        """Drop ``role``'s optimizer state and step; its weights stay."""
        self._everywhere("reset", role)

    def add_rollout(self, config: RolloutConfig, model_path: Path) -> None:
        """Build one rollout replica per rank, with the weights in ``model_path``."""
        self._everywhere("add_rollout", config, model_path)

    def sync_weights(self, role: str) -> None:
        """Copy ``role``'s weights into every replica of this group."""
        self._everywhere("sync_weights", role)

    def generate(self, requests: list[Request], params: SamplingParams) -> list[Response]:
        """One response per request, in order; the requests are spread over the replicas."""
        shares = dispatch.spread_requests([request.prompt_ids for request in requests], self.world_size)
        arguments = [([requests[i] for i in share], params) for share in shares]
        return dispatch.restore_order(self._call("generate", arguments), shares)

    def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        return self._call(method, [arguments] * self.world_size)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class InProcessGroup(WorkerGroup):
    """One rank, in this process."""

    def __init__(self, specs: list[RoleSpec]) -> None:
        super().__init__(specs)
        self._host = RankHost(specs)

    @property
    def world_size(self) -> int:
        return 1

    def _call(self, method: str, arguments: list[tuple]) -> list[Any]:
        return [getattr(self._host, method)(*arguments[0])]

    def shutdown(self) -> None:
        self._host.shutdown()


def build_groups(specs: list[RoleSpec]) -> dict[str, WorkerGroup]:
    """The group of each role, by role name; engines are built.

    Which roles share a group says ``process_groups``. When one group holds all of them and is one rank, it lives in
    this process; else every rank is a Ray actor.
    """
    by_name = {spec.name: spec for spec in specs}
    engines = {name: spec.engine for name, spec in by_name.items()}
    shared = [[by_name[name] for name in names] for names in process_groups(engines)]
    if total_ranks(engines) == 1:
        groups: list[WorkerGroup] = [InProcessGroup(specs)]
    else:
        from engines.workers.ray_group import start_ray_groups  # a run in one process never imports Ray

        groups = start_ray_groups(shared)
    by_role = {name: group for group in groups for name in group.specs}
    try:
        for group in groups:
            group.initialize()
    except BaseException:
        for group in groups:
            group.shutdown()
        raise
    return by_role
