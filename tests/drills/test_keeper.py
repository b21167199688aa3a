"""A drill that is killed leaves nothing; and whether a campaign moves is seen by what it writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import fork
from workflow.campaign.lock import HEAD_LOCK, RELEASE_LOCK, FolderLock
from workflow.drill.campaign import Campaign, DrillError, Pulse, own_disk, until
from workflow.drill.keeper import _unescaped, kept, mounts_in, tidy
from workflow.drill.processes import working_in


@dataclass
class Sleeping(Campaign):
    """A head that ignores what can be ignored, and its job, which is an orphan."""

    def command(self) -> list[str]:
        return ["bash", "-c", "trap '' INT TERM HUP; (setsid sleep 600 &); sleep 600"]


def drill_in(folder: Path) -> None:
    """A drill in the middle of its second campaign."""
    # A shell that starts tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with kept(folder):
        campaign = Sleeping(folder / "disturbed 1", [])
        with own_disk(campaign):
            campaign.start()
            time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_drill_that_is_ended_leaves_no_process_and_no_mount(tmp_path, number):
    drill = fork(drill_in, tmp_path)
    assert until(lambda: len([p for p in working_in(tmp_path) if p.program == "sleep"]) == 2, 20)
    assert mounts_in(tmp_path) == ([tmp_path / "disturbed 1"] if os.geteuid() == 0 else [])
    os.kill(drill.pid, number)
    drill.join(60)
    assert until(lambda: not working_in(tmp_path) and not mounts_in(tmp_path), 30), working_in(tmp_path)


def test_who_looks_on_from_a_terminal_is_left_alone(tmp_path):
    """A shell in the folder of a campaign is none of its processes."""
    code = (
        "import os, pty, sys; pty.spawn(['sh', '-c', 'cd ' + sys.argv[1] + '; touch here; exec sleep 600'])"
    )
    person = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE)
    try:
        assert until((tmp_path / "here").exists, 20)
        assert working_in(tmp_path) == []
        tidy(tmp_path)
        assert person.poll() is None
    finally:
        person.kill()
        person.wait()


def test_mounts_have_their_names_back():
    assert _unescaped(r"/results/a\040b\134c") == r"/results/a b\c"


def test_a_campaign_hangs_when_it_writes_nothing_however_its_locks_are_touched(tmp_path):
    """The head's, a stage's, and that of the one that gives states up."""
    campaign = Campaign(tmp_path / "one", [])
    results = campaign.folder / "results"
    stage = results / "store/train/a-run"
    stage.mkdir(parents=True)
    locks = [FolderLock(results, HEAD_LOCK), FolderLock(stage), FolderLock(stage, RELEASE_LOCK)]
    for lock in locks:
        lock.acquire()
    pulse = Pulse(campaign, quiet=0.4)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:  # three times as long as it may be quiet
        with (stage / "log-step000002.txt").open("a") as log:
            log.write("going on\n")
        pulse.check()
        time.sleep(0.02)

    def hangs() -> bool:
        for lock in locks:
            os.utime(lock.path)
        return not pulse.beats()

    assert until(hangs, 20)
    with pytest.raises(DrillError, match="it hangs: nothing was written for"):
        pulse.check()
    for lock in locks:
        lock.release()


def test_a_campaign_that_goes_on_writing_never_hangs(tmp_path, monkeypatch):
    """However long it takes: two hours, and a line in each minute."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    campaign = Campaign(tmp_path / "one", [])
    pulse = Pulse(campaign)
    for _ in range(120):
        clock[0] += 60
        with campaign.output.open("a") as output:
            output.write("going on\n")
        assert pulse.beats()
