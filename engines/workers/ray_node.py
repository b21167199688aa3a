"""A further node of a job: ``python -m engines.workers.ray_node`` joins the Ray of the driver's node and stays until it is let go.

Its standard input is the thread it hangs by: when that closes, because the job ends or because whoever holds the other end died, all of
Ray on this node ends, and what it wrote is removed. It passes by the signals by which a scheduler ends a job, for the ranks
must live until the driver has saved their state; that SIGTERM came is said on standard output.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

from engines.workers import reaper
from engines.workers.nodes import (
    JobNodes,
    NodesUnreachable,
    interface_of,
    own_address,
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

TOLD_TO_END = "baton: told to end"
"""What is said when SIGTERM came: the driver's node may not have had it."""
POLL_S = 0.5


def main() -> int:
    """Stay in the driver's Ray until standard input closes; 0 then, 1 when this node's part ends before."""
    for number in (signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: print(TOLD_TO_END, flush=True))
    nodes, name = JobNodes.read(), os.environ["SLURMD_NODENAME"]
    if nodes is None:
        raise SystemExit("this is no part of a job with several nodes: BATON_NODES is not set")
    try:
        address = own_address(name, nodes.address, nodes.interface)
        variables = socket_variables(nodes.interface or interface_of(address))
        folder = PrivateFolder(PREFIX, DEEPEST)
    except (NodesUnreachable, NoShortFolder) as error:
        print(error, flush=True)
        return 1
    watcher = reaper.start(folder.path)
    try:
        if not _wait_for_head(nodes):
            return 0
        return _stay(_join(nodes, name, address, folder, variables), folder)
    finally:
        reaper.stop(watcher)
        folder.remove()


def command(nodes: JobNodes, name: str, address: str, folder: Path) -> list[str]:
    """The command that starts Ray on this node."""
    gpus, resources = accelerators(nodes.device, nodes.ranks_per_node)
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-style=record"),
        f"--address={nodes.address}:{nodes.port}",
        f"--node-ip-address={address}",
        f"--node-name={name}",
        f"--num-cpus={usable_cpus()}",
        f"--num-gpus={gpus}",
        f"--resources={json.dumps(resources)}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        *("--min-worker-port=0", "--max-worker-port=0"),  # the kernel's choice
        f"--temp-dir={folder / 'ray'}",
    ]


def _wait_for_head(nodes: JobNodes) -> bool:
    """Until Ray's head listens; False when this process was let go before.

    However long: the driver first reads what it starts from. From then on it waits for this node, and says when that is too long.
    """
    while True:
        try:
            socket.create_connection((nodes.address, nodes.port), timeout=5).close()
            return True
        except OSError:
            if _let_go(POLL_S):
                return False


def _join(
    nodes: JobNodes, name: str, address: str, folder: PrivateFolder, variables: dict[str, str]
) -> subprocess.Popen:
    (folder.path / "logs").mkdir()
    inherited = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with signals_held():
        return subprocess.Popen(
            command(nodes, name, address, folder.path),
            env=inherited | folder.caches() | environment(nodes.token) | variables,
            stdin=subprocess.DEVNULL,
            stdout=(folder.path / "logs/start.txt").open("wb"),
            stderr=subprocess.STDOUT,
        )


def _stay(ray: subprocess.Popen, folder: PrivateFolder) -> int:
    while not _let_go(POLL_S):
        if ray.poll() is not None:
            said = (folder.path / "logs/start.txt").read_text(errors="replace").splitlines()
            errors = [line.partition(" -- ")[2] for line in said if " ERR " in line]
            told = takewhile(lambda line: "----- BEGIN" not in line, errors or said[-3:])
            reason = " ".join(line.strip() for line in told)
            print(f"Ray ended here with exit code {ray.returncode}: {reason}", flush=True)
            return 1
    ray.kill()
    return 0


def _let_go(seconds: float) -> bool:
    """Whether standard input has closed."""
    return bool(select.select([sys.stdin], [], [], seconds)[0]) and not os.read(sys.stdin.fileno(), 1024)


if __name__ == "__main__":
    sys.exit(main())
