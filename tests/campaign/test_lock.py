"""Locks: one living holder, named; the dead are taken over."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from workflow.campaign.lock import STALE_SECONDS, FolderLock, LockHeld, process_start

HOLD = (
    "import sys, time; from pathlib import Path; from workflow.campaign.lock import FolderLock; "
    "lock = FolderLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(60)"
)


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def write_holder(lock, **changes):
    holder = {"host": socket.gethostname(), "pid": os.getppid(), "started": process_start(os.getppid())}
    lock.path.write_text(json.dumps(holder | changes))


def test_a_living_holder_is_named(tmp_path, holder):
    with pytest.raises(LockHeld, match=f"in use by process {holder.pid} on {socket.gethostname()}"):
        FolderLock(tmp_path).acquire()


def test_a_killed_holder_is_taken_over(tmp_path, holder):
    holder.kill()  # not waited for: a zombie holds nothing
    time.sleep(0.2)
    with FolderLock(tmp_path) as lock:
        assert lock.holder().pid == os.getpid()
    assert not lock.path.exists()


def test_waiting_ends_with_the_holder(tmp_path, holder):
    lock = FolderLock(tmp_path)
    seen = []
    for who in lock.wait(seconds=0.1):
        seen.append(who.pid)
        holder.kill()
    assert set(seen) == {holder.pid}
    assert lock.holder().pid == os.getpid()
    lock.release()


def test_a_process_of_the_same_number_is_not_the_holder(tmp_path):
    lock = FolderLock(tmp_path)
    write_holder(lock)
    with pytest.raises(LockHeld):
        lock.acquire()
    write_holder(lock, started="another boot")
    with lock:
        assert lock.holder().pid == os.getpid()


def test_a_holder_elsewhere_lives_as_long_as_its_heart_beats(tmp_path):
    lock = FolderLock(tmp_path)
    write_holder(lock, host="elsewhere")
    with pytest.raises(LockHeld, match="on elsewhere"):
        lock.acquire()
    old = time.time() - STALE_SECONDS - 1
    os.utime(lock.path, (old, old))
    with lock:
        assert lock.holder().host == socket.gethostname()


def test_a_torn_lock_file_holds_nothing(tmp_path):
    lock = FolderLock(tmp_path)
    lock.path.write_text('{"host": "x", "pi')
    with lock:
        assert lock.holder().pid == os.getpid()


def test_release_leaves_another_holders_lock_alone(tmp_path):
    lock = FolderLock(tmp_path)
    lock.acquire()
    write_holder(lock)
    lock.release()
    assert lock.path.exists()


def test_a_requeued_job_takes_its_own_lock_back(tmp_path, monkeypatch):
    lock = FolderLock(tmp_path)
    write_holder(lock, host="n1", job="7", restart=0)
    with pytest.raises(LockHeld, match="SLURM job 7, restart 0"):
        lock.acquire()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with lock:
        assert (lock.holder().job, lock.holder().restart) == ("7", 1)


def test_another_jobs_lock_is_taken_when_slurm_says_that_it_has_ended(tmp_path):
    ended = set()
    lock = FolderLock(tmp_path, job_is_final=lambda job: job in ended)
    write_holder(lock, host="n1", job="7", restart=0)
    with pytest.raises(LockHeld):
        lock.acquire()
    ended.add("7")
    with lock:
        assert lock.holder().pid == os.getpid()


@pytest.mark.parametrize(("final", "taken"), [(False, False), (None, True), (True, True)])
def test_a_stale_holder_in_a_job_is_not_dead_while_slurm_says_that_the_job_goes_on(tmp_path, final, taken):
    lock = FolderLock(tmp_path, job_is_final=lambda job: final)
    write_holder(lock, host="n1", job="7", restart=0)
    old = time.time() - STALE_SECONDS - 1
    os.utime(lock.path, (old, old))
    if taken:
        with lock:
            assert lock.holder().pid == os.getpid()
    else:
        with pytest.raises(LockHeld, match="SLURM job 7"):
            lock.acquire()


def test_who_lost_its_lock_is_told_at_the_next_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr("workflow.campaign.lock.HEARTBEAT_SECONDS", 0.05)
    lost = threading.Event()
    lock = FolderLock(tmp_path, on_lost=lost.set)
    lock.acquire()
    assert not lost.wait(0.2)
    write_holder(lock, host="n2")
    assert lost.wait(5)
    lock.release()
    assert lock.holder().host == "n2"
