"""A fault counts when what it hit did not come to its end, and not because something has died."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fake_campaign import fake_campaign
from tests.support.processes import fork
from workflow.campaign.lock import FolderLock
from workflow.campaign.plan import StageSpec, read_plan
from workflow.drill.campaign import Campaign, until
from workflow.drill.evidence import newest_start
from workflow.drill.faults import CorruptState, FullDisk, Signal, Victim, _launches, heads
from workflow.drill.processes import Driver, Process, drivers, process_of
from workflow.manifest import MANIFEST, TWIN, read_manifest, write_manifest
from workflow.stages.attempts import AttemptLog


@pytest.fixture
def train(tmp_path) -> StageSpec:
    """A training whose segment to step 4 is not published yet; its first start was killed."""
    plan = read_plan(fake_campaign(tmp_path, campaign="drill"))
    spec = plan.stages[plan.runs["grpo"].stages["train"]]
    (tmp_path / spec.manifest(4)).rename(tmp_path / "manifest to be")
    AttemptLog(tmp_path / spec.folder, 4, tmp_path / spec.log(4))
    return spec


def work(folder: Path, spec: StageSpec, *acts: str) -> None:
    """A driver with a rank. It does the first half of what it has to, up to ``wait``, and when its rank has died the rest."""
    os.chdir(folder)
    FolderLock(Path(spec.folder)).acquire()
    attempts = AttemptLog(Path(spec.folder), 4, Path(spec.log(4)))
    rank = os.fork()
    if rank == 0:
        time.sleep(60)
        os._exit(0)
    (folder / "rank").write_text(str(rank))
    for act in acts:
        if act == "wait":
            (folder / "waiting").touch()
            os.waitpid(rank, 0)
            time.sleep(0.3)  # nobody may think meanwhile that this was all
        elif act in (MANIFEST, TWIN):
            manifest = (folder / "manifest to be").read_text()
            Path(spec.output_folder(4), act).write_text(manifest)
        else:
            attempts.end(act)


@contextmanager
def at_work(folder: Path, spec: StageSpec, *acts: str):
    """Its driver, as a drill finds it."""
    renumber(folder / "manifest to be", 2)
    process = fork(work, folder, spec, *acts)
    try:
        assert until((folder / "waiting").exists, 20)
        (driver,) = drivers(folder)
        yield driver
    finally:
        for pid in (process.pid, int((folder / "rank").read_text())):
            if process_of(pid):
                os.kill(pid, signal.SIGKILL)
        process.join()


def renumber(path: Path, number: int) -> None:
    """Let a manifest be of another start."""
    manifest = read_manifest(path)
    attempts = [attempt.model_copy(update={"number": number}) for attempt in manifest.attempts]
    write_manifest(path, manifest.model_copy(update={"attempts": attempts}))


def struck(folder: Path, number: signal.Signals, victim: Victim) -> tuple[bool, str]:
    hit = Signal("signal", number, lambda campaign, stage: [victim]).strike(
        Campaign(folder, []), random.Random(0), None
    )
    return hit.effect()


@pytest.mark.parametrize(
    ("acts", "found"),
    [
        (["wait", "error"], (True, "its start ended: error")),
        (["wait"], (True, "its start ended: killed")),
        # Killed when its groups were shut down, after the last save: nobody needed it any more.
        (["wait", MANIFEST, "published"], (False, "its start ended: published")),
        (["error", "wait"], (False, "no start was at work")),
    ],
)
def test_a_rank_counts_when_its_start_fails_for_it(tmp_path, train, acts, found):
    with at_work(tmp_path, train, *acts) as driver:
        rank = process_of(int((tmp_path / "rank").read_text()))
        assert struck(tmp_path, signal.SIGKILL, Victim(rank, "rank", (driver,))) == found


@pytest.mark.parametrize(
    ("acts", "found"),
    [
        (["wait"], (True, "its start ended: killed")),
        # Between the two names of its manifest, and before it noted that it had published.
        ([TWIN, "wait"], (False, "no start was at work")),
        ([MANIFEST, "wait"], (False, "no start was at work")),
        ([MANIFEST, "published", "wait"], (False, "no start was at work")),
        (["published", "wait"], (False, "no start was at work")),
        (["stopped", "wait"], (False, "no start was at work")),
    ],
)
def test_a_driver_counts_when_it_dies_before_it_has_published(tmp_path, train, acts, found):
    with at_work(tmp_path, train, *acts) as driver:
        assert struck(tmp_path, signal.SIGKILL, Victim(driver.process, "driver", (driver,))) == found


def test_the_manifest_of_an_earlier_start_is_not_its_own(tmp_path, train):
    with at_work(tmp_path, train, MANIFEST, "wait") as driver:
        renumber(tmp_path / train.manifest(4), 1)
        assert struck(tmp_path, signal.SIGKILL, Victim(driver.process, "driver", (driver,)))[0]


def test_who_dies_of_a_request_to_stop_has_not_stopped(tmp_path, train):
    with at_work(tmp_path, train, "wait") as driver:  # it does not listen
        assert struck(tmp_path, signal.SIGTERM, Victim(driver.process, "driver", (driver,))) == (
            False,
            "its start ended: killed",
        )


def test_a_launcher_counts_with_the_start_it_launched(tmp_path, train):
    with at_work(tmp_path, train, "wait") as driver:
        idle = subprocess.Popen(["sleep", "60"])
        found = struck(tmp_path, signal.SIGKILL, Victim(process_of(idle.pid), "launcher"))
        idle.wait()
        assert found == (False, "no start was at work")
        words = f"python -m workflow.stages train --plan plan.json --id {driver.folder.name} --step 4"
        assert _launches(Process(1, "", words), Driver(driver.process, driver.folder))
        assert not _launches(process_of(driver.process.pid), Driver(process_of(os.getpid()), driver.folder))
        assert _launches(process_of(os.getpid()), driver)  # it has forked it


def test_the_start_that_began_last_is_the_one_at_work(tmp_path, train):
    start = newest_start(tmp_path / train.folder)
    assert (start.segment, start.number, start.end()) == (4, 1, None)
    with (tmp_path / train.folder / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"segment": 4, "number": 1, "end": "killed", "seconds": 1.0}) + "\n")
    assert start.end() is None  # not its own word
    assert newest_start(tmp_path) is None


class Head(Campaign):
    """A head that only waits, or ends by itself when it is asked to."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.words[0]]


def test_a_head_counts_when_it_ends_by_the_signal(tmp_path):
    campaign = Head(tmp_path / "one", ["import time; time.sleep(60)"])
    campaign.folder.mkdir()
    for number in (signal.SIGKILL, signal.SIGTERM):
        campaign.start()
        hit = Signal("signal", number, heads).strike(campaign, random.Random(0), None)
        assert hit.effect() == (True, f"ended with exit code {-number}")
    campaign.words = [
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print(1, flush=True); time.sleep(9)"
    ]
    campaign.start()
    assert until(lambda: campaign.output.read_text().endswith("1\n"), 20)
    assert Signal("signal", signal.SIGTERM, heads).strike(campaign, random.Random(0), None).effect() == (
        False,
        "ended with exit code 0",
    )


def test_the_complaint_of_a_full_disk_is_one_that_was_not_there_before(tmp_path, train):
    """The head's output is read before the logs, so what is new does not come last."""
    campaign = Campaign(tmp_path, [])
    log = tmp_path / train.log(4)
    log.write_text("1 ERROR OSError: [Errno 28] No space left on device\n")
    with at_work(tmp_path, train, "wait"):
        hit = FullDisk("full disk", "limit").strike(campaign, random.Random(0), None)
        campaign.output.write_text("rule train: [Errno 28] No space left on device\n")
        try:
            assert hit.effect() == (True, "rule train: [Errno 28] No space left on device")
        finally:
            campaign.output.unlink()


class Ended(Campaign):
    """A head that has nothing to do."""

    def command(self) -> list[str]:
        return ["true"]


def test_a_damaged_state_is_told_to_who_judges_what_is_computed_again(tmp_path, train, monkeypatch):
    state = tmp_path / train.folder / "step000002"
    (state / "state.json").write_text("{}")
    monkeypatch.setattr("workflow.drill.faults.StateStore.newest", lambda store, verify=True: state)
    monkeypatch.setattr("workflow.drill.faults.read_state", lambda path: {"files": []})
    campaign = Ended(tmp_path, [])
    campaign.start()
    with at_work(tmp_path, train, "wait"):
        CorruptState("corrupted newest state").strike(campaign, random.Random(0), None)
    campaign.output.unlink()
    assert campaign.damaged == {state}
