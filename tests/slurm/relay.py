"""A results folder of its own, heads that run in it, and what they left behind: for tests that disturb a campaign."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.slurm.minicluster import MiniCluster
from workflow.campaign.plan import StageSpec, read_plan
from workflow.cluster.jobs import JobFolder, JobRecord
from workflow.manifest import read_manifest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PATIENCE = 300.0
"""Seconds for what takes one or two jobs, on a busy machine."""
SOURCE = ("Snakefile", "profiles", "configs", "env", "engines", "workflow", "snakemake_executor_plugin_baton")
"""What a head reads and its jobs run."""


@dataclass
class Head:
    """A running ``snakemake --profile slurm``."""

    process: subprocess.Popen
    log: Path

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        return self.process.wait(seconds)

    def kill(self) -> None:
        """SIGKILL: it has no time for anything."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def send(self, number: signal.Signals) -> None:
        """A signal, to the head alone."""
        self.process.send_signal(number)

    def said(self) -> str:
        """All its output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")


@dataclass
class Relay:
    """The campaign relay in a folder of its own."""

    folder: Path
    cluster: MiniCluster
    source: Path = ROOT
    campaign: Path = HERE / "relay.yaml"
    heads: list[Head] = field(default_factory=list)

    @classmethod
    def create(cls, folder: Path, cluster: MiniCluster) -> Relay:
        """An empty folder."""
        folder.mkdir(parents=True)
        (folder / "slurm").symlink_to(ROOT / "profiles/slurm")
        shutil.copy(HERE / "slow_reward.py", folder)
        return cls(folder, cluster)

    def half(self, folder: Path) -> Relay:
        """A new folder that has everything up to the first segment; the second is still to be run there."""
        new = Relay.create(folder, self.cluster)
        new.train = self.train
        second = self.train.name + "/step000006"
        for stage in ("convert", "sft", "train"):
            for path in (self.folder / "results/store" / stage).rglob("*"):
                if path.is_file() and second not in str(path) and "000006" not in path.name:
                    copy = new.folder / path.relative_to(self.folder)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, copy)
        attempts = new.folder / self.train.folder / "attempts.jsonl"
        lines = [line for line in attempts.read_text().splitlines(True) if json.loads(line)["segment"] == 3]
        attempts.write_text("".join(lines))
        metrics = new.folder / self.train.folder / "metrics.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(True)[:3]))
        return new

    def half_for(self, test: str) -> Iterator[Relay]:
        """What a test gets: a folder of that kind, in which training waits after one step; nothing goes on there afterwards."""
        new = self.half(self.folder.parent / test)
        new.hold()
        yield new
        new.end()

    def copy_source(self) -> None:
        """From now on heads run a copy of the source and of the campaign's file, which may be edited."""
        self.source = self.folder / "source"
        self.source.mkdir()
        for name in SOURCE:
            path = ROOT / name
            if path.is_dir():
                shutil.copytree(path, self.source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, self.source / name)
        self.campaign = Path(shutil.copy(self.campaign, self.folder))

    def hold(self, steps: int = 4) -> None:
        """Training waits as soon as ``steps`` steps are done: in the next step, or, after the last one, when its process ends."""
        (self.folder / "hold").write_text(str(steps))

    def release(self) -> None:
        """Training goes on."""
        (self.folder / "hold").unlink()

    def start(self, *options: str, overrides: str = "", only_training: bool = True, **variables: str) -> Head:
        """A head of the whole campaign, or of all up to the training state at its end."""
        log = self.folder / f"head{len(list(self.folder.glob('head*.txt')))}.txt"
        command = [
            *(
                sys.executable,
                "-m",
                "snakemake",
                "--profile",
                "slurm",
                "--snakefile",
                str(self.source / "Snakefile"),
            ),
            *(["--until", "train"] if only_training else []),
            *options,
            *("--config", f"campaign={self.campaign}", *([f"set={overrides}"] if overrides else [])),
        ]
        environment = os.environ | self.cluster.environment | variables
        environment |= {"PYTHONPATH": str(self.source), "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        self.heads.append(Head(process, log))
        return self.heads[-1]

    def end(self) -> None:
        """Nothing of this folder goes on, whatever a test has left: no head, no job."""
        for head in self.heads:
            head.kill()
        rows = [line.split("|") for line in self.cluster.run("squeue", "-h", "-o", "%i|%o").splitlines()]
        if jobs := [id for id, command in rows if f"/{self.folder.name}/" in command]:
            self.cluster.run("scancel", *jobs, check=False)

    @cached_property
    def train(self) -> StageSpec:
        """The training stage, as planned."""
        path = next((self.folder / "results/relay").glob("plan-*.json"))
        return next(spec for spec in read_plan(path).stages.values() if spec.stage == "train")

    def job(self, head: Head, state: str) -> JobRecord:
        """The second segment's job, once SLURM says that it is in ``state``."""
        return self.until(head, f"a job that is {state}", lambda: self._job_in(state))

    def steps(self, head: Head, count: int) -> None:
        """Wait until ``count`` steps of the second segment are done."""
        self.until(head, f"{count} steps", lambda: self.steps_done() >= 3 + count)

    def steps_done(self) -> int:
        """Of the whole training, as its metrics say."""
        metrics = self.folder / self.train.folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def until(self, head: Head, what: str, answer: Callable[[], object]):
        """Wait for an answer that is true; the head must not end before."""
        end = time.monotonic() + PATIENCE
        while True:
            if found := answer():
                return found
            if head.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{what}: did not come; the head said:\n{head.said()}")
            time.sleep(0.1)

    def state(self, job: str) -> str:
        """SLURM's word for a job's state."""
        return self.cluster.run("squeue", "--states=all", "-h", "-j", job, "-o", "%T", check=False).strip()

    def ended(self, job: str) -> str:
        """SLURM's word for how a job ended, once it has."""
        end = time.monotonic() + PATIENCE
        while (state := self.state(job)) in ("RUNNING", "COMPLETING"):
            assert time.monotonic() < end, f"job {job} does not end: {self.job_log()}"
            time.sleep(0.1)
        return state

    def record(self) -> JobRecord | None:
        """What the registry has of the second segment."""
        return JobFolder(self.folder / "results", "train", self.train.id, 6).read()

    def published(self) -> bool:
        """Whether the second segment has its manifest."""
        return (self.folder / self.train.manifest(6)).exists()

    def job_log(self) -> str:
        """What the launchers of the second segment's jobs have said so far."""
        log = self.folder / self.train.folder / "job-step000006.txt"
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    def starts(self) -> list[dict]:
        """The starts of the second segment: job, restart, first and last step, end."""
        merged: dict[int, dict] = {}
        for line in (self.folder / self.train.folder / "attempts.jsonl").read_text().splitlines():
            entry = json.loads(line)
            if entry["segment"] == 6:
                merged.setdefault(entry["number"], {}).update(entry)
        return list(merged.values())

    def jobs_submitted(self) -> set[str]:
        """Ids of all jobs that this folder's second segment ever had, as SLURM's controller remembers them."""
        text = self.cluster.run("squeue", "--states=all", "-h", "-o", "%i|%o|%j")
        ours = f"/{self.folder.name}/"
        rows = [line.split("|") for line in text.splitlines()]
        return {id for id, command, name in rows if ours in command and f"{self.train.id}-step000006" in name}

    def baton(self, *words: str, **variables: str) -> str:
        """What the command ``baton`` prints."""
        command = [sys.executable, "-P", "-m", "workflow.cli", *words]
        environment = os.environ | self.cluster.environment | {"PYTHONPATH": str(ROOT)} | variables
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        return done.stdout + done.stderr

    def weights(self) -> dict[str, str]:
        """Digest of every file of the final training state."""
        manifest = read_manifest(self.folder / self.train.manifest(6))
        return {name: record.sha256 for name, record in manifest.files.items()}

    def _job_in(self, state: str) -> JobRecord | None:
        record = self.record()
        return record if record is not None and record.job and self.state(record.job) == state else None
