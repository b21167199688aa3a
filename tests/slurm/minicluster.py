"""A real SLURM on one Debian host, to be thrown away: ``python -m tests.slurm.minicluster install|start|stop|status|env``.

Partitions ``cuda`` and ``ascend`` with two nodes each, two ``gpu`` or ``npu`` a node, and the preemptible twins ``cuda-low`` and
``ascend-low``. Needs root; needs neither systemd nor cgroups, and changes nothing under /etc: all of the cluster lives in one folder,
and clients find it by ``SLURM_CONF`` (``eval "$(python -m tests.slurm.minicluster env)"``).

What differs from a real cluster: accelerators are copies of /dev/null; nodes claim more CPUs and memory than the host has; without
cgroups SLURM looks only now and then at how much memory a job has, and a process that leaves its parent can outlive its job (``stop``
finds those by their environment).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.configuration import NAME, nodes, write_configuration
from workflow.campaign.lock import process_start

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
ACCOUNTING_PACKAGES = ("slurmdbd", "mariadb-server-core", "mariadb-client-core")


class ClusterFailed(RuntimeError):
    """The cluster did not come up; the message names the daemon and its log."""


@dataclass(frozen=True)
class MiniCluster:
    """One cluster; every process and file of it belongs to ``folder``."""

    folder: Path = Path("/tmp/baton-mini")
    accounting: bool = True
    """With slurmdbd, so that sacct answers."""
    port: int = 16800
    """The first of about 20 TCP ports on the loopback interface."""

    @property
    def conf(self) -> Path:
        """slurm.conf: all that a client needs to know."""
        return self.folder / "etc/slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which sbatch and its like talk to this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        """Bring everything up, on an empty state.

        Raises:
            ClusterFailed: not here (:func:`unavailable`), already running, or a daemon did not answer; nothing is left running then.
        """
        if reason := unavailable():
            raise ClusterFailed(reason)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._only_one():
            if any(self.alive(name) for name in self._recorded()):
                raise ClusterFailed(f"a cluster is running in {self.folder}; stop it first")
            for part in ("db", "state", "spool", "run", "munge", "log", "dev", "etc"):
                shutil.rmtree(self.folder / part, ignore_errors=True)
                (self.folder / part).mkdir()
            (self.folder / "pids.json").unlink(missing_ok=True)
            write_configuration(self.folder, self.port, self.accounting)
            try:
                self._bring_up()
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End jobs, what they left behind, and our daemons: those, and no process that we did not start."""
        if self.alive("slurmctld"):
            self._end_jobs()
        end_processes(self._left_behind())
        for group in (self._slurmds(), ["slurmctld"], ["slurmdbd"], ["mariadbd"], ["munged"]):
            end_processes(
                (pid, started) for name, (pid, started) in self._recorded().items() if name in group
            )
        (self.folder / "pids.json").unlink(missing_ok=True)

    def start_daemon(self, name: str) -> None:
        """Start one daemon (munged, slurmdbd, slurmctld, slurmd.cuda1, ...); returns before it answers."""
        with (self.folder / f"log/{name}.out").open("ab") as log:
            process = subprocess.Popen(
                self._commands()[name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | self.environment,
            )
        pids = self._recorded() | {name: (process.pid, process_start(process.pid) or "")}
        (self.folder / "pids.json").write_text(json.dumps(pids))

    def stop_daemon(self, name: str) -> None:
        """End one daemon."""
        end_processes([self._recorded()[name]])

    def signal_daemon(self, name: str, number: signal.Signals) -> None:
        """Send one daemon a signal: SIGSTOP makes it busy until SIGCONT."""
        os.kill(self._recorded()[name][0], number)

    def alive(self, name: str) -> bool:
        """Whether a daemon of ours runs."""
        pid, started = self._recorded().get(name, (0, ""))
        return pid != 0 and process_start(pid) == started

    def daemons(self) -> list[str]:
        """All of them, in the order in which they start."""
        return list(self._commands())

    def run(self, *command: str, timeout: float = 60.0, check: bool = True) -> str:
        """A client's output."""
        environment = os.environ | self.environment
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=check, env=environment
        ).stdout

    def wait_until_idle(self, seconds: float = 120.0) -> None:
        """Until every node is idle."""
        self.wait("the nodes", lambda: set(self.run("sinfo", "-hNo", "%T").split()) == {"idle"}, seconds)

    def wait(self, what: str, answered: Callable[[], object], seconds: float = 120.0) -> None:
        """Poll; a daemon that died ends the wait at once."""
        end = time.monotonic() + seconds
        while True:
            with suppress(OSError, subprocess.SubprocessError):
                if answered():
                    return
            for name in self._recorded():
                if not self.alive(name):
                    log = self.folder / f"log/{name}.out"
                    raise ClusterFailed(f"{name} died; {log} ends: {log.read_text(errors='replace')[-500:]}")
            if time.monotonic() > end:
                raise ClusterFailed(f"{what}: no answer after {seconds:.0f} s; see {self.folder}/log")
            time.sleep(0.1)

    def _commands(self) -> dict[str, list[str]]:
        """Daemon -> its command line, each in the foreground."""
        munge, run, log = self.folder / "munge", self.folder / "run", self.folder / "log"
        commands = {
            "munged": [
                *("munged", "--foreground", "--num-threads=4", f"--key-file={munge}/munge.key"),
                *(f"--socket={munge}/munge.sock", f"--pid-file={munge}/munged.pid"),
                *(f"--log-file={log}/munged.log", f"--seed-file={munge}/munged.seed"),
            ]
        }
        if self.accounting:
            commands["mariadbd"] = [
                *("mariadbd", "--no-defaults", "--user=root", f"--datadir={self.folder}/db"),
                *(f"--socket={run}/mysql.sock", f"--pid-file={run}/mysql.pid", f"--port={self.port + 2}"),
                *(
                    "--bind-address=127.0.0.1",
                    "--skip-name-resolve",
                    f"--init-file={self.folder}/etc/init.sql",
                    f"--tmpdir={run}",
                ),
                *("--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"),
                *("--innodb-flush-log-at-trx-commit=0", "--skip-log-bin"),
            ]
            commands["slurmdbd"] = ["slurmdbd", "-D"]
        commands["slurmctld"] = ["slurmctld", "-D"]
        # A UTS and a mount namespace give each node its own hostname and hosts file, and its jobs inherit them.
        hosts = f"{self.folder}/etc/hosts"
        inside = 'hostname "$1" && mount --bind "$2" /etc/hosts && exec slurmd -D -N "$1"'
        unshare = ("unshare", "--uts", "--mount", "--propagation", "private", "bash", "-c", inside, "_")
        return commands | {f"slurmd.{node}": [*unshare, node, hosts] for node in nodes()}

    def _slurmds(self) -> list[str]:
        return [f"slurmd.{node}" for node in nodes()]

    def _bring_up(self) -> None:
        self.start_daemon("munged")
        if self.accounting:
            self._make_database()
            self.start_daemon("mariadbd")
            self.wait(
                "mariadbd",
                lambda: socket.create_connection(("127.0.0.1", self.port + 2), 1).close() is None,
            )
        self.wait("munged", lambda: self.run("munge", "-S", f"{self.folder}/munge/munge.sock", "-n"))
        if self.accounting:
            self.start_daemon("slurmdbd")
            self.wait("slurmdbd", lambda: self.run("sacctmgr", "-n", "show", "cluster") is not None)
            self.run("sacctmgr", "-i", "add", "cluster", NAME, check=False)
        self.start_daemon("slurmctld")
        self.wait("slurmctld", lambda: self.run("scontrol", "ping"))
        for name in self._slurmds():
            self.start_daemon(name)
        self.wait_until_idle()

    def _make_database(self) -> None:
        command = [
            *(
                "mariadb-install-db",
                "--no-defaults",
                "--user=root",
                f"--datadir={self.folder}/db",
                "--skip-test-db",
            ),
            *("--skip-name-resolve", "--auth-root-authentication-method=socket"),
            f"--tmpdir={self.folder}/run",  # in /tmp it stumbles over the files of another one
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ClusterFailed(f"mariadb-install-db: {done.stderr.strip() or done.stdout.strip()}")

    def _end_jobs(self) -> None:
        """First the jobs, so that no process of theirs is left that nobody knows."""
        with suppress(subprocess.SubprocessError):
            jobs = self.run("squeue", "-ho", "%A", timeout=10).split()
            if jobs:
                self.run("scancel", "--full", "--signal=KILL", *jobs, timeout=10, check=False)
                self.run("scancel", *jobs, timeout=10, check=False)
            end = time.monotonic() + 20
            while self.run("squeue", "-ho", "%A", timeout=10).strip() and time.monotonic() < end:
                time.sleep(0.2)

    def _left_behind(self) -> Iterator[tuple[int, str]]:
        """Processes that a job of this cluster started and that SLURM lost sight of. Not ourselves, should we run in a job."""
        mine = f"SLURM_CONF={self.conf}".encode()
        if "SLURM_JOB_ID" in os.environ:
            return
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if mine in variables and any(v.startswith(b"SLURM_JOB_ID=") for v in variables):
                    yield int(entry.name), process_start(int(entry.name)) or ""

    def _recorded(self) -> dict[str, tuple[int, str]]:
        """Daemon -> pid and start time, by which a later process of the same number is told apart."""
        try:
            return {
                name: (pid, started)
                for name, (pid, started) in json.loads((self.folder / "pids.json").read_text()).items()
            }
        except FileNotFoundError:
            return {}

    @contextmanager
    def _only_one(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ClusterFailed(f"another start is under way in {self.folder}") from None
            yield


def end_processes(processes: Iterable[tuple[int, str]], grace: float = 10.0) -> None:
    """TERM to all of them, KILL to those that are still there after the grace. A process is a pid and its start time."""
    left = [process for process in processes if process_start(process[0]) == process[1]]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, _ in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + grace
        while left and time.monotonic() < end:
            left = [process for process in left if process_start(process[0]) == process[1]]
            time.sleep(0.05)


def unavailable() -> str | None:
    """Why a test cluster cannot run on this host; None where it can."""
    if os.geteuid() != 0:
        return "the test cluster needs root: its daemons, its nodes' hostnames and device files"
    if shutil.which("apt-get") is None:
        return "the test cluster is made of Debian's packages, and this host has no apt-get"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode:
        return "the test cluster gives each node a hostname, and root may not do that here (a container needs CAP_SYS_ADMIN)"
    return None


def free_ports(count: int = 20) -> int:
    """The first of so many consecutive ports that nobody uses now, below those that the kernel gives to clients."""
    while True:
        first = random.randrange(10000, 32000 - count)
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def install(accounting: bool = True) -> None:
    """The Debian packages, those that are missing. Their services are not started.

    Raises:
        ClusterFailed: no cluster can run here, or the packages are not to be had.
    """
    if reason := unavailable():
        raise ClusterFailed(reason)
    wanted = PACKAGES + (ACCOUNTING_PACKAGES if accounting else ())
    query = ["dpkg-query", "-Wf", "${db:Status-Abbrev}${Package}\n", *wanted]
    there = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")
    missing = [name for name in wanted if f"ii {name}" not in there]
    if missing:
        print(f"== Debian packages of the test cluster: {' '.join(missing)}", flush=True)
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
            done = subprocess.run(
                ["apt-get", "-qq", *command], env=environment, capture_output=True, text=True
            )
            if done.returncode:
                raise ClusterFailed(
                    f"apt-get {' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}"
                )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.slurm.minicluster", description=__doc__.partition(":")[0]
    )
    parser.add_argument("command", choices=("install", "start", "stop", "status", "env"))
    parser.add_argument("--folder", type=Path, default=MiniCluster.folder)
    parser.add_argument("--port", type=int, default=MiniCluster.port, help="first of about 20 ports")
    parser.add_argument("--no-accounting", action="store_true", help="without slurmdbd: sacct fails")
    options = parser.parse_args()
    cluster = MiniCluster(options.folder.absolute(), not options.no_accounting, options.port)
    try:
        if options.command == "install":
            install(cluster.accounting)
        elif options.command == "env":
            print("\n".join(f"export {name}={value}" for name, value in cluster.environment.items()))
        elif options.command == "status":
            return _print_status(cluster)
        else:
            getattr(cluster, options.command)()
    except ClusterFailed as error:
        print(f"test cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _print_status(cluster: MiniCluster) -> int:
    states = {name: cluster.alive(name) for name in cluster._recorded()}
    for name, alive in states.items():
        print(f"{name:20} {'up' if alive else 'gone'}")
    if not states:
        print(f"no cluster in {cluster.folder}")
        return 1
    print(cluster.run("sinfo", "-o", "%P %D %T %G %N", check=False), end="")
    return 0 if all(states.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
