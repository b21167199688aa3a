"""Heads of a campaign on a real SLURM that are killed, stopped, doubled and edited under; its weights are always the same bits."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.slurm.relay import HERE, PATIENCE, ROOT
from workflow.manifest import read_manifest

pytestmark = pytest.mark.slurm


def test_each_stage_is_a_job_on_the_partition_of_its_device_key(undisturbed):
    said = undisturbed.said
    for stage in ("sft", "train", "evaluate"):
        assert f"on ascend, log results/store/{stage}/" in said
    for stage in ("convert", "export"):
        assert f"on cuda, log results/store/{stage}/" in said
    assert (undisturbed.folder / "results/relay/report.html").exists()
    assert undisturbed.train.device.asked == "npu"
    assert undisturbed.train.device.computed == "cpu"
    assert len(undisturbed.jobs_submitted()) == 1


def test_a_killed_head_finds_its_job_again_while_it_waits_and_while_it_runs(undisturbed, half, closed):
    head = half.start()
    waiting = half.job(head, "PENDING")
    row = next(line for line in half.baton("status", "relay").splitlines() if " PENDING " in line)
    assert row.split()[:5] == ["grpo", "train", half.train.name, "6", waiting.job]
    head.kill()

    head = half.start()
    half.until(head, "the waiting job", lambda: f"going on with SLURM job {waiting.job}" in head.said())
    closed()
    half.steps(head, 1)
    row = next(line for line in half.baton("status", "relay").splitlines() if " RUNNING " in line)
    assert row.split()[:5] == ["grpo", "train", half.train.name, "6", waiting.job]
    head.kill()

    head = half.start()
    running = f"going on with SLURM job {waiting.job} (RUNNING)"
    half.until(head, "the running job", lambda: running in head.said())
    half.release()
    assert head.wait() == 0, head.said()
    assert half.jobs_submitted() == {waiting.job}
    assert [start["end"] for start in half.starts()] == ["published"]
    assert half.weights() == undisturbed.weights()


def test_of_two_heads_that_start_at_once_one_works(undisturbed, half):
    heads = [half.start(), half.start()]
    end = time.monotonic() + PATIENCE
    while not (ended := [head for head in heads if head.process.poll() is not None]):
        assert time.monotonic() < end, "both heads work"
        time.sleep(0.1)
    (loser,), (winner,) = ended, [head for head in heads if head not in ended]
    assert loser.wait() != 0
    assert f"another head is running: results is in use by process {winner.process.pid}" in loser.said()
    half.release()
    assert winner.wait() == 0, winner.said()
    assert half.jobs_submitted() == {half.record().job}
    assert half.weights() == undisturbed.weights()


def test_a_crash_between_submission_and_its_record_is_resolved_by_the_jobs_name(undisturbed, half, closed):
    head = half.start()
    waiting = half.job(head, "PENDING")
    head.kill()
    folder = half.folder / f"results/.jobs/train-{half.train.id}-step000006"
    record = folder / "job.json"
    record.write_text(record.read_text().replace(f'"job": "{waiting.job}"', '"job": null'))
    (folder / waiting.job / f"{waiting.job}_submitted.pkl").unlink()

    head = half.start()
    half.until(head, "the job", lambda: f"going on with SLURM job {waiting.job}" in head.said())
    closed()
    half.release()
    assert head.wait() == 0, head.said()
    assert half.jobs_submitted() == {waiting.job}
    assert half.weights() == undisturbed.weights()


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
def test_a_job_killed_between_publication_and_its_end_has_succeeded(undisturbed, half, watched):
    """Whether the head first sees the manifest or what became of the job, or is not even there."""
    half.hold(6)
    head = half.start()
    job = half.job(head, "RUNNING").job
    head.send(signal.SIGSTOP)
    end = time.monotonic() + PATIENCE
    while not half.published():
        assert time.monotonic() < end, half.job_log()
        time.sleep(0.1)
    half.cluster.run("scancel", "--signal=KILL", "--full", job)
    assert half.ended(job) != "COMPLETED"
    if watched:
        head.send(signal.SIGCONT)
    else:
        head.kill()
        head = half.start()
    assert head.wait() == 0, head.said()
    assert half.jobs_submitted() == {job}
    assert [start["end"] for start in half.starts()] == ["published"]
    assert half.weights() == undisturbed.weights()


def test_what_is_edited_while_a_job_waits_is_not_trained(undisturbed, half, closed):
    half.copy_source()
    head = half.start()
    waiting = half.job(head, "PENDING")
    lr = read_manifest(undisturbed.folder / undisturbed.train.manifest(6)).config["algorithm"]["lr"]
    assert lr != 0.5
    for path in (half.campaign, half.source / "configs/algorithm/grpo.yaml"):
        text = path.read_text()
        changed = text.replace("algorithm.steps=6", "algorithm.steps=6\n  - algorithm.lr=0.5")
        changed = re.sub(r"^lr: .*", "lr: 0.5", changed, flags=re.MULTILINE)
        assert changed != text
        path.write_text(changed)
    for path in ("workflow/rl/losses.py", "workflow/stages/train.py", "engines/training/base.py"):
        (half.source / path).write_text("raise RuntimeError('the edited source runs')\n")
    closed()
    half.release()
    assert head.wait() == 0, head.said()
    assert half.jobs_submitted() == {waiting.job}
    assert read_manifest(half.folder / half.train.manifest(6)).config["algorithm"]["lr"] == lr
    assert half.weights() == undisturbed.weights()


def test_the_head_can_be_a_job_that_requeues_itself(undisturbed, half):
    for name in ("Snakefile", "workflow"):
        (half.folder / name).symlink_to(ROOT / name)
    words = ("head", str(HERE / "relay.yaml"), "--site", "mini")
    told = half.baton(*words, OMP_NUM_THREADS="1")
    head = re.search(r"the head is SLURM job (\d+)", told).group(1)
    assert f"the head is already SLURM job {head}" in half.baton(*words)

    log, report = half.folder / "results/relay/head.txt", half.folder / "results/relay/report.html"

    def until(condition) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)

    until(lambda: half.steps_done() == 4)
    half.cluster.run("scancel", "--batch", "--signal=USR2", head)
    until(lambda: f"going on with SLURM job {half.record().job}" in log.read_text())
    half.release()
    until(report.exists)
    assert len(half.jobs_submitted()) == 1
    assert half.weights() == undisturbed.weights()


def test_what_a_person_stops_is_not_tried_again_and_goes_on_when_the_file_is_gone(undisturbed, half):
    stop = half.folder / "results/relay/grpo/stop"
    head = half.start()
    half.steps(head, 1)
    stop.touch()
    half.release()
    assert head.wait() != 0
    assert "to go on, rm results/relay/grpo/stop and run the same command" in head.said()
    assert [start["end"] for start in half.starts()] == ["stopped"]
    assert len(half.jobs_submitted()) == 1
    stop.unlink()
    head = half.start()
    assert head.wait() == 0, head.said()
    assert len(half.jobs_submitted()) == 2
    assert half.weights() == undisturbed.weights()


def test_ctrl_c_ends_the_jobs_and_says_how_many(half):
    head = half.start()
    job = half.job(head, "RUNNING").job
    head.send(signal.SIGINT)
    assert head.wait() != 0
    assert f"cancelling 1 SLURM jobs: {job}" in head.said()
    assert half.ended(job) == "CANCELLED"


def test_sigterm_lets_the_jobs_end_and_submits_no_more(undisturbed, half):
    head = half.start(only_training=False)
    job = half.job(head, "RUNNING").job
    half.steps(head, 1)
    head.send(signal.SIGTERM)
    half.until(head, "its word", lambda: "Will exit after finishing currently running jobs" in head.said())
    half.release()
    head.wait()
    assert half.published(), head.said()
    assert "cancelling" not in head.said()
    assert not list((half.folder / "results/.jobs").glob("export-*"))
    assert half.ended(job) == "COMPLETED"

    head = half.start(only_training=False)
    assert head.wait() == 0, head.said()
    assert (half.folder / "results/relay/report.html").exists()
    assert half.jobs_submitted() == {job}
    assert half.weights() == undisturbed.weights()
