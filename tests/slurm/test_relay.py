"""A campaign on a real SLURM, undisturbed and disturbed in every way that clusters know; its weights are always the same bits."""

from __future__ import annotations

import re
import time

import pytest

from tests.slurm.relay import HERE, PATIENCE, ROOT, Relay

pytestmark = pytest.mark.slurm
SLOW = {"RELAY_PAUSE": "1"}
"""A few seconds a step."""


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory) -> Relay:
    """The campaign from its first stage to its report."""
    relay = Relay.create(tmp_path_factory.mktemp("relay") / "undisturbed", cluster)
    head = relay.start(only_training=False)
    assert head.wait(2 * PATIENCE) == 0, head.said()
    relay.said = head.said()
    return relay


@pytest.fixture
def half(undisturbed, request) -> Relay:
    """A folder in which the second segment of training is still to be run."""
    return undisturbed.half(undisturbed.folder.parent / request.node.name)


@pytest.fixture
def closed(cluster):
    """The ascend partitions take jobs and start none until ``closed()`` is called."""
    names = ("ascend", "ascend-low")

    def set_state(state: str) -> None:
        for name in names:
            cluster.run("scontrol", "update", f"PartitionName={name}", f"State={state}")

    set_state("DOWN")
    yield lambda: set_state("UP")
    set_state("UP")


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
    head = half.start(RELAY_PAUSE="5")  # the job goes on for longer than a head takes to start
    waiting = half.job(head, "PENDING")
    row = next(line for line in half.baton("status", "relay").splitlines() if " PENDING " in line)
    assert row.split()[:5] == ["grpo", "train", half.train.name, "6", waiting.job]
    head.kill()

    head = half.start(**SLOW)
    half.until(head, "the waiting job", lambda: f"going on with SLURM job {waiting.job}" in head.said())
    second = half.start(**SLOW)
    assert second.wait() != 0
    assert f"another head is running: results is in use by process {head.process.pid}" in second.said()

    closed()
    half.steps(head, 1)
    head.kill()
    head = half.start(**SLOW)
    assert head.wait() == 0, head.said()
    assert f"going on with SLURM job {waiting.job}" in head.said()
    assert half.jobs_submitted() == {waiting.job}
    assert [start["end"] for start in half.starts()] == ["published"]
    assert half.weights() == undisturbed.weights()


def test_a_crash_between_submission_and_its_record_is_resolved_by_the_jobs_name(undisturbed, half, closed):
    head = half.start(**SLOW)
    waiting = half.job(head, "PENDING")
    head.kill()
    folder = half.folder / f"results/.jobs/train-{half.train.id}-step000006"
    record = folder / "job.json"
    record.write_text(record.read_text().replace(f'"job": "{waiting.job}"', '"job": null'))
    (folder / waiting.job / f"{waiting.job}_submitted.pkl").unlink()

    head = half.start(**SLOW)
    half.until(head, "the job", lambda: f"going on with SLURM job {waiting.job}" in head.said())
    closed()
    assert head.wait() == 0, head.said()
    assert half.jobs_submitted() == {waiting.job}
    assert half.weights() == undisturbed.weights()


def test_a_cancelled_job_is_not_tried_again_until_somebody_asks(undisturbed, half):
    head = half.start(**SLOW)
    job = half.job(head, "RUNNING").job
    half.steps(head, 1)
    half.cluster.run("scancel", job)
    assert head.wait() != 0
    assert "CANCELLED: SLURM job" in head.said()
    assert half.jobs_submitted() == {job}

    head = half.start()
    assert head.wait() == 0, head.said()
    assert half.weights() == undisturbed.weights()


def test_the_head_can_be_a_job_that_requeues_itself(undisturbed, half):
    for name in ("Snakefile", "workflow"):
        (half.folder / name).symlink_to(ROOT / name)
    words = ("head", str(HERE / "relay.yaml"), "--site", "mini")
    told = half.baton(*words, RELAY_PAUSE="5", OMP_NUM_THREADS="1")
    head = re.search(r"the head is SLURM job (\d+)", told).group(1)
    assert f"the head is already SLURM job {head}" in half.baton(*words)

    deadline = time.monotonic() + PATIENCE
    while half.steps_done() < 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    half.cluster.run("scancel", "--batch", "--signal=USR2", head)
    report = half.folder / "results/relay/report.html"
    while not report.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    said = (half.folder / "results/relay/head.txt").read_text()
    assert report.exists(), said
    assert f"going on with SLURM job {half.record().job}" in said
    assert len(half.jobs_submitted()) == 1
    assert half.weights() == undisturbed.weights()


def test_what_a_person_stops_is_not_tried_again_and_goes_on_when_the_file_is_gone(undisturbed, half):
    stop = half.folder / "results/relay/grpo/stop"
    head = half.start(**SLOW)
    half.steps(head, 1)
    stop.touch()
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
    head = half.start(**SLOW)
    job = half.job(head, "RUNNING").job
    head.interrupt()
    assert head.wait() != 0
    assert f"cancelling 1 SLURM jobs: {job}" in head.said()
    state = half.cluster.run("squeue", "--states=all", "-h", "-j", job, "-o", "%T").strip()
    assert state in ("CANCELLED", "COMPLETING")


def test_at_the_time_limit_the_state_is_saved_and_the_same_job_goes_on(undisturbed, half):
    options = ("--set-resources", "train:runtime=1", "--baton-warning", "25")
    head = half.start(*options, RELAY_PAUSE="5")  # three steps do not fit into the minute
    assert head.wait(2 * PATIENCE) == 0, head.said()
    job = half.record().job
    assert half.jobs_submitted() == {job}
    starts = half.starts()
    assert [(start["job"], start["restart"]) for start in starts] == [(job, n) for n in range(len(starts))]
    assert [start["end"] for start in starts] == ["stopped"] * (len(starts) - 1) + ["published"]
    assert len(starts) > 1
    assert half.weights() == undisturbed.weights()


def test_a_preempted_job_saves_and_comes_back(undisturbed, half):
    head = half.start(**SLOW, overrides="site.devices.npu.preemptible=true")
    job = half.job(head, "RUNNING")
    assert job.partition == "ascend-low"
    half.steps(head, 1)
    options = ("-p", "ascend", "-N2", "--exclusive", "--mem=0", "-t1", "-o", "/dev/null", "--wrap", "sleep 3")
    half.cluster.run("sbatch", *options)
    assert head.wait() == 0, head.said()
    assert half.jobs_submitted() == {job.job}
    starts = half.starts()
    assert [start["restart"] for start in starts] == list(range(len(starts)))
    assert len(starts) > 1
    assert half.weights() == undisturbed.weights()


def test_a_job_whose_node_is_lost_comes_back_on_another_though_the_first_start_lives_on(undisturbed, half):
    head = half.start(RELAY_PAUSE="4")  # the first start is still at it when the second takes the folder
    job = half.job(head, "RUNNING").job
    half.steps(head, 1)
    node = half.cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    half.cluster.stop_daemon(f"slurmd.{node}")  # what it started goes on, and nobody can end it
    half.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
    try:
        assert head.wait() == 0, head.said()
    finally:
        half.cluster.start_daemon(f"slurmd.{node}")
        half.cluster.wait_until_idle()
    assert half.jobs_submitted() == {job}
    assert [start["restart"] for start in half.starts()] == [0, 1]
    assert half.starts()[-1]["end"] == "published"
    assert half.weights() == undisturbed.weights()


def test_where_jobs_may_not_be_requeued_a_new_one_is_submitted_away_from_the_lost_node(undisturbed, half):
    head = half.start(**SLOW, overrides="site.requeue=false")
    first = half.job(head, "RUNNING").job
    half.steps(head, 1)
    node = half.cluster.run("squeue", "-h", "-j", first, "-o", "%N").strip()
    half.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
    assert head.wait() == 0, head.said()
    half.cluster.wait_until_idle()
    assert f"NODE_FAIL: SLURM job {first} ended as NODE_FAIL" in head.said()
    record = half.record()
    assert (record.attempt, record.excluded) == (2, [node])
    assert half.jobs_submitted() == {first, record.job}
    assert half.weights() == undisturbed.weights()


def test_without_sacct_and_over_a_restart_of_the_controller(undisturbed, half):
    cluster = half.cluster
    cluster.stop_daemon("slurmdbd")
    try:
        head = half.start(**SLOW)
        job = half.job(head, "RUNNING").job
        cluster.stop_daemon("slurmctld")
        time.sleep(3)
        cluster.start_daemon("slurmctld")
        half.steps(head, 1)
        half.until(head, "the controller", lambda: cluster.run("squeue", "-h", check=False))
        cluster.run("scancel", job)
        assert head.wait() != 0
        assert "CANCELLED: SLURM job" in head.said()
        head = half.start()
        assert head.wait() == 0, head.said()
    finally:
        cluster.start_daemon("slurmdbd")
    assert half.weights() == undisturbed.weights()


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
