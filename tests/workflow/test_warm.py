"""Stages that a server forks: in all respects the processes that they would be without it, and nobody's orphans."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import children, wait_until_gone
from tests.workflow.conftest import copy_project
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.lock import process_start
from workflow.campaign.plan import write_plan
from workflow.campaign.stage_server import VARIABLE, StageServer, start_stage_server
from workflow.manifest import read_manifest
from workflow.stages.runner import OWN_ERROR, PUBLISHED, REFUSED, STOPPED
from workflow.stages.warm import run_there

SECONDS = 240

# The reward of the campaign, by which the tests look into a stage and hold it: a stage imports it, planning does not.
PROBE = """\
import json, os, sys, threading, time
from pathlib import Path

def state():
    import torch, torch.distributed
    status = dict(line.split(":\\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\\t" in line)
    return {
        "folder": os.getcwd(), "group": os.getpgrp(), "session": os.getsid(0), "umask": status["Umask"],
        "environment": {k: v for k, v in os.environ.items() if k != "BATON_STAGE_SERVER"},
        "signals": {k: status[k].strip() for k in ("SigBlk", "SigIgn", "SigCgt")},
        "streams": [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)],
        "threads": int(status["Threads"]), "python threads": sorted(t.name for t in threading.enumerate()),
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()),
                  torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
                  torch.distributed.is_initialized(), torch.backends.mkldnn.enabled],
        "ray": "ray" in sys.modules and sys.modules["ray"].is_initialized(),
        "path": sys.path,
    }

import random, numpy, torch
draws = [random.getrandbits(64), int(numpy.random.randint(2**62)), torch.initial_seed()]
record = {"pid": os.getpid(), "draws": draws, "state": state()}
Path("probe.tmp").write_text(json.dumps(record))
Path("probe.tmp").rename("probe.json")
print("said by the stage")
while Path("hold").exists():
    time.sleep(0.02)

def score(response, problem):
    return float(len(response) % 2)
"""
CAMPAIGN = """\
name: probed
segments: 2
common:
  - model=micro-qwen3
  - data.train_size=32
  - data.heldout_size=8
  - sft.steps=2
  - sft.batch_size=4
  - sft.demonstrations=16
  - rollout.max_new_tokens=4
  - evaluate.problems=8
  - algorithm.steps=2
  - algorithm.prompts_per_step=4
  - algorithm.samples_per_prompt=2
  - algorithm.mini_batch_size=4
  - reward.kind=function
  - reward.function=probe:score
runs:
  ppo:
    - algorithm=ppo
"""
HEAD = """\
import time
from pathlib import Path
from workflow.campaign.stage_server import StageServer, VARIABLE
import os
server = StageServer(Path.cwd())
print(os.environ[VARIABLE], flush=True)
time.sleep(600)
"""


class Chain:
    """The planned stages of one run, and a way to run each of them."""

    def __init__(self, folder: Path) -> None:
        self.project = copy_project(folder)
        (folder / "configs" / "campaign" / "probed.yaml").write_text(CAMPAIGN)
        (folder / "probe.py").write_text(PROBE)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder)  # where planning reads the reward
            self.plan, _ = plan_campaign(read_options({"campaign": "probed", "site": "local"}), folder)
        self.path = write_plan(self.plan, Path("results/probed"))
        stages = self.plan.runs["ppo"].stages
        self.specs = {name: self.plan.stages[stages[name]] for name in ("convert", "sft", "train")}
        self.specs["evaluate"] = self.plan.stages[stages["evaluate"][0]]  # of the SFT model

    def start(self, stage: str, *more: str, server: str | None = None, **options: object) -> subprocess.Popen:
        """A job of the workflow; on its own unless the socket of a server is given."""
        Path("probe.json").unlink(missing_ok=True)
        words = [stage, "--plan", str(self.path), "--id", self.specs[stage].name, *more]
        environment = self.project.environment | ({VARIABLE: server} if server else {})
        environment["PYTHONSAFEPATH"], environment["PYTHONPATH"] = "1", f"{self.project.folder}:."
        return subprocess.Popen([sys.executable, "-m", "workflow.stages", *words], env=environment, **options)

    def run(self, *words: str, **options: object) -> int:
        """A job from start to end: its exit code."""
        return self.start(*words, **options).wait(timeout=SECONDS)

    def probe(self, job: subprocess.Popen | None = None) -> dict:
        """What the stage says of itself, once it has come to its reward."""
        end = time.monotonic() + SECONDS
        while not Path("probe.json").exists():
            assert time.monotonic() < end
            assert job is None or job.poll() is None
            time.sleep(0.02)
        return json.loads(Path("probe.json").read_text())

    def ends(self, stage: str) -> list[str]:
        """How its starts ended."""
        lines = Path(self.specs[stage].folder, "attempts.jsonl").read_text().splitlines()
        return [entry["end"] for entry in map(json.loads, lines) if "end" in entry]

    def forget(self, stage: str) -> None:
        """Remove what it published."""
        shutil.rmtree(self.specs[stage].folder, ignore_errors=True)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    with contextlib.chdir(folder):
        yield Chain(folder)


@pytest.fixture(scope="module")
def server(chain):
    """The socket of a server that has converted and fine-tuned the model."""
    served = StageServer(chain.project.folder)
    path = os.environ.pop(VARIABLE)
    for stage in ("convert", "sft"):
        assert chain.run(stage, server=path) == PUBLISHED
    yield path
    started = children(served._process.pid)
    served.stop()
    assert served._process.poll() == 0
    assert wait_until_gone(started) == set()
    assert not Path(path).parent.exists()


@pytest.fixture
def held(chain):
    """The evaluation, held before it scores."""
    chain.forget("evaluate")
    Path("hold").touch()
    yield chain
    Path("hold").unlink(missing_ok=True)


def gone(pid: int, seconds: float = SECONDS) -> bool:
    end = time.monotonic() + seconds
    while process_start(pid) is not None and time.monotonic() < end:
        time.sleep(0.02)
    return process_start(pid) is None


def test_a_forked_stage_is_what_it_would_be_on_its_own_bit_for_bit(chain, server):
    stages = [("evaluate",), ("train", "--step", "1")]
    seen = {}
    for which in (server, None):
        for stage in {stage for stage, *_ in stages} | ({"convert", "sft"} if which is None else set()):
            chain.forget(stage)
        for stage in [("convert",), ("sft",)] if which is None else []:
            assert chain.run(*stage) == PUBLISHED
        probes = []
        for stage in stages:
            with Path("said.txt").open("w") as said:
                job = chain.start(*stage, server=which, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
                assert job.wait(timeout=SECONDS) == PUBLISHED, Path("said.txt").read_text()
            assert "said by the stage" in Path("said.txt").read_text()
            probe = chain.probe()
            assert (probe["pid"] == job.pid) == (which is None)
            probes.append(probe)
        manifests = [read_manifest(path) for path in sorted(Path("results/store").glob("**/manifest.json"))]
        seen[which] = probes, {m.id + str(m.step): (m.files, m.metrics.get("accuracy")) for m in manifests}
    assert seen[server][1] == seen[None][1]
    assert len(seen[None][1]) == 4
    for forked, alone in zip(seen[server][0], seen[None][0], strict=True):
        assert forked["state"] == alone["state"]
    draws = [probe["draws"] for probe in seen[server][0]]
    # No generator comes from the server, which would be the same one for all of its stages.
    assert len({word for words in draws for word in words}) == 3 * len(draws)


def test_exit_codes_come_through(chain, server):
    assert chain.run("evaluate", "--step", "7", server=server) == REFUSED
    assert chain.run("evaluate", "--nonsense", server=server, stderr=subprocess.DEVNULL) == 2
    chain.forget("evaluate")
    Path(chain.specs["evaluate"].folder, "result.json").mkdir(parents=True)
    assert chain.run("evaluate", server=server, stderr=subprocess.DEVNULL) == OWN_ERROR


def test_a_signal_reaches_the_stage(held, server):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        job = held.start("evaluate", server=server)
        held.probe(job)
        job.send_signal(number)
        assert job.wait(timeout=SECONDS) == STOPPED
    assert held.ends("evaluate") == ["stopped"] * 3


def test_a_killed_stage_is_reported_and_its_lock_taken_over(held, server):
    job = held.start("evaluate", server=server)
    pid = held.probe(job)["pid"]
    lock = json.loads(Path(held.specs["evaluate"].folder, "lock.json").read_text())
    assert (lock["pid"], lock["started"]) == (pid, process_start(pid))
    os.kill(pid, signal.SIGKILL)
    assert job.wait(timeout=SECONDS) == 128 + signal.SIGKILL
    Path("hold").unlink()
    assert held.run("evaluate", server=server) == PUBLISHED
    assert held.ends("evaluate") == ["killed", "published"]


def test_a_killed_client_takes_its_stage_along(held, server):
    job = held.start("evaluate", server=server)
    pid = held.probe(job)["pid"]
    assert pid != job.pid
    job.kill()
    assert gone(pid)
    Path("hold").unlink()
    assert held.run("evaluate", server=server) == PUBLISHED
    assert held.ends("evaluate") == ["killed", "published"]


@contextlib.contextmanager
def another_head(chain):
    """A process that has a server of its own; with the server's socket and process id."""
    environment = chain.project.environment
    head = subprocess.Popen([sys.executable, "-c", HEAD], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        path = head.stdout.readline().strip()
        [(pid, _)] = children(head.pid)
        yield head, path, pid
    finally:
        head.kill()
        head.wait()
        head.stdout.close()


def test_when_the_server_is_killed_its_client_runs_the_stage_anew(held, server):
    with another_head(held) as (_, path, pid):
        job = held.start("evaluate", server=path)
        stage = held.probe(job)["pid"]
        Path("probe.json").unlink()
        os.kill(pid, signal.SIGKILL)
        assert gone(stage)
        assert held.probe(job)["pid"] == job.pid
        Path("hold").unlink()
        assert job.wait(timeout=SECONDS) == PUBLISHED
        assert held.ends("evaluate") == ["killed", "published"]
        held.forget("evaluate")
        job = held.start("evaluate", server=path)
        assert job.wait(timeout=SECONDS) == PUBLISHED
        assert held.probe()["pid"] == job.pid


def test_when_the_head_is_killed_its_stage_goes_on_and_the_server_leaves_after_it(held, server):
    with another_head(held) as (head, path, pid):
        job = held.start("evaluate", server=path)
        held.probe(job)
        head.kill()
        head.wait()
        time.sleep(0.5)
        assert process_start(pid) is not None
        Path("hold").unlink()
        assert job.wait(timeout=SECONDS) == PUBLISHED
        assert held.ends("evaluate") == ["published"]
        assert gone(pid)


@pytest.mark.parametrize("elsewhere", ["folder", "process group", "nobody"])
def test_a_stage_that_the_server_was_not_made_for_starts_on_its_own(held, server, tmp_path, elsewhere):
    Path("hold").unlink()
    options = {"server": str(tmp_path / "nobody") if elsewhere == "nobody" else server}
    if elsewhere == "process group":
        options["process_group"] = 0
    if elsewhere == "folder":
        for name in ("results", "configs", "probe.py"):
            (tmp_path / name).symlink_to(Path(name).resolve())
        options["cwd"] = tmp_path
    job = held.start("evaluate", **options)
    assert job.wait(timeout=SECONDS) == PUBLISHED
    written = tmp_path / "probe.json" if elsewhere == "folder" else Path("probe.json")
    assert json.loads(written.read_text())["pid"] == job.pid


def test_a_server_without_a_client_imports_nothing(chain):
    served = StageServer(chain.project.folder)
    os.environ.pop(VARIABLE)
    time.sleep(0.5)
    assert "torch" not in Path(f"/proc/{served._process.pid}/maps").read_text()
    served.stop()
    assert served._process.poll() == 0


def test_who_sets_the_variable_to_nothing_gets_no_server(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "")
    assert start_stage_server(tmp_path) is None
    assert run_there(["evaluate"]) is None
