"""What a drill on a cluster would say of jobs that are too many, and when an outage counts; without a cluster."""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.slurm.accounting import JobStart, job_problems, note_questions, read_job_starts, was_asked
from tests.slurm.faults import Outage
from tests.support.fake_campaign import fake_campaign
from workflow.campaign.plan import Plan, StageSpec, read_plan
from workflow.cluster.jobs import JobFolder, JobRecord
from workflow.cluster.placement import job_name


@pytest.fixture
def plan(tmp_path) -> Plan:
    return read_plan(fake_campaign(tmp_path, campaign="drill"))


@pytest.fixture
def train(plan) -> StageSpec:
    return plan.stages[plan.runs["grpo"].stages["train"]]


def name_of(train: StageSpec, unique: str) -> str:
    return f"{job_name('train', train.id, 2)}:{unique}"


def register(folder: Path, train: StageSpec, unique: str, **fields: object) -> None:
    """The registry's record of a job of the first segment."""
    record = JobRecord(
        stage="train", id=train.id, step=2, name=name_of(train, unique), asked=0.0, log="log", **fields
    )
    JobFolder(folder / "results", "train", train.id, 2).write(record)


def began_in(folder: Path, train: StageSpec, *jobs: str) -> None:
    lines = [{"segment": 2, "number": n, "job": job, "begun": 1.0 * n} for n, job in enumerate(jobs, 1)]
    (folder / train.folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_jobs_as_the_registry_counts_them_are_in_order(tmp_path, plan, train):
    register(tmp_path, train, "bb", job="8", attempt=2)
    began_in(tmp_path, train, "7", "8", "8")
    one, two = name_of(train, "aa"), name_of(train, "bb")
    found = [JobStart("7", one, 0.0, 9.0), JobStart("8", two, 9.0, 12.0), JobStart("8", two, 13.0, 20.0)]
    assert [*job_problems(tmp_path, plan, found, [])] == []


def test_a_job_whose_id_its_head_did_not_live_to_write_down_counts(tmp_path, plan, train):
    register(tmp_path, train, "aa")
    assert [*job_problems(tmp_path, plan, [], [])] == []  # SLURM was not reached
    assert [*job_problems(tmp_path, plan, [JobStart("7", name_of(train, "aa"), 0.0, 9.0)], [])] == []


def test_a_second_job_for_a_stage_is_found_though_it_did_nothing(tmp_path, plan, train):
    register(tmp_path, train, "bb", job="8")
    began_in(tmp_path, train, "8")
    one, two = JobStart("7", name_of(train, "aa"), 30.0, 31.0), JobStart("8", name_of(train, "bb"), 0.0, 9.0)
    (problem,) = job_problems(tmp_path, plan, [one, two], [])
    assert problem.endswith("SLURM had the jobs ['7', '8'], its registry counts 1")
    (problem,) = job_problems(tmp_path, plan, [two, JobStart("9", two.name, 30.0, 31.0)], [])
    assert problem.endswith("SLURM had the jobs ['8', '9'], its registry counts 1")


def test_jobs_that_run_together_are_left_or_are_nobodys_are_found(tmp_path, plan, train):
    register(tmp_path, train, "bb", job="8", attempt=2)
    one, two = name_of(train, "aa"), name_of(train, "bb")
    for ended in (9.0, None):
        (problem,) = job_problems(
            tmp_path, plan, [JobStart("7", one, 0.0, ended), JobStart("8", two, 8.0, 12.0)], []
        )
        assert "job 8 began before job 7 had ended" in problem
    found = [JobStart("7", one, 0.0, 8.0), JobStart("8", two, 8.0, 12.0)]
    assert [*job_problems(tmp_path, plan, found, ["8"])] == ["job 8 is left"]
    other = JobStart("9", "baton:train:elsewhere:cc", 0.0, 1.0)
    assert [*job_problems(tmp_path, plan, [*found, other], [])] == [
        "job 9 (baton:train:elsewhere:cc) is of no stage"
    ]
    began_in(tmp_path, train, "6")
    (problem,) = job_problems(tmp_path, plan, found, [])
    assert "it started in the jobs ['6'], which are not its own" in problem
    began_in(tmp_path, train, "7")
    named, _ = job_problems(tmp_path, plan, found[:1], [])
    assert named.endswith("its registry names job 8, SLURM had ['7']")


def test_accounting_is_read_of_one_folder_with_the_words_that_stand_for_no_time(tmp_path):
    text = (
        f"7|baton:train:a:aa|2026-11-30T13:00:00|2026-11-30T13:00:09|{tmp_path}\n"
        f"8|baton:train:a:bb|None|2026-11-30T13:00:09|{tmp_path}\n"
        f"8|baton:train:a:bb|2026-11-30T13:00:10|Unknown|{tmp_path}\n"
        "9|wrap|2026-11-30T13:00:10|Unknown|/elsewhere\n"
    )
    found = read_job_starts(text, tmp_path)
    assert [(one.job, one.begun is None, one.ended is None) for one in found] == [
        ("7", False, False),
        ("8", True, False),
        ("8", False, True),
    ]
    assert found[0].ended - found[0].begun == 9


@pytest.fixture
def commands(tmp_path, monkeypatch) -> Path:
    """SLURM's commands, which only say what they were told."""
    real = tmp_path / "real"
    real.mkdir()
    for name in ("sacct", "squeue"):
        (real / name).write_text('#!/bin/sh\necho "$0 $@"\nexit 3\n')
        (real / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{real}{os.pathsep}{os.environ['PATH']}")
    return note_questions(tmp_path / "questions")


def test_a_command_is_noted_and_does_what_it_does(tmp_path, commands):
    since = time.time()
    assert not was_asked(commands, ["squeue"], since)
    done = subprocess.run([commands / "squeue", "-j", "1 2"], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (f"{tmp_path}/real/squeue -j 1 2\n", 3)
    assert was_asked(commands, ["squeue"], since)
    assert not was_asked(commands, ["sacct"], since)
    assert not was_asked(commands, ["squeue"], time.time())
    assert not was_asked(commands, ["squeue"], 0.0, since)


class Daemons:
    """A cluster whose daemon stops and starts; a little after it has stopped, somebody calls a command."""

    def __init__(self, then: Path | None) -> None:
        self.up, self.then = True, then

    def stop_daemon(self, name: str) -> None:
        self.up = False
        if self.then:
            threading.Timer(0.1, subprocess.run, [self.then], {"capture_output": True}).start()

    def start_daemon(self, name: str) -> None:
        self.up = True

    def alive(self, name: str) -> bool:
        return self.up

    def run(self, *command: str, check: bool) -> str:
        return "up"


@pytest.mark.parametrize("asked", ["sacct", "squeue", None])
def test_an_outage_counts_when_the_daemon_was_asked_meanwhile(tmp_path, commands, monkeypatch, asked):
    monkeypatch.setattr("tests.slurm.faults.OUTAGE", 0.0)
    monkeypatch.setattr("tests.slurm.faults.UNASKED", 3.0 if asked == "sacct" else 0.5)
    subprocess.run([commands / "sacct"], capture_output=True)  # before
    cluster = Daemons(commands / asked if asked else None)

    class Asking:
        questions = commands

    hit = Outage("sacct gone", cluster, "slurmdbd", ("sacct",), ("sacctmgr",)).strike(
        Asking(), random.Random(0), None
    )
    counted, told = hit.effect()
    assert counted == (asked == "sacct")
    assert told.endswith("nobody asked") == (not counted)
    assert cluster.up
