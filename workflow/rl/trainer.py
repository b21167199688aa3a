"""One iteration of RL post-training, as a list of calls: read :meth:`PPOTrainer.step` first.

Notable: algorithms differ in functions that the configuration names, an advantage estimator and a policy loss. No state of a random
generator exists: what is drawn depends on (run, step, place) alone, so a run that is cut, killed and resumed anywhere
goes on as if nothing had happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.checkpoint import ShardIndex, StateError, StateStore, read_state
from engines.rollout.base import Request, Response, SamplingParams
from engines.streams import stream_key
from engines.training.batch import PackedBatch
from engines.workers.group import WorkerGroup
from workflow.campaign.schema import AlgorithmConfig, DataConfig, RolloutConfig
from workflow.data import Problem, PromptEncoder
from workflow.rl import measure
from workflow.rl.batches import border, on_last_loss_token, rollout_batch
from workflow.rl.correction import correct
from workflow.rl.filtering import (
    Samples,
    chosen_prompts,
    informative,
    with_left_out,
    without_advantage,
)
from workflow.rl.kl import KLController
from workflow.rl.losses import PolicyLoss, ValueLoss
from workflow.rl.metrics import Stopwatch
from workflow.rl.order import DataCursor
from workflow.rl.rewards import Rewarder, Scores


@dataclass
class PPOTrainer:
    """The iteration over the groups of the roles actor, critic (where there is one) and reference (with a KL penalty)."""

    run: str
    """Names all random streams: the learning identity of the training stage."""
    algorithm: AlgorithmConfig
    rollout_config: RolloutConfig
    data: DataConfig
    problems: Sequence[Problem]
    encoder: PromptEncoder
    rewarder: Rewarder
    groups: Mapping[str, WorkerGroup]
    """By role. The actor's group has a rollout."""
    steps_done: int = 0
    samples_seen: int = 0
    response_tokens: int = 0
    samples_digest: str = ""
    """SHA-256 over all token ids sampled so far, step by step: equal for runs that sampled the same."""
    kl: KLController = field(init=False)
    cursor: DataCursor = field(init=False)

    def __post_init__(self) -> None:
        self.kl = KLController.start(self.algorithm.kl)
        self.cursor = DataCursor(self.run, [problem.digest for problem in self.problems])
        self.policy_loss = PolicyLoss(self.algorithm)
        self.groups["actor"].sync_weights("actor")

    def step(self) -> dict[str, Any]:
        """One iteration; returns its metrics."""
        watch = Stopwatch()
        batch, sampled, drawn = self.samples(watch)
        with watch.part("old_log_probs"):
            batch = self.old_log_probs(batch)
        metrics = dict(drawn)
        if (
            self.algorithm.old_log_probs == "recompute"
        ):  # else there is one policy's word only, and nothing to compare
            metrics |= measure.rollout(batch)
        batch = correct(batch, self.algorithm.correction)
        with watch.part("reference"):
            batch = self.reference_log_probs(batch)
        with watch.part("values"):
            batch = self.values(batch)
        batch = batch.with_tokens(**self.algorithm.estimator.load()(batch, self.algorithm))
        if self.algorithm.filter.by != "none":
            batch = without_advantage(batch)
        with watch.part("critic"):
            critic = self.update_critic(batch)
        with watch.part("actor"):
            actor = self.update_actor(batch)
        with watch.part("sync"):
            self.groups["actor"].sync_weights("actor")
        metrics |= {
            **measure.before_update(batch, self.algorithm.kl),
            **measure.updates(actor, critic),
            "kl_coefficient": self.kl.coefficient,
        }
        self.finish(batch, sampled)
        return {"step": self.steps_done, **metrics, **measure.speed(sampled, watch)}

    def samples(self, watch: Stopwatch) -> tuple[PackedBatch, PackedBatch, dict[str, float]]:
        """What this step learns from, all that was sampled for it, and what that says of the policy.

        With dynamic sampling, prompts are drawn until enough of them can teach something, or ``max_rounds`` are over.
        """
        config, size = self.algorithm.filter, self.algorithm.samples_per_prompt
        rounds: list[Samples] = []
        useful: list[bool] = []
        missing = self.algorithm.prompts_per_step
        while missing:
            rounds.append(self.sample_round(missing, len(rounds), len(useful), watch))
            if config.by == "none":
                break
            useful += informative(rounds[-1], size, config)
            missing = self.algorithm.prompts_per_step - sum(useful)
            if len(rounds) == config.max_rounds:
                break
        sampled = Samples.concatenate(rounds)
        metrics = measure.samples(sampled.scores, sampled.responses)
        if config.by == "none":
            return sampled.batch, sampled.batch, metrics
        prompts = chosen_prompts(useful, self.algorithm.prompts_per_step)
        kept = sampled.select([prompt * size + i for prompt in prompts for i in range(size)]).batch
        metrics |= {
            "filter_rounds": len(rounds),
            "filter_useful": sum(useful) / len(useful),
            "filter_filled_up": missing / len(prompts),
        }
        kept = with_left_out(kept, [not useful[prompt] for prompt in prompts], size)
        return kept, sampled.batch, metrics

    def sample_round(self, prompts: int, number: int, first: int, watch: Stopwatch) -> Samples:
        """Responses to the next ``prompts`` problems, scored; ``number`` rounds and ``first`` prompts of the step came before."""
        with watch.part("rollout"):
            problems = self.next_problems(prompts)
            batch, responses = self.rollout(problems, first)
        # The first round of a step has the names that it had before there were others.
        key = ("reward", self.steps_done, *([number] if number else []))
        with watch.part("reward"):
            batch, scores = self.reward(batch, problems, responses, key)
        if self.algorithm.estimator.greedy:
            with watch.part("greedy"):
                batch = self.greedy_baseline(batch, problems, first)
        return Samples(batch, responses, scores)

    def next_problems(self, prompts: int) -> list[Problem]:
        """The problem of every sample of the next ``prompts``: each one ``samples_per_prompt`` times in a row."""
        indices = self.cursor.take(prompts)
        return [self.problems[i] for i in indices for _ in range(self.algorithm.samples_per_prompt)]

    def rollout(self, problems: list[Problem], first: int) -> tuple[PackedBatch, list[Response]]:
        """A response to every problem, as a batch; samples of one prompt carry the same ``group``, from ``first`` on."""
        size = self.algorithm.samples_per_prompt
        places = [(first + i // size, i % size) for i in range(len(problems))]
        prompts = self._prompts(problems)
        requests = [
            Request(prompt, stream_key(self.run, "rollout", self.steps_done, place, sample))
            for prompt, (place, sample) in zip(prompts, places, strict=True)
        ]
        responses = self.groups["actor"].generate(requests, SamplingParams.from_config(self.rollout_config))
        return rollout_batch(prompts, responses, [place for place, _ in places]), responses

    def greedy_baseline(self, batch: PackedBatch, problems: list[Problem], first: int) -> PackedBatch:
        """Adds ``baseline`` per sequence: what the likeliest response to its prompt would earn."""
        size = self.algorithm.samples_per_prompt
        asked = problems[::size]
        requests = [
            Request(prompt, stream_key(self.run, "greedy", self.steps_done, first + place))
            for place, prompt in enumerate(self._prompts(asked))
        ]
        params = SamplingParams.from_config(self.rollout_config, greedy=True)
        scores = self._score(
            asked, self.groups["actor"].generate(requests, params), ("greedy", self.steps_done, first)
        )
        baseline = torch.tensor(scores.rewards, dtype=torch.float64).repeat_interleave(size)
        return replace(batch, sequences={**batch.sequences, "baseline": baseline})

    def reward(
        self,
        batch: PackedBatch,
        problems: list[Problem],
        responses: list[Response],
        key: tuple[str | int, ...],
    ) -> tuple[PackedBatch, Scores]:
        """Adds ``rewards``: each response's score, on its last token."""
        scores = self._score(problems, responses, key)
        rewards = torch.tensor(scores.rewards, dtype=torch.float64)
        return batch.with_tokens(rewards=on_last_loss_token(rewards, batch)), scores

    def old_log_probs(self, batch: PackedBatch) -> PackedBatch:
        """Adds ``old_log_probs``, the denominator of the ratio."""
        if self.algorithm.old_log_probs == "rollout":
            return batch.with_tokens(old_log_probs=batch.tokens["rollout_log_probs"])
        return batch.with_tokens(old_log_probs=self._infer("actor", batch)["log_probs"])

    def reference_log_probs(self, batch: PackedBatch) -> PackedBatch:
        """Adds ``reference_log_probs`` when there is a KL penalty; takes it off the rewards when it belongs there."""
        if self.algorithm.kl.place == "none":
            return batch
        batch = batch.with_tokens(reference_log_probs=self._infer("reference", batch)["log_probs"])
        if self.algorithm.kl.place == "loss":
            return batch
        divergence = measure.divergence(batch, self.algorithm.kl) * batch.tokens["loss_mask"]
        return batch.with_tokens(rewards=batch.tokens["rewards"] - self.kl.coefficient * divergence)

    def values(self, batch: PackedBatch) -> PackedBatch:
        """Adds the critic's ``old_values``."""
        if "critic" not in self.groups:
            return batch
        return batch.with_tokens(old_values=self._infer("critic", batch)["values"])

    def update_critic(self, batch: PackedBatch) -> Mapping[str, tuple[float, float]]:
        """Train the critic, if there is one."""
        if "critic" not in self.groups:
            return {}
        return self._update(
            "critic", border(batch, "old_values", "returns"), ValueLoss(self.algorithm.value_clip)
        )

    def update_actor(self, batch: PackedBatch) -> Mapping[str, tuple[float, float]]:
        """Train the actor, once the critic has warmed up."""
        if self.steps_done < actor_starts(self.algorithm):
            return {}
        loss = replace(self.policy_loss, kl_coefficient=self.kl.coefficient)
        if not self.algorithm.surrogate.selects:
            return self._update("actor", border(batch, *loss.fields), loss)
        generator = torch.Generator().manual_seed(stream_key(self.run, "selection", self.steps_done))
        batch = batch.with_tokens(noise=torch.rand(batch.num_tokens, generator=generator))
        return self._update("actor", border(batch, *loss.fields), loss, select=loss.select)

    def finish(self, batch: PackedBatch, sampled: PackedBatch) -> None:
        """Close the step's books on what it learnt from and all that was sampled."""
        # While only the critic learns the policy stands still: its divergence says nothing of the coefficient.
        if self.algorithm.kl.place != "none" and self.steps_done >= actor_starts(self.algorithm):
            per_response = measure.response_divergence(batch, self.algorithm.kl)
            if len(per_response):
                self.kl.update(float(per_response.mean()), len(per_response))
        ids = sampled.tokens["input_ids"].numpy().tobytes()
        self.samples_digest = hashlib.sha256(self.samples_digest.encode() + ids).hexdigest()
        self.samples_seen += len(sampled)
        self.response_tokens += int(sampled.tokens["loss_mask"].sum())
        self.steps_done += 1

    def save(self, store: StateStore) -> Path:
        """Publish the state after the steps done so far."""
        roles = self.write(store.begin(self.steps_done))
        return store.commit(self.steps_done, self.state(), roles)

    def write(self, folder: Path, background: bool = False) -> dict[str, list[ShardIndex]]:
        """Write every trained role's part of a state; with ``background`` the files appear while the next steps run."""
        roles = self._trained_roles()
        return {role: self.groups[role].save(role, folder / role, background) for role in roles}

    def check_written(self, wait: bool = False) -> None:
        """Raise what kept a rank from writing its part in the background; with ``wait``, once all of them have written it."""
        for role in self._trained_roles():
            self.groups[role].check_save(role, wait)

    def load(self, folder: Path) -> None:
        """Restore all that :meth:`save` saved.

        Raises:
            StateError: the state is of another run, or damaged.
        """
        self.load_state(read_state(folder)["trainer"])
        for role in self._trained_roles():
            self.groups[role].load(role, folder)
        self.groups["actor"].sync_weights("actor")

    def state(self) -> dict[str, Any]:
        """JSON: everything that is not in a role's tensors."""
        return {
            "run": self.run,
            "steps_done": self.steps_done,
            "samples_seen": self.samples_seen,
            "response_tokens": self.response_tokens,
            "samples_digest": self.samples_digest,
            "cursor": self.cursor.state(),
            "kl": self.kl.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        if state["run"] != self.run:
            raise StateError(f"the state is of run {state['run'][:16]}, this is run {self.run[:16]}")
        self.steps_done = state["steps_done"]
        self.samples_seen = state["samples_seen"]
        self.response_tokens = state["response_tokens"]
        self.samples_digest = state["samples_digest"]
        self.cursor.load_state(state["cursor"])
        self.kl.load_state(state["kl"])

    def _trained_roles(self) -> list[str]:
        return [role for role in ("actor", "critic") if role in self.groups]

    def _prompts(self, problems: list[Problem]) -> list[list[int]]:
        distinct = {problem.digest: problem for problem in problems}
        encoded = {digest: self.encoder.prompt_ids(self.data, p) for digest, p in distinct.items()}
        return [encoded[problem.digest] for problem in problems]

    def _score(
        self, problems: list[Problem], responses: list[Response], key: tuple[str | int, ...]
    ) -> Scores:
        return self.rewarder.score(
            problems,
            [self.encoder.decode(response.token_ids) for response in responses],
            [response.finished for response in responses],
            key=stream_key(self.run, *key),
            room=[self.rollout_config.max_new_tokens - len(response.token_ids) for response in responses],
        )

    def _infer(self, role: str, batch: PackedBatch) -> dict[str, Tensor]:
        return PackedBatch.from_tensordict(self.groups[role].infer(role, border(batch))).tokens

    def _update(self, role: str, batch: Any, loss: Any, **select: Any) -> Mapping[str, tuple[float, float]]:
        config = self.algorithm
        return self.groups[role].update(
            role,
            batch,
            loss,
            mini_batch_size=config.mini_batch_size,
            epochs=config.epochs,
            shuffle_key=stream_key(self.run, "shuffle", role, self.steps_done) if config.shuffle else None,
            aggregation=config.aggregator.load(),
            max_length=self.rollout_config.max_new_tokens,
            **select,
        )


def actor_starts(algorithm: AlgorithmConfig) -> int:
    """The first step in which the actor learns."""
    return algorithm.critic_warmup_steps if algorithm.has_critic else 0


def optimizer_steps(algorithm: AlgorithmConfig, role: str) -> int:
    """Optimizer steps of ``role`` (actor or critic) in the whole run, for its learning-rate schedule."""
    iterations = algorithm.steps - (actor_starts(algorithm) if role == "actor" else 0)
    return max(iterations, 1) * algorithm.epochs * (algorithm.samples_per_step // algorithm.mini_batch_size)
