"""Megatron's ranks behind a worker group: what they learn, sample and save is what one rank of another engine does."""

import dataclasses

import torch

from engines.config import LayoutConfig
from engines.workers.group import build_groups
from tests.support.models import save_tiny_model
from tests.workers import scenario


def test_two_tensor_parallel_ranks_learn_what_one_rank_learns(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    layout = LayoutConfig(tensor_parallel_size=2, sequence_parallel=True)
    with (
        build_groups(scenario.specs(model, backend="megatron", layout=layout))["actor"] as group,
        build_groups(scenario.specs(model))["actor"] as alone,
    ):
        assert group.world_size == 2
        for each in (group, alone):
            scenario.add_rollout(each, model)
        expected, got = scenario.iterate(alone), scenario.iterate(group)
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours["batch"].tokens["input_ids"], theirs["batch"].tokens["input_ids"])
            for role in ("actor", "critic"):
                scenario.compare_metrics(ours[role], theirs[role])
        scenario.check_state_moves_to_one_rank(group, alone, tmp_path / "states")


def test_an_fsdp2_actor_and_a_megatron_critic_have_processes_of_their_own(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    actor, critic = scenario.specs(model)
    engine = critic.engine.model_copy(update={"backend": "megatron"})
    groups = build_groups([actor, dataclasses.replace(critic, engine=engine)])
    try:
        assert groups["actor"] is not groups["critic"]
        groups["actor"].add_rollout(scenario.RolloutConfig(compact_every=4), model)
        batch = scenario.sample(groups["actor"])
        values = groups["critic"].infer("critic", scenario.border(batch))["values"].values()
        with build_groups(scenario.specs(model))["critic"] as alone:
            expected = alone.infer("critic", scenario.border(batch))["values"].values()
        assert torch.allclose(values, expected, atol=2e-5)
    finally:
        for group in groups.values():
            group.shutdown()


def test_reset_starts_the_optimizer_anew_and_keeps_the_weights(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    with build_groups(scenario.specs(model, backend="megatron"))["actor"] as group:
        scenario.add_rollout(group, model)
        scenario.iterate(group, steps=1)
        worker = group._host._workers["actor"]
        weights = {name: tensor.clone() for name, tensor in worker.weights()}
        group.reset("actor")
        assert all(torch.equal(tensor, weights[name]) for name, tensor in worker.weights())
        with worker.engine.train_mode():
            state = worker.engine.sharded_state()
        assert not any(shard.local.any() for name, shard in state.items() if name.startswith("optimizer."))
        assert worker.engine.scalar_state() == {"scheduler_step": 0}
