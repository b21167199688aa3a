"""What a SLURM does to jobs, on a real one: ends, requeues, refuses, forgets. A campaign's weights are always the same bits."""

from __future__ import annotations

import fcntl
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from workflow.cluster.jobs import JobFolder

pytestmark = pytest.mark.slurm


@pytest.fixture
def one_job_at_a_time(cluster) -> Iterator[str]:
    """A limit of one job in the queue, which is used up by the job whose id this is."""
    cluster.wait_until_idle()

    def set_limit(limit: int, shown: str) -> None:
        cluster.run("sacctmgr", "-i", "modify", "qos", "normal", "set", f"MaxSubmitJobsPerUser={limit}")
        cluster.wait(
            f"the limit {limit}", lambda: shown in cluster.run("scontrol", "show", "assoc_mgr", "flags=qos")
        )

    job = cluster.run("sbatch", "--parsable", "-p", "cuda", "-o", "/dev/null", "--wrap", "sleep 600").strip()
    set_limit(1, "MaxSubmitJobsPU=1(")
    yield job
    set_limit(-1, "MaxSubmitJobsPU=N(")
    cluster.run("scancel", job)


def test_a_cancelled_job_is_not_tried_again_until_somebody_asks(undisturbed, half):
    head = half.start()
    job = half.job(head, "RUNNING").job
    half.steps(head, 1)
    half.cluster.run("scancel", job)
    assert head.wait() != 0
    assert "CANCELLED: SLURM job" in head.said()
    assert half.jobs_submitted() == {job}

    half.release()
    head = half.start()
    assert head.wait() == 0, head.said()
    assert half.weights() == undisturbed.weights()


def test_at_the_time_limit_the_state_is_saved_and_the_same_job_goes_on(undisturbed, half):
    head = half.start("--set-resources", "train:runtime=1", "--baton-warning", "25")
    half.until(head, "the warning", lambda: "told to save its state" in half.job_log())
    half.release()
    assert head.wait() == 0, head.said()
    job = half.record().job
    assert half.jobs_submitted() == {job}
    starts = half.starts()
    assert [(start["job"], start["restart"]) for start in starts] == [(job, n) for n in range(len(starts))]
    assert [start["end"] for start in starts] == ["stopped"] * (len(starts) - 1) + ["published"]
    assert len(starts) > 1
    assert half.weights() == undisturbed.weights()


def test_a_preempted_job_saves_and_comes_back(undisturbed, half):
    head = half.start(overrides="site.devices.npu.preemptible=true")
    job = half.job(head, "RUNNING")
    assert job.partition == "ascend-low"
    half.steps(head, 1)
    options = ("-p", "ascend", "-N2", "--exclusive", "--mem=0", "-t1", "-o", "/dev/null", "--wrap", "sleep 3")
    half.cluster.run("sbatch", *options)
    half.until(head, "the warning", lambda: "told to save its state" in half.job_log())
    half.release()
    assert head.wait() == 0, head.said()
    assert half.jobs_submitted() == {job.job}
    starts = half.starts()
    assert [start["restart"] for start in starts] == list(range(len(starts)))
    assert len(starts) > 1
    assert half.weights() == undisturbed.weights()


def test_a_job_whose_node_is_lost_comes_back_on_another_though_the_first_start_lives_on(undisturbed, half):
    head = half.start()
    job = half.job(head, "RUNNING").job
    half.steps(head, 1)
    node = half.cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    half.cluster.stop_daemon(f"slurmd.{node}")  # what it started goes on, and nobody can end it
    half.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
    try:
        half.until(head, "the second start", lambda: len(half.starts()) == 2)
        half.release()  # both go on at once
        assert head.wait() == 0, head.said()
    finally:
        half.cluster.start_daemon(f"slurmd.{node}")
        half.cluster.wait_until_idle()
    assert half.jobs_submitted() == {job}
    assert [start["restart"] for start in half.starts()] == [0, 1]
    assert half.starts()[-1]["end"] == "published"
    assert half.weights() == undisturbed.weights()


def test_where_jobs_may_not_be_requeued_a_new_one_is_submitted_away_from_the_lost_node(undisturbed, half):
    head = half.start(overrides="site.requeue=false")
    first = half.job(head, "RUNNING").job
    half.steps(head, 1)
    node = half.cluster.run("squeue", "-h", "-j", first, "-o", "%N").strip()
    half.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
    half.until(head, "another job", lambda: half.record().attempt == 2)
    half.release()
    assert head.wait() == 0, head.said()
    half.cluster.wait_until_idle()
    assert f"NODE_FAIL: SLURM job {first} ended as NODE_FAIL" in head.said()
    record = half.record()
    assert (record.attempt, record.excluded) == (2, [node])
    assert half.jobs_submitted() == {first, record.job}
    assert half.weights() == undisturbed.weights()


def test_a_job_that_runs_out_of_memory_is_tried_again_with_more(undisturbed, half):
    """One of two devices has half of a node's memory; without cgroups SLURM says why it ended a job in the job's log alone."""
    head = half.start(overrides="site.devices.npu.memory_per_node_gb=2", RELAY_MEMORY="800")
    half.until(head, "another job", lambda: half.record() is not None and half.record().attempt == 2)
    half.release()
    assert head.wait() == 0, head.said()
    first, second = sorted(half.jobs_submitted(), key=int)
    assert f"OUT_OF_MEMORY: SLURM job {first}" in head.said()
    assert (half.record().job, half.record().memory_factor) == (second, 2.0)
    asked = half.cluster.run("squeue", "--states=all", "-h", "-j", f"{first},{second}", "-o", "%i %m")
    assert dict(line.split() for line in asked.splitlines()) == {first: "1G", second: "2G"}
    assert half.weights() == undisturbed.weights()


def test_a_limit_on_queued_jobs_is_waited_for(undisturbed, half, one_job_at_a_time):
    half.release()
    head = half.start()
    half.until(head, "the limit", lambda: "SLURM takes no job now, trying again" in head.said())
    assert re.search("QOSMaxSubmitJobPerUserLimit|violates accounting/QOS", head.said())
    half.cluster.run("scancel", one_job_at_a_time)
    assert head.wait() == 0, head.said()
    assert half.record().attempt == len(half.jobs_submitted()) == 1
    assert half.weights() == undisturbed.weights()


def test_without_sacct_and_over_restarts_of_the_controller(undisturbed, half):
    cluster = half.cluster
    cluster.stop_daemon("slurmdbd")
    cluster.stop_daemon("slurmctld")
    try:
        head = half.start()
        half.until(head, "the refusal", lambda: "SLURM takes no job now, trying again" in head.said())
        cluster.start_daemon("slurmctld")
        job = half.job(head, "RUNNING").job
        half.steps(head, 1)
        cluster.stop_daemon("slurmctld")
        cluster.start_daemon("slurmctld")
        half.until(head, "the controller", lambda: cluster.run("squeue", "-h", check=False))
        cluster.run("scancel", job)
        assert head.wait() != 0
        assert "CANCELLED: SLURM job" in head.said()
        half.release()
        head = half.start()
        assert head.wait() == 0, head.said()
    finally:
        for name in ("slurmdbd", "slurmctld"):
            if not cluster.alive(name):
                cluster.start_daemon(name)
        cluster.wait("accounting", lambda: cluster.run("sacctmgr", "-n", "show", "cluster"))
    assert half.weights() == undisturbed.weights()


def test_a_busy_controller_that_takes_a_job_late_has_taken_it_once(undisturbed, half):
    """sbatch gives up and so does its head, killed in the middle; the controller works off what it was asked for all the same."""
    half.cluster.signal_daemon("slurmctld", signal.SIGSTOP)
    try:
        head = half.start()
        lock = JobFolder(half.folder / "results", "train", half.train.id, 6).submit_lock
        half.until(head, "sbatch", lambda: is_held(lock))
        head.kill()
        head = half.start()
        half.until(head, "its patience", lambda: "SLURM takes no job now, trying again" in head.said())
    finally:
        half.cluster.signal_daemon("slurmctld", signal.SIGCONT)
    half.until(head, "the job", lambda: "going on with SLURM job" in head.said())
    half.release()
    assert head.wait() == 0, head.said()
    assert half.jobs_submitted() == {half.record().job}
    assert half.weights() == undisturbed.weights()


def is_held(path: Path) -> bool:
    """Whether somebody has locked a file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def test_an_impossible_request_is_refused_with_slurms_reason(half):
    head = half.start(overrides="site.devices.npu.gres=gpu:{devices}")
    assert head.wait() != 0
    assert "refused: " in head.said()
    assert "Requested node configuration is not available" in head.said()
    assert "Trying to restart job" not in head.said()
    assert half.record().job is None


def test_a_stages_own_error_is_not_tried_again_and_shows_its_log(half, tmp_path):
    bad = tmp_path / "bad"
    bad.touch()
    half.release()
    # as a head that was started inside an allocation has them; sbatch would obey
    inherited = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "7", "SBATCH_PARTITION": "cuda"}
    head = half.start(RELAY_FAIL=str(bad), **inherited)
    assert head.wait() != 0
    assert "own error: SLURM job" in head.said()
    assert "told to fail" in head.said()
    assert "Trying to restart job" not in head.said()
    assert len(half.starts()) == 1
    where = half.cluster.run("squeue", "--states=all", "-h", "-j", half.record().job, "-o", "%P")
    assert where.strip() == "ascend"
