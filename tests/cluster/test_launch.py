"""The launcher on one node, without SLURM: what a person stopped, and the folder of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workflow.campaign.code import source_root
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.site import load_site
from workflow.campaign.triggers import STOP, Triggers
from workflow.cluster.executor import StageJobs
from workflow.cluster.jobs import EndRecord, JobFolder
from workflow.cluster.launcher import Task
from workflow.cluster.stage_job import StageCommand
from workflow.cluster.states import UNKNOWN, FailureClass, JobState, classify

ROOT = source_root()


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = read_options({"campaign": "drill", "site": "mini"})
    plan, _ = plan_campaign(options, ROOT)
    return plan.stages[plan.runs["grpo"].stages["train"]]


@pytest.fixture
def launch(tmp_path, spec):
    """Runs the launcher as in a job of one node, with other arguments of the interpreter and another scratch."""
    folder = JobFolder(tmp_path / "results", spec.stage, spec.id, 2)

    def launch_stage(code: str, scratch: str = "/tmp", **variables: str) -> EndRecord:
        offered = load_site("mini", ROOT / "configs").devices["npu"]
        task = Task(
            stage="train",
            name=spec.name,
            step=2,
            folder=str(tmp_path),
            registry=str(folder.path),
            arguments=["-c", code],
            variables={},
            nodes=1,
            ranks_per_node=1,
            device="cpu",
            site_key="site.devices.npu",
            offered=offered.model_copy(update={"scratch": scratch}),
            manifest=spec.manifest(2),
            attempts=f"{spec.folder}/attempts.jsonl",
            time_seconds=600,
            warning_seconds=60,
            requeue=True,
        )
        command = "import sys; from workflow.cluster import launcher; launcher.launch(sys.argv[1])"
        command = command.replace(
            "; launcher.", "; launcher.ENDED_SECONDS = launcher.ASK_AGAIN_SECONDS = 0.1; launcher."
        )
        environment = os.environ | {"SLURM_JOB_ID": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        environment |= {"SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "2"}
        environment |= {"MINE": str(tmp_path), **variables}
        words = [sys.executable, "-c", command, json.dumps(task.model_dump(mode="json"))]
        done = subprocess.run(words, env=environment)
        end = folder.end("1")
        assert end.code == done.returncode
        return end

    return launch_stage


def test_the_launcher_passes_on_that_a_person_stopped_the_stage(launch):
    end = launch("raise SystemExit(76)")
    assert (end.outcome, end.code) == ("stopped by user", 76)
    assert classify(JobState(UNKNOWN), end) == classify(JobState("FAILED"), end) == FailureClass.STOPPED


TIMED_OUT = "slurm_requeue error: Socket timed out on send/recv operation"
REQUEUES = {
    "at once": ([""], "requeued"),
    "refused": (["Requested operation is presently disabled"], "requeue refused"),
    "a controller that answers late": ([TIMED_OUT, TIMED_OUT, ""], "requeued"),
    # The first request was worked off after all: no other job may be submitted for the stage.
    "a late answer to an earlier request": ([TIMED_OUT, "Job is pending execution for job 1"], "requeued"),
}


@pytest.mark.parametrize(("answers", "outcome"), REQUEUES.values(), ids=REQUEUES)
def test_a_job_is_requeued_also_by_a_controller_that_is_slow_to_answer(launch, tmp_path, answers, outcome):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    for number, answer in enumerate(answers):
        (tmp_path / f"answer{number}").write_text(answer)
    scontrol.write_text(f"""#!/bin/bash
[ "$*" = "requeue 1" ] || exit 1
number=$(ls {tmp_path} | grep -c asked)
touch {tmp_path}/asked$number
cat {tmp_path}/answer$number >&2
[ ! -s {tmp_path}/answer$number ]
""")
    scontrol.chmod(0o755)
    code = "import signal, time; signal.signal(signal.SIGUSR2, lambda *_: exit(75)); time.sleep(60)"
    variables = {"PATH": f"{scontrol.parent}:/usr/bin:/bin", "SLURM_JOB_END_TIME": str(int(time.time()) + 63)}
    end = launch(code, **variables)
    assert (end.outcome, end.code) == (outcome, 75)
    assert len(list(tmp_path.glob("asked*"))) == len(answers)


def test_what_a_job_compiles_lies_below_scratch_and_goes_with_it(launch, tmp_path):
    (tmp_path / "scratch").mkdir()
    code = """
import os
from pathlib import Path
cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
cache.mkdir(parents=True)
Path("seen").write_text(os.environ["TMPDIR"] + " " + str(cache))
raise SystemExit(76)
"""
    assert launch(code, "$MINE/scratch").outcome == "stopped by user"
    temporary, cache = (tmp_path / "seen").read_text().split()
    assert temporary == str(tmp_path / "scratch")
    assert cache.startswith(f"{temporary}/baton-job-")
    assert not list((tmp_path / "scratch").iterdir())


def test_a_scratch_that_cannot_be_written_is_named(launch):
    end = launch("", "$MINE/none")
    assert (end.outcome, end.code) == ("refused", 64)
    assert end.message.startswith("site.devices.npu.scratch=$MINE/none: ")


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
