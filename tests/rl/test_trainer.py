"""Every row of the tables, and every other choice of the objective, once through the trainer: one tiny actor in this process."""

from __future__ import annotations

import json
import math

import pytest
import torch

from engines.checkpoint import StateStore
from engines.config import AdamWConfig, EngineConfig, RolloutConfig
from engines.training.batch import PackedBatch
from engines.training.batch.weights import seq_mean_token_sum_norm
from engines.workers.group import build_groups
from engines.workers.spec import RoleSpec
from tests.support.models import save_tiny_model
from workflow.campaign.objectives import ADVANTAGES, POLICY_LOSSES
from workflow.campaign.schema import AlgorithmConfig, DataConfig, RewardConfig
from workflow.data import Problem
from workflow.rl import measure
from workflow.rl.losses import PolicyLoss, ValueLoss
from workflow.rl.rewards import Rewarder
from workflow.rl.trainer import PPOTrainer

DATA = DataConfig(name="made-up", tasks=[{"name": "number_sorting"}])
ROLLOUT = RolloutConfig(max_new_tokens=5)
SIZE = {"prompts_per_step": 2, "samples_per_prompt": 4, "mini_batch_size": 4, "epochs": 2}


class Encoder:
    """Prompts and texts straight from numbers."""

    def prompt_ids(self, data: DataConfig, problem: Problem) -> list[int]:
        return [3 + int(problem.question), 7, 9]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def parity(response: str, problem: Problem) -> float:
    """1 when the last token is even; named below as a user's function."""
    return float(int(response.split()[-1]) % 2 == 0)


def parity_or_always(response: str, problem: Problem) -> float:
    """Every second problem is solved by every response."""
    return 1.0 if int(problem.question) % 2 else parity(response, problem)


def always(response: str, problem: Problem) -> float:
    """Nothing to compare."""
    return 1.0


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """All roles in one process, and their state at the start."""
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny_model(folder, num_hidden_layers=1, eos_token_id=list(range(64)))
    engine = EngineConfig(backend="fsdp2", device="cpu", seed=0)
    frozen = engine.model_copy(update={"forward_only": True})
    optimizer = AdamWConfig().at(1e-2)
    specs = [
        RoleSpec("actor", "language_model", engine, model, optimizer, 1000),
        RoleSpec("critic", "value_model", engine, model, optimizer, 1000),
        RoleSpec("reference", "language_model", frozen, model, None, 1000),
    ]
    with build_groups(specs)["actor"] as group:
        group.add_rollout(ROLLOUT, model)
        store = StateStore(tmp_path_factory.mktemp("state"))
        begun = store.begin(0)
        shards = {role: group.save(role, begun / role) for role in ("actor", "critic")}
        yield group, store.commit(0, {}, shards)


@pytest.fixture
def trainer_of(group):
    """Makes trainers; the first one of a test finds the initial weights."""
    group, state = group
    for role in ("actor", "critic"):
        group.load(role, state)

    def make(run="run", reward=parity, overlong=None, **values):
        algorithm = AlgorithmConfig(name="test", **{**SIZE, "advantage": "grpo", **values})
        roles = ["actor", *(["critic"] if algorithm.has_critic else []), *(["reference"] if algorithm.kl.place != "none" else [])]  # fmt: skip
        function = f"tests.rl.test_trainer:{reward.__name__}"
        config = RewardConfig(kind="function", function=function, overlong=overlong or {})
        problems = [Problem(str(i), "0") for i in range(24)]
        return PPOTrainer(
            run,
            algorithm,
            ROLLOUT,
            DATA,
            problems,
            Encoder(),
            Rewarder(config, DATA),
            dict.fromkeys(roles, group),
        )

    return make


@pytest.fixture
def kept(monkeypatch):
    """Lets trainers take steps in which the actor learns nothing; returns the batches that it would have learnt from."""
    batches = []
    monkeypatch.setattr(PPOTrainer, "update_actor", lambda self, batch: batches.append(batch) or {})
    return batches


def policy(trainer):
    """What the actor says to a fixed sequence."""
    probe = PackedBatch.from_sequences({"input_ids": [torch.arange(9)], "loss_mask": [torch.ones(9)]})
    return trainer.groups["actor"].infer("actor", probe.to_tensordict())["log_probs"].values()


def learns(trainer, steps=1):
    """Take steps; metrics are finite and the policy moves."""
    before = policy(trainer)
    history = [trainer.step() for _ in range(steps)]
    for metrics in history:
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        if trainer.algorithm.old_log_probs == "recompute":
            assert abs(metrics["rollout_kl"]) < 1e-5
            assert metrics["rollout_effective_samples"] == pytest.approx(1, abs=1e-5)
    assert trainer.samples_seen >= steps * trainer.algorithm.samples_per_step
    assert (policy(trainer) - before).abs().max() > 1e-3
    return history


ROWS = {
    **{f"advantage={row.name}": {"advantage": row.name} for row in ADVANTAGES},
    **{f"policy_loss={row.name}": {"policy_loss": row.name} for row in POLICY_LOSSES},
    **{f"kl={e}": {"kl": {"place": "loss", "estimator": e, "coefficient": 0.1}} for e in ("k1+", "k2", "k3+", "abs")},
    "kl in reward": {"kl": {"place": "reward", "estimator": "k1", "coefficient": 0.1}},
    "dual clip": {"dual_clip": 3.0},
    "the rollout's log-probs": {"old_log_probs": "rollout"},
    **{f"correction={w} {b}": {"correction": {"weights": w, "bound": b}} for w in ("token", "sequence") for b in ("truncate", "mask")},
    "dynamic sampling": {"filter": {"by": "accuracy"}},
    "a user's own": {"advantage": "tests.rl.test_trainer:own_advantage", "policy_loss": "tests.rl.test_trainer:own_loss", "options": {"bonus": 2.0}},
    "a user's own of everything else": {
        "aggregation": "tests.rl.test_trainer:own_aggregation",
        "kl": {"place": "loss", "estimator": "tests.rl.test_trainer:own_divergence+", "coefficient": 0.1},
        "correction": {"weights": "tests.rl.test_trainer:own_weights", "bound": "tests.rl.test_trainer:own_bound", "reject": "tests.rl.test_trainer:own_measure"},
    },
}  # fmt: skip


def own_advantage(batch, config):
    """A third party's estimator."""
    return {"advantages": batch.tokens["loss_mask"] * config.options["bonus"]}


def own_loss(ratios, config):
    """A third party's loss."""
    return -ratios.ratio * ratios.advantages * config.options["bonus"], {"own": ratios.ratio}


def own_aggregation(mask, own, totals, max_length):
    """A third party's weights: as if each sequence were a mini-batch, and not 0 on what the policy did not write."""
    return 1 / (own * totals.sequences)


def own_divergence(log_ratio):
    """A third party's KL estimator."""
    return log_ratio.square()


def own_weights(log_weight, batch):
    """A third party's importance weights."""
    return log_weight / 2


def own_bound(weight, config):
    """A third party's bound: every token counts thrice."""
    return weight.clamp(config.low, config.high) * 3


def own_measure(log_weight, batch):
    """A third party's measure of a response: the last one of a step is far away."""
    return torch.arange(len(batch)).eq(len(batch) - 1) * 10.0


@pytest.mark.parametrize("values", ROWS.values(), ids=ROWS.keys())
def test_every_row_runs_through_the_trainer(trainer_of, values):
    metrics = learns(trainer_of(**values))[-1]
    row = AlgorithmConfig(name="test", **{**SIZE, "advantage": "grpo", **values}).surrogate
    assert ("actor/selected" in metrics) == bool(row.selects)
    assert ("actor/own" in metrics) == (row.reads is None)


def test_a_users_own_functions_are_those_that_count(trainer_of, kept):
    """The bound triples weights, the measure rejects the last response, the divergence is log r squared."""
    trainer = trainer_of(**ROWS["a user's own of everything else"])
    metrics = trainer.step()
    (batch,) = kept
    chosen = batch.tokens["loss_mask"] > 0
    assert metrics["rejected"] == 1 / trainer.algorithm.samples_per_step
    assert trainer.algorithm.aggregator.load().__code__ == own_aggregation.__code__
    torch.testing.assert_close(batch.tokens["correction"][chosen], torch.full((int(chosen.sum()),), 3.0))
    apart = batch.with_tokens(reference_log_probs=batch.tokens["old_log_probs"] - 2)
    assert measure.before_update(apart, trainer.algorithm.kl)["reference_kl"] == pytest.approx(4)


def test_an_update_is_told_what_the_configuration_says(trainer_of, monkeypatch):
    kl = {"place": "loss", "adaptive": True, "target": 1e-3, "horizon": 80, "coefficient": 0.1}
    values = {
        "advantage": "gae",
        "value_clip": 0.3,
        "aggregation": "seq-mean-token-sum-norm",
        "shuffle": True,
    }
    trainer = trainer_of(kl=kl, critic_warmup_steps=1, **values)
    told = []
    update = trainer.groups["actor"].update
    monkeypatch.setattr(
        trainer.groups["actor"],
        "update",
        lambda role, batch, loss, **how: told.append((role, loss, how)) or update(role, batch, loss, **how),
    )
    coefficients = [trainer.step()["kl_coefficient"] for _ in range(3)]
    assert [role for role, _, _ in told] == ["critic", *["critic", "actor"] * 2]
    assert told[0][1] == ValueLoss(0.3)
    assert [told[i][1] for i in (2, 4)] == [PolicyLoss(trainer.algorithm, c) for c in coefficients[1:]]
    # It is steered by steps in which the policy can move, and by no others.
    assert 0 < coefficients[2] != coefficients[1] == coefficients[0] == 0.1
    keys = [how.pop("shuffle_key") for _, _, how in told]
    assert len(set(keys)) == 5
    for _, _, how in told:
        assert how == {
            "mini_batch_size": 4,
            "epochs": 2,
            "aggregation": seq_mean_token_sum_norm,
            "max_length": ROLLOUT.max_new_tokens,
        }


def test_a_selection_is_made_from_the_policy_that_each_mini_batch_meets(trainer_of, monkeypatch):
    trainer = trainer_of(policy_loss="kl_cov", covariance={"share": 0.4})
    met = []
    infer = trainer.groups["actor"].infer

    def noted(role, batch, entropy=False):
        found = infer(role, batch, entropy)
        met.append((len(PackedBatch.from_tensordict(batch)), found["log_probs"].values().clone()))
        return found

    monkeypatch.setattr(trainer.groups["actor"], "infer", noted)
    metrics = trainer.step()
    # Old log-probs of the whole batch; then one pass before each of 2 mini-batches in 2 epochs.
    assert [size for size, _ in met] == [8, 4, 4, 4, 4]
    torch.testing.assert_close(torch.cat([met[1][1], met[2][1]])[: len(met[1][1])], met[0][1][: len(met[1][1])])  # fmt: skip
    assert not torch.allclose(met[3][1], met[1][1], atol=1e-4)
    assert metrics["actor/selected"] == pytest.approx(0.4, abs=0.1)


def test_remax_compares_with_the_greedy_response(trainer_of, kept, monkeypatch):
    trainer = trainer_of(advantage="remax")
    asked = []
    generate = trainer.groups["actor"].generate

    def noted(requests, params):
        asked.append((requests, params.greedy, generate(requests, params)))
        return asked[-1][2]

    monkeypatch.setattr(trainer.groups["actor"], "generate", noted)
    trainer.step()
    batch = kept[0]
    (requests, is_greedy, _), (once, once_greedy, greedy) = asked
    assert [request.prompt_ids for request in once] == [request.prompt_ids for request in requests[::4]]
    assert (is_greedy, once_greedy) == (False, True)
    earned = [parity(str(response.token_ids[-1]), None) * response.finished for response in greedy]
    assert batch.sequences["baseline"][::4].tolist() == earned
    assert batch.sequences["baseline"].view(2, 4).eq(batch.sequences["baseline"].view(2, 4)[:, :1]).all()
    scores = torch.tensor([batch.tokens["rewards"][s:e].sum() for s, e in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)])  # fmt: skip
    last = batch.tokens["advantages"][batch.cu_seqlens[1:] - 1]
    torch.testing.assert_close(last.double(), scores - batch.sequences["baseline"])


def test_the_ratio_s_denominator_is_what_the_rollout_recorded_where_that_is_asked_for(trainer_of, kept):
    metrics = trainer_of(old_log_probs="rollout").step()
    assert torch.equal(kept[0].tokens["old_log_probs"], kept[0].tokens["rollout_log_probs"])
    # Nothing was compared, so nothing is said of an agreement.
    assert [name for name in metrics if name.startswith("rollout_")] == []
    assert any(name.startswith("rollout_") for name in trainer_of().step())


def test_a_penalty_in_the_reward_is_taken_off_every_token(trainer_of, kept, monkeypatch):
    trainer = trainer_of(advantage="remax", kl={"place": "reward", "estimator": "k1", "coefficient": 0.1})
    infer = trainer._infer

    def shifted(role, batch):
        """A reference that is half a nat away everywhere."""
        found = infer("actor", batch)
        found["log_probs"] -= 0.5 * (role == "reference")
        return found

    monkeypatch.setattr(trainer, "_infer", shifted)
    metrics = trainer.step()
    batch = kept[0]
    mask, last = batch.tokens["loss_mask"], batch.cu_seqlens[1:] - 1
    rewards = batch.tokens["rewards"] + 0.1 * 0.5 * mask
    assert rewards.sum() == pytest.approx(8 * metrics["reward"], abs=1e-4)
    rewards[last] = 0
    assert rewards.abs().max() < 1e-5
    assert metrics["reference_kl"] == pytest.approx(0.5, abs=1e-5)


def test_dynamic_sampling_draws_until_every_prompt_can_teach(trainer_of, kept):
    plain = trainer_of(run="filtered", prompts_per_step=6)
    trainer = trainer_of(run="filtered", prompts_per_step=6, filter={"by": "reward"})
    metrics, unfiltered = trainer.step(), plain.step()
    assert metrics["filter_rounds"] > 1
    assert metrics["filter_filled_up"] == 0
    filtered, all_drawn = kept
    assert len(filtered) == len(all_drawn) == 24
    per_prompt = torch.tensor([part.sum() for part in filtered.tokens["rewards"].split(filtered.lengths.tolist())]).view(6, 4)  # fmt: skip
    assert (per_prompt.amax(1) > per_prompt.amin(1)).all()
    assert filtered.sequences["group"].view(6, 4).eq(filtered.sequences["group"].view(6, 4)[:, :1]).all()
    assert len(filtered.sequences["group"].unique()) == 6
    # The first round is what is drawn without a filter; everything that was drawn is counted.
    assert trainer.samples_seen == plain.samples_seen / metrics["filter_useful"] == 24 / metrics["filter_useful"]  # fmt: skip
    assert unfiltered["reward"] != metrics["reward"]
    state = json.loads(json.dumps(trainer.state()))
    assert state["cursor"]["position"] == trainer.samples_seen // 4


def test_dynamic_sampling_gives_up_and_fills_up(trainer_of):
    trainer = trainer_of(reward=always, filter={"by": "reward", "max_rounds": 3})
    metrics = trainer.step()
    assert (metrics["filter_rounds"], metrics["filter_useful"], metrics["filter_filled_up"]) == (3, 0, 1)
    assert trainer.samples_seen == 3 * 8
    assert metrics["actor/policy_loss"] == 0


def scores_differ(batch):
    """Of each prompt, whether its four samples have different rewards."""
    scores = torch.tensor([part.sum() for part in batch.tokens["rewards"].split(batch.lengths.tolist())])
    return (scores.view(-1, 4).amax(1) > scores.view(-1, 4).amin(1)).tolist()


def advantages_of(batch):
    """Of each prompt, the largest advantage of a token, without its sign."""
    per_sample = batch.tokens["advantages"].abs().split(batch.lengths.tolist())
    return torch.stack([part.max() for part in per_sample]).view(-1, 4).amax(1).tolist()


@pytest.mark.parametrize("row", ADVANTAGES, ids=lambda row: row.name)
def test_prompts_that_fill_up_have_no_advantage_whatever_else_they_differ_in(trainer_of, kept, row):
    overlong, by = {"buffer": 5, "penalty": 0.5}, {"by": "accuracy", "max_rounds": 2}
    metrics = trainer_of(reward=always, advantage=row.name, overlong=overlong, filter=by).step()
    assert metrics["filter_filled_up"] == 1
    assert any(scores_differ(kept[0]))  # in length
    assert advantages_of(kept[0]) == [0, 0]


def test_prompts_that_fill_up_take_no_advantage_from_those_that_teach(trainer_of, kept):
    values = {"reward": parity_or_always, "prompts_per_step": 6, "overlong": {"buffer": 5, "penalty": 0.5}}
    metrics = trainer_of(filter={"by": "accuracy", "max_rounds": 2}, **values).step()
    left_out = kept[0].sequences["left_out"][::4].tolist()
    assert 0 < metrics["filter_filled_up"] == sum(left_out) / 6 < 1
    assert [advantage == 0 for advantage in advantages_of(kept[0])] == left_out


def test_rejected_responses_leave_statistics_loss_and_denominators(trainer_of, kept, monkeypatch):
    trainer = trainer_of(correction={"reject": "product", "reject_low": 0.9, "reject_high": 1.1}, kl={"place": "reward"})  # fmt: skip
    infer = trainer._infer

    def shifted(role, batch):
        """As if the rollout had computed the second response otherwise."""
        found = infer(role, batch)
        if role == "actor":
            found["log_probs"][batch.cu_seqlens[1] : batch.cu_seqlens[2]] += 1.0
        return found

    monkeypatch.setattr(trainer, "_infer", shifted)
    metrics = trainer.step()
    batch = kept[0]
    masks = [part.sum().item() for part in batch.tokens["loss_mask"].split(batch.lengths.tolist())]
    assert [i for i, m in enumerate(masks) if m == 0] == [1]
    assert metrics["rejected"] == pytest.approx(1 / 8)
    assert metrics["rollout_sequence_ratio_max"] > 2  # of all that was sampled
    rewards = batch.tokens["rewards"].split(batch.lengths.tolist())
    kept = [rewards[i].sum() for i in (0, 2, 3)]
    expected = (kept[0] - sum(kept) / 3) / (torch.stack(kept).std() + 1e-6)
    assert batch.tokens["advantages"][batch.cu_seqlens[1] - 1] == pytest.approx(expected.item(), abs=1e-5)


def test_a_step_that_rejects_everything_is_finite(trainer_of, monkeypatch):
    trainer = trainer_of(correction={"reject": "mean"}, kl={"place": "loss"})
    infer = trainer._infer
    monkeypatch.setattr(trainer, "_infer", lambda role, batch: {"log_probs": infer(role, batch)["log_probs"] + 1})  # fmt: skip
    metrics = trainer.step()
    assert metrics["rejected"] == 1
    assert all(math.isfinite(value) for value in metrics.values())


def test_adaptive_penalty_in_the_loss_moves_its_coefficient(trainer_of):
    kl = {"place": "loss", "adaptive": True, "target": 1e-3, "horizon": 80, "coefficient": 0.1, "estimator": "abs"}  # fmt: skip
    trainer = trainer_of(kl=kl)
    coefficients = [trainer.step()["kl_coefficient"] for _ in range(3)]
    assert coefficients[0] == 0.1  # in the first step the policy is the reference
    assert coefficients[1:] == pytest.approx([0.1 * 0.98, 0.1 * 0.98 * 1.02])
    assert trainer.state()["kl"] == {"coefficient": pytest.approx(0.1 * 0.98 * 1.02**2)}


@pytest.mark.parametrize("rejected", [[1], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_a_rejected_response_does_not_steer_the_coefficient(trainer_of, kept, monkeypatch, rejected):
    kl = {"place": "loss", "adaptive": True, "target": 0.75, "horizon": 80, "coefficient": 0.1, "estimator": "abs"}  # fmt: skip
    trainer = trainer_of(kl=kl, correction={"reject": "mean", "reject_low": 0.9, "reject_high": 1.1})
    infer = trainer._infer

    def shifted(role, batch):
        """A reference that is half a nat away everywhere; an actor that did not sample the rejected responses."""
        found = infer(role, batch)
        if role == "reference":
            found["log_probs"] = infer("actor", batch)["log_probs"] + 0.5
        for i in rejected:
            found["log_probs"][batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]] += 1.0
        return found

    monkeypatch.setattr(trainer, "_infer", shifted)
    trainer.step()
    lengths = [part.sum().item() for part in kept[0].tokens["loss_mask"].split(kept[0].lengths.tolist())]
    counted = [0.5 * length for length in lengths if length]
    assert len(counted) == 8 - len(rejected)
    factor = 1.0
    if counted:
        error = sum(counted) / len(counted) / 0.75 - 1
        assert 0.01 < abs(error) < 0.2
        factor += error * len(counted) / 80
    assert trainer.kl.coefficient == pytest.approx(0.1 * factor)


def test_overlong_responses_cost_something(trainer_of, kept):
    plain, penalised = trainer_of(), trainer_of(overlong={"buffer": 5, "penalty": 0.5})
    first, second = plain.step(), penalised.step()
    assert first["accuracy"] == second["accuracy"]
    assert second["reward"] < first["reward"]
