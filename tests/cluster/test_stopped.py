"""What a person stopped is neither requeued nor tried again, and no job is submitted for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workflow.campaign.code import source_root
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.site import load_site
from workflow.campaign.triggers import STOP, Triggers
from workflow.cluster.executor import StageCommand, StageJobs
from workflow.cluster.jobs import JobFolder
from workflow.cluster.launcher import Task
from workflow.cluster.states import UNKNOWN, FailureClass, JobState, classify

ROOT = source_root()


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = read_options({"campaign": "drill", "site": "mini"})
    plan, _ = plan_campaign(options, ROOT)
    return plan.stages[plan.runs["grpo"].stages["train"]]


def test_the_launcher_passes_on_that_a_person_stopped_the_stage(tmp_path, spec):
    folder = JobFolder(tmp_path / "results", spec.stage, spec.id, 2)
    task = Task(
        stage="train",
        name=spec.name,
        step=2,
        folder=str(tmp_path),
        registry=str(folder.path),
        arguments=["-c", "raise SystemExit(76)"],
        variables={},
        nodes=1,
        ranks_per_node=1,
        device="cpu",
        site_key="site.devices.npu",
        offered=load_site("mini", ROOT / "configs").devices["npu"],
        manifest=spec.manifest(2),
        attempts=f"{spec.folder}/attempts.jsonl",
        time_seconds=600,
        warning_seconds=60,
        requeue=True,
    )
    command = "import sys; from workflow.cluster.launcher import launch; launch(sys.argv[1])"
    environment = os.environ | {"SLURM_JOB_ID": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    environment |= {"SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", command, json.dumps(task.model_dump(mode="json"))], env=environment
    )
    assert done.returncode == 76
    end = folder.end("1")
    assert (end.outcome, end.code) == ("stopped by user", 76)
    assert classify(JobState(UNKNOWN), end) == classify(JobState("FAILED"), end) == FailureClass.STOPPED


def test_nothing_is_submitted_for_a_run_that_is_stopped(tmp_path, spec):
    triggers = Triggers((tmp_path / "results/drill/grpo",))
    triggers.folders[0].mkdir(parents=True)
    (triggers.folders[0] / STOP).touch()
    said: list[str] = []
    site = load_site("mini", ROOT / "configs")
    jobs = StageJobs(site, Path("results"), ROOT, said.append, lambda spec: triggers, None)
    job = jobs.start(spec, 2, StageCommand({}, ["-m", "workflow.stages", "train"]))
    jobs.poll()
    assert (job.outcome.kind, job.outcome.retry) == (FailureClass.STOPPED, False)
    assert f"to go on, rm {triggers.folders[0] / STOP} and run the same command" in job.outcome.message
    assert job.folder.read() is None
