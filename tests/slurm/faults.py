"""What else can happen to a campaign on a cluster: to its jobs, its nodes and SLURM's daemons."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.minicluster import MiniCluster
from tests.slurm.relay import HERE, ROOT
from workflow.drill.campaign import Campaign, until
from workflow.drill.faults import Fault, Hit, Signal, driver_processes, heads, launchers

PATIENCE = 120.0
OUTAGE = 4.0
"""Seconds for which a daemon is gone."""
GOING = ("RUNNING", "COMPLETING")
ENDED = ("CANCELLED", "NODE_FAIL", "PREEMPTED", "PENDING")
"""What SLURM says of a job that something has happened to; pending: it is to start again."""


@dataclass
class ClusterCampaign(Campaign):
    """``snakemake --profile slurm`` on the test cluster."""

    cluster: MiniCluster | None = None
    disk: bool = False

    def start(self) -> None:
        """With the reward that takes its time beside it."""
        self.profile = "profiles/slurm"
        self.environment = self.cluster.environment | {"PYTHONPATH": str(ROOT), "RELAY_PAUSE": "1"}
        shutil.copy(HERE / "slow_reward.py", self.folder)
        super().start()


@dataclass(frozen=True)
class JobFault(Fault):
    """Something that one running job is hit by."""

    cluster: MiniCluster

    def strike(self, campaign: Campaign, draw: random.Random, folder: Path | None) -> Hit | None:
        """Hit one of the campaign's running jobs."""
        records = [json.loads(path.read_text()) for path in campaign.folder.glob("results/.jobs/*/job.json")]
        running = [
            job for job in (record["job"] for record in records) if job and self.state(job) == "RUNNING"
        ]
        if not running:
            return None
        job = draw.choice(sorted(running))
        node = self.query(job, "%N")
        restarts = self.restarts(job)
        self.hit(job, node)
        return Hit(f"job {job} on {node}", lambda: self.effect(job, node, restarts))

    def hit(self, job: str, node: str) -> None:
        """Do it."""
        raise NotImplementedError

    def effect(self, job: str, node: str, restarts: int) -> tuple[bool, str]:
        """It does not come to its end in this start: SLURM has ended it, or wants to start it again."""
        until(lambda: self.restarts(job) > restarts or self.state(job) not in GOING, PATIENCE)
        again, state = self.restarts(job) > restarts, self.state(job)
        return again or state in ENDED, "the job starts again" if again else f"the job is {state or 'gone'}"

    def query(self, job: str, field: str) -> str:
        """What squeue says of a job."""
        return self.cluster.run("squeue", "--states=all", "-h", "-j", job, "-o", field, check=False).strip()

    def state(self, job: str) -> str:
        """Such as RUNNING."""
        return self.query(job, "%T")

    def restarts(self, job: str) -> int:
        """How often it was requeued."""
        told = self.cluster.run("scontrol", "show", "job", job, check=False).partition("Restarts=")[2]
        return int(told.split(None, 1)[0]) if told else 0


class Cancelled(JobFault):
    """A person cancels it."""

    def hit(self, job: str, node: str) -> None:
        """scancel."""
        self.cluster.run("scancel", job)


class NodeDown(JobFault):
    """SLURM gives its node up, and gets it back."""

    def hit(self, job: str, node: str) -> None:
        """scontrol update State=DOWN."""
        self.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=drill")

    def effect(self, job: str, node: str, restarts: int) -> tuple[bool, str]:
        """The node comes back when the job is off it."""
        found = super().effect(job, node, restarts)
        # Refused where SLURM took it back by itself.
        self.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        return found


class Preempted(JobFault):
    """Another job, which comes first, wants all nodes of its partition."""

    def hit(self, job: str, node: str) -> None:
        """sbatch."""
        partition = node.rstrip("0123456789")
        options = (
            "-p",
            partition,
            "-N2",
            "--exclusive",
            "--mem=0",
            "-t1",
            "-o",
            "/dev/null",
            "--wrap",
            "sleep 3",
        )
        self.cluster.run("sbatch", *options)


@dataclass(frozen=True)
class Outage(Fault):
    """A daemon is gone for some seconds."""

    cluster: MiniCluster
    daemon: str
    client: tuple[str, ...]
    """A command that needs it."""

    def strike(self, campaign: Campaign, draw: random.Random, folder: Path | None) -> Hit | None:
        """Stop it, wait, start it."""
        self.cluster.stop_daemon(self.daemon)
        time.sleep(OUTAGE)
        gone = not self.cluster.alive(self.daemon)
        self.cluster.start_daemon(self.daemon)
        return Hit(self.daemon, lambda: (gone and self._back(), f"gone for {OUTAGE:.0f} s"))

    def _back(self) -> bool:
        return until(lambda: self.cluster.run(*self.client, check=False), PATIENCE)


def cluster_faults(cluster: MiniCluster) -> list[Fault]:
    """All of them, and the processes of a job and of the head."""
    kill = signal.SIGKILL
    return [
        Cancelled("scancel", cluster),
        NodeDown("node down", cluster),
        Preempted("preemption", cluster),
        Outage("sacct gone", cluster, "slurmdbd", ("sacctmgr", "-n", "show", "cluster")),
        Outage("controller restart", cluster, "slurmctld", ("sinfo", "-h")),
        Signal("SIGKILL of the driver", kill, driver_processes),
        Signal("SIGKILL of a launcher", kill, launchers),
        Signal("SIGKILL of the head", kill, heads),
    ]
