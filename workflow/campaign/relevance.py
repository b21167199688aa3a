"""Settings that cannot change anything in a given run: to set one of them is a mistake that is named, not ignored. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from engines.config import ConfigError
from workflow.campaign.hub import is_hub
from workflow.campaign.schema import RunConfig

_Test = Callable[[RunConfig], bool]
_RL_ONLY = tuple(
    f"algorithm.{key}"
    for key in (
        "prompts_per_step", "samples_per_prompt", "mini_batch_size", "epochs", "normalize_by_std", "shuffle", "aggregation", "clip_low",
        "clip_high", "entropy_coefficient", "old_log_probs", "kl", "lr", "optimizer",
    )
)  # fmt: skip

_RULES: tuple[tuple[tuple[str, ...], _Test, str], ...] = (
    (
        ("critic", "algorithm.critic_lr", "algorithm.critic_optimizer", "algorithm.critic_warmup_steps",
         "algorithm.gamma", "algorithm.gae_lambda", "algorithm.value_clip"),
        lambda run: run.algorithm.name == "ppo",
        "only algorithm=ppo has a critic",
    ),
    ((*_RL_ONLY, "actor", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.batch_size",
      "rollout.compact_every", "reward.shuffled", "reward.partial_credit", "checkpoint"),
     lambda run: run.algorithm.name != "sft", "algorithm=sft has no RL stage"),
    (("reference", "algorithm.kl.estimator", "algorithm.kl.coefficient"),
     lambda run: run.algorithm.kl.place != "none", "algorithm.kl.place=none builds no reference model"),
    (("algorithm.kl.target", "algorithm.kl.horizon"), lambda run: run.algorithm.kl.adaptive, "algorithm.kl.adaptive=false"),
    (("data.wrong_answer",), lambda run: run.data.wrong_share > 0, "data.wrong_share=0"),
    (("data.train_file", "data.heldout_file"), lambda run: not run.data.tasks, "data.tasks is set"),
    (("model.tokenizer",), lambda run: run.model.architecture is not None, "the model brings its own tokenizer"),
    (("model.trust_remote_code",), lambda run: run.model.path is not None and not is_hub(run.model.path),
     "only a model folder of your own can carry code"),
)  # fmt: skip


def irrelevant(run: RunConfig, keys: Iterable[str]) -> dict[str, str]:
    """Those of the explicitly set ``keys`` (dotted) that nothing in this run reads, and why."""
    return {
        key: why
        for key in keys
        for paths, used, why in (*_RULES, *_micro_batch_rules(key))
        if any(key == path or key.startswith(path + ".") for path in paths) and not used(run)
    }


def check_relevant(runs: Mapping[str, tuple[RunConfig, Sequence[str]]], shared: Sequence[str]) -> None:
    """Refuse settings without effect: a run's own in that run, shared ones (campaign, command line) when no run reads them.

    Args:
        runs: name -> the run and the keys that it sets itself.
        shared: keys that are set for all runs.

    Raises:
        ConfigError: naming each key and why it has no effect.
    """
    problems = [
        f"run {name!r}: {key}: has no effect, {why}"
        for name, (run, own) in runs.items()
        for key, why in irrelevant(run, own).items()
    ]
    everywhere = [irrelevant(run, shared) for run, _ in runs.values()]
    for key in everywhere[0]:
        if all(key in found for found in everywhere):
            problems.append(f"{key}: has no effect, {everywhere[0][key]}")
    if problems:
        raise ConfigError("\n".join(problems))


def _micro_batch_rules(key: str) -> list[tuple[tuple[str, ...], _Test, str]]:
    """The same two rules for the run's engine and for each role's."""
    prefix, dot, _ = key.rpartition(".")
    section, _, last = prefix.rpartition(".")
    if not dot or (last or section) != "engine":
        return []

    def dynamic(run: RunConfig) -> bool:
        engine = run.role_engine(section) if section in ("actor", "critic", "reference") else run.engine
        return engine.dynamic_micro_batches

    return [
        (
            (f"{prefix}.micro_batch_size",),
            lambda run: not dynamic(run),
            f"{prefix}.dynamic_micro_batches=true",
        ),
        (
            (f"{prefix}.token_budget", f"{prefix}.inference_token_budget"),
            dynamic,
            f"{prefix}.dynamic_micro_batches=false",
        ),
    ]
