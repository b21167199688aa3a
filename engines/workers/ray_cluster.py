"""A private Ray of this process: never joined by others, never joining another, gone with its driver.

Everything Ray writes on a node lies below one folder of mode 700 with a short path, because a Unix socket's path may not exceed
107 bytes. The folder is locked while the driver lives, so the next start removes what is left of dead ones (such as the
logs that an error pointed to); a reaper ends the processes.

The head always runs here. The further nodes of a job join it: whoever started the job starts :mod:`engines.workers.ray_node` there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ray
import ray._private.ray_constants
import ray._private.utils
from ray._raylet import AuthenticationTokenLoader, Config
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engines.workers import reaper
from engines.workers.nodes import (
    REGISTRATION_SECONDS,
    JobNodes,
    interface_of,
    socket_variables,
    usable_cpus,
)
from engines.workers.private_folder import NoShortFolder, PrivateFolder
from engines.workers.ray_settings import (
    DEEPEST,
    OBJECT_STORE_BYTES,
    PREFIX,
    accelerators,
    environment,
    signals_held,
)

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""What asks a driver to stop."""
RECONNECT_SECONDS = 10
"""For which a driver looks for Ray's global store before it gives up. It is on the same node; when it is gone, it was killed."""


class RayStartError(RuntimeError):
    """The private Ray could not be started."""


class RayCluster:
    """One Ray instance of this process, shared by the process's worker groups.

    Args:
        nodes: of the job; this node alone when None.

    Raises:
        RayStartError: this process already uses Ray, no folder with a short enough path can be made, or a node of the job did not join.
    """

    def __init__(self, nodes: JobNodes | None = None) -> None:
        if ray.is_initialized():
            raise RayStartError(
                "this process is connected to a Ray cluster already; worker groups start their own"
            )
        self.nodes = nodes
        try:
            self._folder = PrivateFolder(PREFIX, DEEPEST)
        except NoShortFolder as error:
            raise RayStartError(str(error)) from None
        self._groups = 0
        self._keep_logs = False
        settings = self._settings()
        self._environment = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        _reread_authentication()
        self._logs.mkdir(parents=True)
        self._reaper = reaper.start(self._folder.path)
        try:
            self._start_head()
            self._node_ids = self._wait_for_nodes()
        except BaseException:
            self._keep_logs = True
            self._close()
            raise

    def log_file(self, group: int, rank: int) -> Path:
        """Where a rank's output goes; the driver can read it."""
        return self._logs / f"group{group}-rank{rank:05d}.log"

    def place(self, slot: int) -> tuple[int, dict]:
        """The device on its node, and the options of the actor, of a rank.

        Args:
            slot: number of the rank among those of all groups; they fill the nodes in their order.
        """
        if self.nodes is None:
            return slot, {}
        node, device = divmod(slot, self.nodes.ranks_per_node)
        return device, {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._node_ids[node], soft=False)
        }

    def join(self) -> int:
        """Register a group; its number."""
        self._groups += 1
        return self._groups - 1

    def leave(self, keep_logs: bool) -> None:
        """Unregister a group; the last one stops Ray and removes the folder (but for logs that an error points to)."""
        self._groups -= 1
        self._keep_logs |= keep_logs
        if self._groups == 0:
            self._close()

    @property
    def _logs(self) -> Path:
        return self._folder.path / "logs" if self.nodes is None else Path(self.nodes.logs)

    def _settings(self) -> dict[str, str]:
        if self.nodes is None:
            own = {
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
                "RAY_GCS_SERVER_PORT": "0",
            }
            return environment(secrets.token_hex(32)) | own
        interface = self.nodes.interface or interface_of(self.nodes.address)
        port = {"RAY_GCS_SERVER_PORT": str(self.nodes.port)}
        return environment(self.nodes.token) | socket_variables(interface) | port

    def _start_head(self) -> None:
        options = {}
        if self.nodes is not None:
            gpus, resources = accelerators(self.nodes.device, self.nodes.ranks_per_node)
            options = {"num_gpus": gpus, "resources": resources}
            options |= {"_node_name": self.nodes.names[0], "_node_ip_address": self.nodes.address}
        in_job = "SLURM_JOB_ID" in os.environ
        with _requests_wait(), signals_held() if in_job else contextlib.nullcontext():
            ray.init(
                address="local",  # a new instance, whatever RAY_ADDRESS says
                num_cpus=usable_cpus(),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                _system_config={"gcs_rpc_server_reconnect_timeout_s": RECONNECT_SECONDS},
                _temp_dir=str(self._folder.path / "ray"),
                **options,
            )

    def _wait_for_nodes(self) -> list[str]:
        """Ray's ids of the job's nodes, in their order."""
        if self.nodes is None:
            return []
        deadline = time.monotonic() + REGISTRATION_SECONDS
        while True:
            here = {node["NodeName"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
            missing = [name for name in self.nodes.names if name not in here]
            if not missing:
                return [here[name] for name in self.nodes.names]
            if time.monotonic() > deadline:
                raise RayStartError(
                    f"after {REGISTRATION_SECONDS:.0f} s {', '.join(missing)} did not join the Ray of {self.nodes.names[0]} "
                    f"at {self.nodes.address}:{self.nodes.port}; does that network reach all nodes (site.devices.<key>.interface)?"
                )
            time.sleep(0.2)

    def _close(self) -> None:
        if self.nodes is not None and not self._keep_logs:
            self.nodes.close()
        with _requests_wait():
            ray.shutdown()
            reaper.stop(self._reaper)
            if not self._keep_logs:
                shutil.rmtree(self._logs, ignore_errors=True)
            self._folder.remove(keep="logs" if self._keep_logs and self.nodes is None else None)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _reread_authentication() -> None:
    """Ray reads the mode and the token once, when it is imported, which may have been long ago; it has no public way."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _requests_wait() -> Iterator[None]:
    """While Ray starts or ends, requests to stop are noted, and are answered afterwards by the process's own handlers.

    Ray would replace that of SIGTERM, in Python by one that exits and in C++ by one that aborts. Where there was none, the process
    exits through ``finally`` from now on. Only in the main thread; elsewhere there are no handlers.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in REQUESTS}
    private = ray._private
    private.ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    install, private.utils.set_sigterm_handler = private.utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        private.utils.set_sigterm_handler = install
        if before[signal.SIGTERM] in (signal.SIG_DFL, None):
            before[signal.SIGTERM] = _exit_on_signal
        for number, handler in before.items():
            signal.signal(number, handler)
        if noted:
            signal.raise_signal(noted[0])


def _exit_on_signal(signum: int, _: object) -> None:
    sys.exit(128 + signum)
