"""What a job's end means: SLURM's word, the launcher's record, and both together."""

from __future__ import annotations

import subprocess

import pytest

from workflow.cluster.jobs import EndRecord, JobFolder, StartRecord, write_end, write_start
from workflow.cluster.slurm import (
    NoSuchJob,
    SlurmLimit,
    SlurmRefused,
    SlurmUnavailable,
    failure,
)
from workflow.cluster.states import (
    GONE,
    RETRIED,
    UNKNOWN,
    FailureClass,
    JobState,
    classify,
    ended_for_memory,
    settled,
)
from workflow.cluster.submit import without_allocation


def end(outcome: str, code: int = 1, terminated: bool = False, restart: int = 0) -> EndRecord:
    return EndRecord(
        job="7", restart=restart, outcome=outcome, code=code, node="n1", terminated=terminated, at=0.0
    )


@pytest.mark.parametrize(
    ("state", "record", "expected"),
    [
        ("FAILED", end("error"), FailureClass.OWN_ERROR),
        ("FAILED", None, FailureClass.OWN_ERROR),
        ("FAILED", end("refused", 64), FailureClass.REFUSED),
        ("FAILED", end("no progress", 75), FailureClass.NO_PROGRESS),
        ("FAILED", end("requeue refused", 75), FailureClass.TIMEOUT),
        ("OUT_OF_MEMORY", end("error", -9), FailureClass.OUT_OF_MEMORY),
        ("OUT_OF_MEMORY", end("error", 1), FailureClass.OUT_OF_MEMORY),
        ("CANCELLED", end("stopped by user", 76), FailureClass.STOPPED),
        ("TIMEOUT", end("error", 1, terminated=True), FailureClass.TIMEOUT),
        ("CANCELLED", end("stopped", 75, terminated=True), FailureClass.CANCELLED),
        ("PREEMPTED", end("stopped", 75, terminated=True), FailureClass.PREEMPTED),
        ("NODE_FAIL", None, FailureClass.NODE_FAIL),
        ("BOOT_FAIL", None, FailureClass.NODE_FAIL),
        ("FAILED", end("node lost", 1), FailureClass.NODE_FAIL),
        ("OUT_OF_MEMORY", end("node lost", 1), FailureClass.OUT_OF_MEMORY),
        (UNKNOWN, end("error"), FailureClass.OWN_ERROR),
        (GONE, end("refused", 64), FailureClass.REFUSED),
    ],
)
def test_who_ended_the_stage_decides_its_failure_class(state, record, expected):
    assert classify(JobState(state), record) == expected


def test_a_job_in_which_the_launcher_could_not_begin_is_its_nodes_failure():
    """It lacks a mount or the launcher; another node may have it."""
    assert classify(JobState("FAILED"), None, started=False) == FailureClass.NODE_FAIL
    assert classify(JobState("CANCELLED"), None, started=False) == FailureClass.CANCELLED


def test_a_job_that_slurm_ended_for_its_memory_says_so_in_its_log_alone(tmp_path):
    """As slurmstepd writes it; a job before this one may have left the like in the same file."""
    log = tmp_path / "job.txt"
    log.write_text(
        "slurmstepd-n1: error: StepId=7.batch exceeded memory limit (1310566912 > 1073741824), being killed\n"
        "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
    )
    assert ended_for_memory(log, "7")
    assert not ended_for_memory(log, "77")
    assert not ended_for_memory(tmp_path / "none", "7")
    assert classify(JobState("FAILED"), None, over_memory=True) == FailureClass.OUT_OF_MEMORY
    assert classify(JobState("FAILED"), end("refused", 64), over_memory=True) == FailureClass.REFUSED


def test_only_what_can_end_otherwise_is_tried_again():
    assert {*("own error", "CANCELLED", "no progress", "refused", "stopped by the user")} == {
        *FailureClass
    } - RETRIED


@pytest.mark.parametrize(
    ("record", "alone"),
    [
        (None, False),
        (end("published", 0), False),
        (end("requeued", 75), False),
        (end("error", 1), False),  # a rank may have been killed for its memory
        (end("error", -9), False),
        (end("error", 137), False),
        (end("node lost", 1), False),
        (end("error", 1, terminated=True), False),
        (end("refused", 64), True),
        (end("stopped by user", 76), True),
    ],
)
def test_a_record_counts_alone_unless_something_outside_may_have_ended_the_stage(record, alone):
    assert settled(record) == alone


def test_unknown_is_neither_running_nor_failed():
    assert not JobState(UNKNOWN).final
    assert not JobState("REQUEUED").final
    assert JobState(GONE).final


def test_a_start_that_slurm_gave_up_cannot_speak_for_the_one_after_it(tmp_path):
    folder = JobFolder(tmp_path, "train", "0123", 20)
    write_start(folder.path, StartRecord(job="7", restart=0, node="n1", at=0.0))
    write_start(folder.path, StartRecord(job="7", restart=1, node="n2", at=1.0))
    write_end(folder.path, end("stopped", 75, restart=0))
    assert folder.end("7") is None
    write_end(folder.path, end("published", 0, restart=1))
    assert folder.end("7").outcome == "published"
    assert folder.end("8") is None


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
            SlurmUnavailable,
        ),
        ("Unable to contact slurm controller (connect failure)", SlurmUnavailable),
        ("sacct: error: Problem talking to the database: Connection refused", SlurmUnavailable),
        ("slurm_load_jobs error: Invalid job id specified", NoSuchJob),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", SlurmLimit),
        ("error: QOSMaxSubmitJobPerUserLimit", SlurmLimit),
        ("Batch job submission failed: Requested node configuration is not available", SlurmRefused),
        ("Batch job submission failed: Invalid account or account/partition combination", SlurmRefused),
    ],
)
def test_what_slurm_says_tells_whether_to_wait(said, kind):
    assert type(failure(said)) is kind


def test_an_inherited_allocation_is_forgotten_but_not_which_cluster(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SBATCH_PARTITION", "SRUN_DEBUG", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    seen = subprocess.run([*without_allocation(), "env"], capture_output=True, text=True, check=True).stdout
    left = [line for line in seen.splitlines() if line.startswith(("SLURM", "SBATCH", "SRUN"))]
    assert left == ["SLURM_CONF=x"]
