"""Worker groups on Ray: the same results as in one process, fast reports of failures, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch

from engines.training.batch import PackedBatch
from engines.workers.group import WorkerError, build_groups
from engines.workers.ray_group import RayGroup
from engines.workers.spec import total_ranks
from tests.support.models import save_tiny_model
from tests.support.processes import children, wait_until_gone
from tests.workers import scenario
from workflow.campaign.schema import AlgorithmConfig
from workflow.rl.batches import border
from workflow.rl.losses import PolicyLoss


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def groups(model):
    """Actor and critic on two fsdp2 ranks, and beside them, on the same Ray, one rank of another backend."""
    os.environ["RAY_ADDRESS"] = "192.0.2.1:6379"  # must be ignored: nobody is there
    third = scenario.specs(model, ranks=1, backend="fsdp")[0]
    third = type(third)(**{**vars(third), "name": "other"})
    before = set(children())
    built = build_groups([*scenario.specs(model, ranks=2), third])
    yield built
    started = set(children()) - before
    assert len(started) > 3
    for group in (built["actor"], built["other"]):
        group.shutdown()
        group.shutdown()
    assert wait_until_gone(started) == set()
    del os.environ["RAY_ADDRESS"]


def test_two_ranks_learn_what_one_rank_learns(groups, model, tmp_path):
    group = groups["actor"]
    assert isinstance(group, RayGroup)
    assert groups["critic"] is group
    assert groups["other"] is not group
    scenario.add_rollout(group, model)
    with build_groups(scenario.specs(model))["actor"] as alone:
        scenario.add_rollout(alone, model)
        expected = scenario.iterate(alone)
        got = scenario.iterate(group)
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours["batch"].tokens["input_ids"], theirs["batch"].tokens["input_ids"])
            for name, values in theirs["outputs"].items():
                assert torch.allclose(ours["outputs"][name], values, atol=2e-5), name
            for role in ("actor", "critic"):
                scenario.compare_metrics(ours[role], theirs[role])
        scenario.check_state_moves_to_one_rank(group, alone, tmp_path)


def test_every_rank_has_a_device_of_its_own_and_planning_knows_how_many(groups):
    distinct = [groups["actor"], groups["other"]]
    devices = [
        ray.get(actor.__ray_call__.remote(lambda _: os.environ["LOCAL_RANK"]))
        for group in distinct
        for actor in group._actors
    ]
    assert devices == ["0", "1", "2"]
    engines = {spec.name: spec.engine for group in distinct for spec in group.specs.values()}
    assert total_ranks(engines) == len(devices)


def test_fewer_sequences_than_ranks(groups):
    batch = small_batch(sequences=1)
    metrics = groups["actor"].update(
        "actor", batch, PolicyLoss(AlgorithmConfig(name="grpo")), mini_batch_size=1
    )
    assert metrics["ratio"][1] == 2
    outputs = PackedBatch.from_tensordict(groups["actor"].infer("actor", batch)).tokens["log_probs"]
    assert outputs.shape == (3,)


def test_an_error_on_a_rank_is_told_with_its_traceback(groups):
    loss = scenario.FailingLoss(trigger=5)
    with pytest.raises(
        WorkerError, match=r"(?s)update: rank 0 of 1 \(other\) raised.*scenario.py.*a loss that fails"
    ):
        groups["other"].update("other", small_batch(), loss, mini_batch_size=2)
    with pytest.raises(WorkerError, match="shut down since: update"):
        groups["other"].infer("other", small_batch())


def test_a_death_ends_the_call_at_once_and_names_the_dead_rank(groups):
    loss = scenario.FailingLoss(trigger=6, kill=True)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"update: rank [01] of 2 \(actor, critic\) died") as caught:
        groups["actor"].update("actor", small_batch(), loss, mini_batch_size=2)
    assert time.monotonic() - started < 30
    log = Path(str(caught.value).split("its log is ")[1].split(",")[0])
    assert log.is_file()


def small_batch(sequences=2):
    ids = [torch.tensor([3, 4, 5]), torch.tensor([3, 4, 6])][:sequences]
    fields = {"loss_mask": [0.0, 1.0, 1.0], "old_log_probs": [0.0, -1.0, -1.0], "advantages": [0.0, 1.0, 1.0]}
    tokens = {name: [torch.tensor(values)] * sequences for name, values in fields.items()}
    return border(PackedBatch.from_sequences({"input_ids": ids, **tokens}), "old_log_probs", "advantages")


DRIVER = """
import sys, time
from pathlib import Path
from tests.workers import scenario
from engines.workers.group import build_groups

group = build_groups(scenario.specs(Path(sys.argv[1]), ranks=2))["actor"]
print("ready", flush=True)
time.sleep(600)
"""


ASKED_ALL_THE_TIME = """
import os, signal, threading
from engines.workers.ray_cluster import RayCluster
asked, up = [], threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.append(up.is_set()))
def ask():
    while not up.wait(0.02):
        os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=ask, daemon=True).start()
cluster = RayCluster()
cluster.join()
up.set()
assert asked, "nobody heard"
heard = len(asked)
os.kill(os.getpid(), signal.SIGTERM)
assert len(asked) == heard + 1, "the handler was replaced"
cluster.leave(keep_logs=False)
"""


def test_a_request_to_stop_while_ray_starts_reaches_the_driver_and_aborts_nothing(tmp_path):
    said = tmp_path / "said"
    with said.open("w") as file:  # no pipe: an aborted driver's Ray would hold it
        done = subprocess.run([sys.executable, "-c", ASKED_ALL_THE_TIME], stdout=file, stderr=file)
    assert done.returncode == 0, said.read_text()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_a_killed_driver(model, signum):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(model)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    try:
        assert driver.stdout.readline() == "ready\n"
        started = set(children(driver.pid))
        assert len(started) > 4
        driver.send_signal(signum)
        driver.wait(60)
    finally:
        driver.kill()
    assert wait_until_gone(started) == set()
