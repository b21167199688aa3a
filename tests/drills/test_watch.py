"""What a drill sees from outside: phases by the files that appear and are opened, processes by their locks, a disk that is full."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.fake_campaign import fake_campaign
from tests.support.processes import fork
from workflow.campaign.lock import FolderLock
from workflow.campaign.plan import read_plan
from workflow.campaign.preflight import check_disk
from workflow.drill.campaign import (
    Campaign,
    DrillError,
    check_room,
    empty,
    free_memory,
    full_disk,
    own_disk,
    until,
)
from workflow.drill.evidence import complaints, damage_noticed, newest_start
from workflow.drill.processes import descendants, drivers, parent, process_of, wait_gone, working_in
from workflow.drill.watch import LOAD, PUBLICATION, SAVE, Watcher

STAGE = Path("results/store/train/a-run-0123abcd")


def seen(watcher: Watcher) -> list[tuple[str, bool]]:
    """Phases that began (False) or ended (True) until nothing more is seen."""
    found = []
    while moments := watcher.moments(0.2):
        found += [(moment.phase, moment.ended is not None) for moment in moments]
    return found


def say(folder: Path, line: str) -> None:
    with (folder / "log-step000002.txt").open("a") as file:
        file.write(f"2026-11-30 01:08:37,401 INFO baton.train: {line}\n")


def test_a_training_is_seen_to_load_save_and_publish(tmp_path):
    stage = tmp_path / STAGE
    with Watcher(tmp_path) as watcher, FolderLock(stage):
        state = stage / "step000001"
        state.mkdir()
        (state / "state.json").write_text("{}")
        say(stage, "start 2 of train a-run")
        seen(watcher)
        (state / "state.json").read_text()
        assert seen(watcher) == [(LOAD, False)]
        assert watcher.going_on(LOAD, stage)
        say(stage, "going on after step 1")
        assert seen(watcher) == [(LOAD, True)]
        assert not watcher.going_on(LOAD, stage)
        (state / "state.json").read_text()  # retention looks at it: no load
        assert seen(watcher) == []

        temporary = stage / ".step000002.0a1b2c3d"
        temporary.mkdir()
        assert seen(watcher) == [(SAVE, False)]
        assert watcher.going_on(SAVE, stage)
        temporary.rename(stage / "step000002")
        assert seen(watcher) == [(SAVE, True), (PUBLICATION, False)]
        assert not watcher.going_on(SAVE, stage)
        assert watcher.going_on(PUBLICATION, stage)
        (stage / "step000002" / "..published.json.xyz").write_text("{}")
        say(stage, "published results/store/train")
        assert seen(watcher) == [(PUBLICATION, True)]
        assert not watcher.going_on(PUBLICATION, stage)


def test_any_stage_is_seen_to_publish(tmp_path):
    with Watcher(tmp_path) as watcher:
        stage = tmp_path / "results/store/convert/a-model-0123abcd"
        stage.mkdir(parents=True)
        (stage / "log.txt").write_text("12:00 INFO baton.convert: start 1 of convert a-model\n")
        seen(watcher)
        (stage / "..published.json.xyz").write_text("{}")
        assert seen(watcher) == [(PUBLICATION, False)]


@pytest.mark.parametrize("phase", [SAVE, PUBLICATION])
def test_what_a_dead_start_left_is_no_phase(tmp_path, driver, phase):
    """One that failed in a save or a publication leaves its temporary folder, or a log that does not end."""
    stage = tmp_path / STAGE
    say(stage, "start 1 of train a-run")
    with Watcher(tmp_path) as watcher:
        if phase == SAVE:
            (stage / ".step000002.0a1b2c3d").mkdir()
        else:
            (stage / "..published.json.xyz").write_text("{}")
        assert (phase, False) in seen(watcher)
        assert watcher.going_on(phase, stage)
        os.kill(driver.pid, signal.SIGKILL)
        assert until(lambda: not drivers(tmp_path), 10)
        assert not watcher.going_on(phase, stage)
        with FolderLock(stage):  # the next start has begun, and is not there yet
            assert not watcher.going_on(phase, stage)


def test_what_happened_while_nobody_looked_is_passed_over(tmp_path):
    stage = tmp_path / STAGE
    with Watcher(tmp_path) as watcher:
        stage.mkdir(parents=True)
        watcher.drain()
        (stage / ".step000002.0a1b2c3d").mkdir()
        watcher.drain()
        assert seen(watcher) == []
        (stage / ".step000002.0a1b2c3d").rmdir()  # folders that appeared meanwhile are watched all the same
        assert seen(watcher) == [(SAVE, True)]


def hold(folder: Path) -> None:
    """A driver: it holds the lock of a stage's folder, has a child, and works in the campaign's folder."""
    os.chdir(folder)
    FolderLock(STAGE).acquire()
    if os.fork() == 0:
        time.sleep(600)
    while True:
        time.sleep(0.05)
        try:
            (STAGE / "file").write_bytes(bytes(100_000))
        except OSError as error:
            (STAGE / "said").write_text(str(error.errno))


@pytest.fixture
def driver(tmp_path):
    process = fork(hold, tmp_path)
    assert until(lambda: drivers(tmp_path) and descendants(process.pid), 10)
    all_of_it = [process_of(pid) for pid in [process.pid, *descendants(process.pid)]]
    yield process
    for one in all_of_it:
        if one.alive:
            os.kill(one.pid, signal.SIGKILL)
    process.join()


def test_a_driver_is_found_by_the_lock_it_holds(tmp_path, driver):
    (found,) = drivers(tmp_path)
    assert (found.process.pid, found.stage) == (driver.pid, "train")
    (child,) = descendants(driver.pid)
    assert (parent(child), parent(driver.pid)) == (driver.pid, os.getpid())
    assert {process.pid for process in working_in(tmp_path)} == {driver.pid, child}
    assert driver.pid in descendants(os.getpid(), generations=1)
    assert child not in descendants(os.getpid(), generations=1)
    process = process_of(child)
    assert wait_gone([process], 0.1) == [process]
    os.kill(child, signal.SIGKILL)
    assert wait_gone([process], 10) == []


def test_a_limit_fills_the_disk_of_the_processes_at_work(tmp_path, driver):
    said = tmp_path / STAGE / "said"
    campaign = Campaign(tmp_path, [])
    with full_disk(campaign, "limit"):
        assert until(lambda: said.exists() and said.read_text(), 10)
    assert int(said.read_text()) == errno.EFBIG


def test_a_disk_of_its_own_is_full_only_for_a_while_and_what_is_there_stays(tmp_path):
    folder = tmp_path / "campaign"
    with own_disk(Campaign(folder, [])) as how:
        assert how == ("tmpfs" if os.geteuid() == 0 else "limit")
        (folder / "kept").write_text("here")
        if how == "tmpfs":
            with full_disk(Campaign(folder, []), how):
                with pytest.raises(OSError, match="No space left"):
                    (folder / "more").write_bytes(bytes(100_000))
                (folder / "more").unlink()  # as far as it came, it took the rest
                (folder / "line").write_text("a line of a log")
            (folder / "more").write_bytes(bytes(100_000))
    assert (folder / "kept").read_text() == "here"
    assert not folder.is_mount()


def test_no_disk_in_memory_is_larger_than_memory(tmp_path):
    """It is a real one that is filled, to the last byte."""
    campaign = Campaign(tmp_path / "campaign", [])
    with own_disk(campaign, room=free_memory()) as how:
        assert how == "limit"
        assert not campaign.folder.is_mount()


def test_a_disk_of_its_own_never_refuses_the_campaign_again(tmp_path, monkeypatch):
    """Nearly all is written and no training has published its last state, so that a head wants room for all of it once more."""
    large = 400 * 10**6
    path = fake_campaign(tmp_path / "reference", campaign="drill")
    plan = read_plan(path)
    stages = {
        key: spec.model_copy(update={"forecast_bytes": large if spec.stage == "train" else 0})
        for key, spec in plan.stages.items()
    }
    plan = plan.model_copy(update={"stages": stages})
    monkeypatch.setattr(Campaign, "plan", lambda self: plan)
    campaign = Campaign(tmp_path / "campaign", [])
    with own_disk(campaign, campaign.room()) as how:
        if how != "tmpfs":
            pytest.skip("no filesystem can be mounted here")
        monkeypatch.chdir(campaign.folder)
        with Path("state").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * large)
        check_disk(plan, Path("results"))
        monkeypatch.chdir(tmp_path)
        empty(campaign.folder)
    assert list(campaign.folder.iterdir()) == []


def test_a_drill_is_refused_where_the_disk_has_no_room_for_another_campaign(tmp_path):
    check_room(tmp_path, 0)
    with pytest.raises(DrillError, match=r"may need 1000000000.00 GB and .* are free; free some disk"):
        check_room(tmp_path, 10**18)


def test_evidence_is_read_from_what_was_said(tmp_path):
    campaign = Campaign(tmp_path / "one", [])
    stage = campaign.folder / STAGE
    stage.mkdir(parents=True)
    campaign.output.write_text("OSError: [Errno 28] No space left on device\nall is well\n")
    state = stage / "step000002"
    (stage / "log-step000002.txt").write_text(
        f"1 WARNING Damaged training state passed over: {STAGE}/step000002/state.json: missing\n"
        f"2 INFO published {STAGE}/step000002/manifest.json\n"
    )
    lines = [{"segment": 2, "number": 1, "begun": 1.0}, {"segment": 2, "number": 1, "end": "stopped"}]
    (stage / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"segm')
    assert complaints(campaign) == ["OSError: [Errno 28] No space left on device"]
    assert damage_noticed(campaign, state) == 1
    assert damage_noticed(campaign, stage / "step000003") == 0
    assert newest_start(stage).end() == "stopped"
    assert newest_start(stage.with_name("absent")) is None
