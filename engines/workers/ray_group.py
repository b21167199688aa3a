"""Worker groups whose ranks are Ray actors.

Notable: the ranks meet in a store on a port that rank 0 gets from the system, so no two jobs can collide; the first
death of an actor ends the call, and the others with it, because they would wait for the dead one in a collective.
"""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError

from engines.workers.group import WorkerError, WorkerGroup
from engines.workers.host import RankHost, RankPlace
from engines.workers.nodes import JobNodes
from engines.workers.ray_cluster import RayCluster
from engines.workers.spec import RoleSpec

LOG_TAIL_LINES = 20
PEERS_GRACE_S = 2.0
"""After one rank failed: time for others to fail too, so that the cause is not mistaken for its consequences."""


class RankActor(RankHost):
    """A rank in a process of its own."""

    def __init__(
        self, specs: list[RoleSpec], rank: int, world_size: int, device: int, threads: int, log: Path
    ) -> None:
        _redirect_output(log)
        faulthandler.enable()
        torch.set_num_threads(threads)
        os.environ["LOCAL_RANK"] = str(device)
        self._rank, self._world_size = rank, world_size
        super().__init__(specs)

    def open_store(self, loopback: bool) -> tuple[str, int]:
        """Rank 0: open the store where all ranks meet, on a free port; its address."""
        host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, self._world_size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, host: str, port: int) -> dict[str, RankPlace]:
        """Meet the other ranks and build the engines."""
        if self._rank:
            self._store = dist.TCPStore(host, port, self._world_size)
        return self.initialize(self._rank, self._world_size, self._store)


class RayGroup(WorkerGroup):
    """One Ray actor per rank.

    Args:
        specs: roles of one placement.
        cluster: where the actors live; the group leaves it at shutdown.
        first_slot: of the job's devices, over all its nodes, the one of rank 0; those before it belong to other groups.
    """

    def __init__(self, specs: list[RoleSpec], cluster: RayCluster, first_slot: int = 0) -> None:
        super().__init__(specs)
        self._cluster: RayCluster | None = cluster
        self._failure: WorkerError | None = None
        number = cluster.join()
        size = specs[0].engine.layout.world_size
        self._logs = [cluster.log_file(number, rank) for rank in range(size)]
        self._loopback = cluster.nodes is None and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        # Ranks reserve no CPUs: how many there are is the layout's business, and Ray would wait for ever for more.
        actor = ray.remote(num_cpus=0, max_restarts=0)(RankActor)
        threads = torch.get_num_threads()
        self._actors = []
        for rank, log in enumerate(self._logs):
            device, place = cluster.place(first_slot + rank)
            self._actors.append(actor.options(**place).remote(specs, rank, size, device, threads, log))

    @property
    def world_size(self) -> int:
        return len(self._logs)

    def _initialize(self) -> list[dict[str, RankPlace]]:
        address = self._wait("open_store", [self._actors[0].open_store.remote(self._loopback)])[0]
        return self._call("join", [address] * self.world_size)

    def _call(self, method: str, arguments: list[tuple]) -> list[Any]:
        if self._failure is not None or self._cluster is None:
            raise WorkerError(
                f"{method}: this worker group is shut down{f' since: {self._failure}' if self._failure else ''}"
            )
        pairs = zip(self._actors, arguments, strict=True)
        return self._wait(method, [getattr(actor, method).remote(*own) for actor, own in pairs])

    def _wait(self, method: str, calls: list[ray.ObjectRef]) -> list[Any]:
        results: dict[ray.ObjectRef, Any] = {}
        pending = calls
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            try:
                results[done[0]] = ray.get(done[0])
            except RayError as error:
                failures = {calls.index(done[0]): error, **self._other_failures(calls, pending)}
                self._failure = self._explain(method, failures)
                self._kill()
                raise self._failure from None
        return [results[call] for call in calls]

    def _other_failures(self, calls: list[ray.ObjectRef], pending: list[ray.ObjectRef]) -> dict[int, Any]:
        failures = {}
        if pending:
            for call in ray.wait(pending, num_returns=len(pending), timeout=PEERS_GRACE_S)[0]:
                try:
                    ray.get(call)
                except RayError as error:
                    failures[calls.index(call)] = error
        return failures

    def _explain(self, method: str, failures: dict[int, Exception]) -> WorkerError:
        """Names the likely cause: a death before an error, an error before a lost connection."""

        def order(rank: int) -> tuple[bool, bool, int]:
            error = failures[rank]
            lost_peer = "gloo" in str(error) or isinstance(getattr(error, "cause", None), dist.DistError)
            return not isinstance(error, RayActorError), lost_peer, rank

        first = min(failures, key=order)
        error, log = failures[first], self._logs[first]
        died = isinstance(error, RayActorError)
        others = sorted(set(failures) - {first})
        roles = ", ".join(self.specs)
        lines = [
            f"{method}: rank {first} of {self.world_size} ({roles}) {'died' if died else 'raised'}: {_reason(error)}",
            *([f"ranks {others} failed after it"] if others else []),
            f"its log is {log}" + (f", which ends:\n{_tail(log)}" if died else ""),
        ]
        return WorkerError("\n".join(lines))

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def shutdown(self) -> None:
        if self._cluster is None:
            return
        cluster, self._cluster = self._cluster, None
        self._kill()
        cluster.leave(keep_logs=self._failure is not None)


def start_ray_groups(placements: list[list[RoleSpec]]) -> list[RayGroup]:
    """One group per placement on one private Ray, over all nodes of the job; the last group's shutdown stops it."""
    cluster, groups = RayCluster(JobNodes.read()), []
    try:
        for specs in placements:
            groups.append(RayGroup(specs, cluster, sum(group.world_size for group in groups)))
    except BaseException:
        for group in groups:
            group.shutdown()
        raise
    return groups


def _reason(error: Exception) -> str:
    """A task's error with its traceback on the rank; an actor's death as Ray tells it."""
    return str(error).strip()


def _tail(log: Path) -> str:
    if not log.is_file():
        return "(nothing was written)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def _redirect_output(log: Path) -> None:
    """Send this process's output, that of native code included, to ``log``."""
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
