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
