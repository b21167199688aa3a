"""A worker group of one rank in this process, and what it promises about training, sampling and state."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.checkpoint import StateStore
from engines.config import EngineConfig
from engines.hf_checkpoint import on_disk_parameters
from engines.training.batch import PackedBatch
from engines.workers.group import InProcessGroup, build_groups
from engines.workers.host import NoRolloutError
from engines.workers.spec import RoleSpec
from tests.support.models import save_tiny_model
from tests.workers import scenario
from workflow.campaign.schema import AlgorithmConfig
from workflow.rl.batches import border
from workflow.rl.losses import PolicyLoss


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def group(model):
    groups = build_groups(scenario.specs(model))
    assert isinstance(groups["actor"], InProcessGroup)
    assert groups["actor"] is groups["critic"]
    with groups["actor"] as group:
        scenario.add_rollout(group, model)
        yield group


def test_ratio_is_one_before_the_first_update(group):
    group.sync_weights("actor")
    batch = scenario.sample(group)
    metrics = group.update(
        "actor",
        border(batch, "old_log_probs", "advantages"),
        PolicyLoss(AlgorithmConfig(name="grpo")),
        mini_batch_size=24,
    )
    total, count = metrics["ratio_deviation"]
    assert count == batch.tokens["loss_mask"].sum()
    assert total / count <= 1e-5
    again = PackedBatch.from_tensordict(group.infer("actor", border(batch))).tokens["log_probs"]
    ratio = (again - batch.tokens["old_log_probs"]).exp()[batch.tokens["loss_mask"] > 0]
    assert (ratio - 1).abs().max() > 1e-3  # the update did change the policy


def test_outputs_are_those_of_a_plain_model_in_the_order_of_the_batch(group, model):
    group.sync_weights("actor")
    batch = scenario.sample(group)
    outputs = PackedBatch.from_tensordict(group.infer("actor", border(batch))).tokens["log_probs"]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids = batch.tokens["input_ids"][start:end]
        with torch.no_grad():
            log_probs = torch.log_softmax(plain(ids[None]).logits[0] / scenario.TEMPERATURE, -1)
        expected = log_probs[:-1].gather(-1, ids[1:, None])[:, 0]
        assert torch.allclose(outputs[start + 1 : end], expected, atol=1e-5)


def test_metrics_count_every_step_and_the_learning_rate_moves(group):
    metrics = scenario.iterate(group, steps=1)[0]["actor"]
    assert metrics["loss"][1] == metrics["grad_norm"][1] == metrics["lr"][1] == 6  # 2 epochs x 3 mini-batches
    assert metrics["tokens_per_second"][0] > 0
    assert metrics["tokens_per_second"][1] == 1
    assert "mfu" not in metrics  # nobody knows a CPU's peak


def test_reset_starts_the_optimizer_anew_and_keeps_the_weights(group, model):
    first = scenario.iterate(group, steps=1)[0]
    weights = {name: tensor.clone() for name, tensor in group._host._workers["actor"].weights()}
    group.reset("actor")
    for name, tensor in group._host._workers["actor"].weights():
        assert torch.equal(tensor, weights[name])
    batch = border(first["batch"], "old_log_probs", "advantages")
    arguments = {"mini_batch_size": 8, "epochs": 2}
    after_reset = group.update("actor", batch, PolicyLoss(AlgorithmConfig(name="grpo")), **arguments)
    trained = {name: tensor.clone() for name, tensor in group._host._workers["actor"].weights()}
    # A new group that starts from the weights before that update must do the same update.
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, target in on_disk_parameters(plain).items():
        target.data.copy_(weights[name])
    plain.save_pretrained(model.parent / "before")
    group.shutdown()
    with build_groups(scenario.specs(model.parent / "before"))["actor"] as fresh:
        expected = fresh.update("actor", batch, PolicyLoss(AlgorithmConfig(name="grpo")), **arguments)
        for name, tensor in fresh._host._workers["actor"].weights():
            assert torch.equal(tensor, trained[name])
    del expected["tokens_per_second"], after_reset["tokens_per_second"]
    assert after_reset == expected


def test_a_saved_state_continues_bit_for_bit(group, model, tmp_path):
    scenario.iterate(group, steps=1)
    store = StateStore(tmp_path)
    folder = store.begin(1)
    roles = {role: group.save(role, folder / role) for role in ("actor", "critic")}
    state = store.commit(1, {}, roles)
    expected = scenario.iterate(group, steps=1)[0]
    group.shutdown()
    with build_groups(scenario.specs(model))["actor"] as resumed:
        scenario.add_rollout(resumed, model)
        for role in ("actor", "critic"):
            resumed.load(role, state)
        got = scenario.iterate(resumed, steps=1)[0]
    assert torch.equal(got["batch"].tokens["input_ids"], expected["batch"].tokens["input_ids"])
    for role in ("actor", "critic"):
        got[role].pop("tokens_per_second"), expected[role].pop("tokens_per_second")
        assert got[role] == expected[role]


def test_export_opens_and_predicts_the_same(group, model, tmp_path):
    scenario.iterate(group, steps=1)
    group.export("actor", tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert exported.dtype == torch.float32
    weights = dict(group._host._workers["actor"].weights())
    for name, tensor in on_disk_parameters(exported).items():
        assert torch.equal(tensor, weights[name])


def test_sampling_without_a_replica_is_named(model):
    spec = RoleSpec(
        "reference", "language_model", EngineConfig(backend="fsdp2", device="cpu", forward_only=True), model
    )
    with build_groups([spec])["reference"] as group, pytest.raises(NoRolloutError, match="add_rollout"):
        group.generate(scenario.requests(), scenario.PARAMS)
