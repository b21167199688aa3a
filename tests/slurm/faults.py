"""What else can happen to a campaign on a cluster: to its jobs, its nodes and SLURM's daemons."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.accounting import job_problems, job_starts, note_questions, queued_jobs, was_asked
from tests.slurm.minicluster import MiniCluster
from tests.slurm.relay import HERE, ROOT
from workflow.campaign.plan import Plan
from workflow.drill.campaign import Campaign, until
from workflow.drill.faults import Fault, Hit, Signal, driver_processes, heads, launchers

PATIENCE = 120.0
OUTAGE = 4.0
"""Seconds for which a daemon is gone after somebody has asked it something."""
UNASKED = 30.0
"""Seconds after which it comes back though nobody has."""
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
        path = f"{note_questions(self.questions)}{os.pathsep}{os.environ['PATH']}"
        variables = {"PATH": path, "PYTHONPATH": str(ROOT), "RELAY_PAUSE": "1"}
        self.environment = self.cluster.environment | variables
        shutil.copy(HERE / "slow_reward.py", self.folder)
        super().start()

    @property
    def questions(self) -> Path:
        """Where it is noted what SLURM was asked."""
        return self.folder.with_name(f"{self.folder.name}.questions")

    def further_problems(self, plan: Plan) -> Iterator[str]:
        """Jobs that were too many. The last ones may still be leaving, and accounting lags behind."""

        def found() -> list[str]:
            starts, queued = job_starts(self.cluster, self.folder), queued_jobs(self.cluster, self.folder)
            return list(job_problems(self.folder, plan, starts, queued))

        until(lambda: not found(), PATIENCE)
        yield from found()


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
    commands: tuple[str, ...]
    """Which ask it."""
    client: tuple[str, ...]
    """A command that needs it."""

    def strike(self, campaign: Campaign, draw: random.Random, folder: Path | None) -> Hit | None:
        """Stop it, wait until the campaign has asked it something and has got no answer, start it."""
        self.cluster.stop_daemon(self.daemon)
        since = time.time()
        asked = until(lambda: was_asked(campaign.questions, self.commands, since), UNASKED)
        time.sleep(OUTAGE)
        gone = not self.cluster.alive(self.daemon)
        seconds = time.time() - since
        self.cluster.start_daemon(self.daemon)
        told = f"gone for {seconds:.0f} s" + ("" if asked else ", and nobody asked")
        return Hit(self.daemon, lambda: (self._back() and gone and asked, told))

    def _back(self) -> bool:
        return until(lambda: self.cluster.run(*self.client, check=False), PATIENCE)


def cluster_faults(cluster: MiniCluster) -> list[Fault]:
    """All of them, and the processes of a job and of the head."""
    kill = signal.SIGKILL
    return [
        Cancelled("scancel", cluster),
        NodeDown("node down", cluster),
        Preempted("preemption", cluster),
        Outage("sacct gone", cluster, "slurmdbd", ("sacct",), ("sacctmgr", "-n", "show", "cluster")),
        Outage("controller restart", cluster, "slurmctld", ("sbatch", "scontrol", "squeue"), ("sinfo", "-h")),
        Signal("SIGKILL of the driver", kill, driver_processes),
        Signal("SIGKILL of a launcher", kill, launchers),
        Signal("SIGKILL of the head", kill, heads),
    ]
