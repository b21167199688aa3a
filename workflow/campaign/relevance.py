"""Settings that cannot change anything in a given run: to set one of them is a mistake that is named, not ignored. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from engines.config import ConfigError
from workflow.campaign.hub import is_hub
from workflow.campaign.objectives import TABLES, Objective
from workflow.campaign.schema import RunConfig

_Test = Callable[[RunConfig], bool]
_RL_ONLY = tuple(
    f"algorithm.{key}"
    for key in (
        "prompts_per_step", "samples_per_prompt", "mini_batch_size", "epochs", "shuffle", "aggregation", "advantage", "policy_loss",
        "entropy_coefficient", "old_log_probs", "correction", "filter", "options", "kl", "lr", "optimizer",
    )
)  # fmt: skip

_RULES: tuple[tuple[tuple[str, ...], _Test, str], ...] = (
    (("critic",), lambda run: run.algorithm.has_critic, "only algorithm.advantage=gae (algorithm=ppo) has a critic"),
    ((*_RL_ONLY, "actor", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.batch_size",
      "rollout.compact_every", "reward.shuffled", "reward.partial_credit", "reward.overlong", "checkpoint"),
     lambda run: run.algorithm.name != "sft", "algorithm=sft has no RL stage"),
    (("reference", "algorithm.kl.estimator", "algorithm.kl.coefficient"),
     lambda run: run.algorithm.kl.place != "none", "algorithm.kl.place=none builds no reference model"),
    (("algorithm.kl.target", "algorithm.kl.horizon"), lambda run: run.algorithm.kl.adaptive, "algorithm.kl.adaptive=false"),
    (("algorithm.correction.bound", "algorithm.correction.low", "algorithm.correction.high"),
     lambda run: run.algorithm.correction.weighting is not None, "algorithm.correction.weights=none"),
    (("algorithm.correction.reject_low", "algorithm.correction.reject_high"),
     lambda run: run.algorithm.correction.rejection is not None, "algorithm.correction.reject=none"),
    (("algorithm.filter.max_rounds",), lambda run: run.algorithm.filter.by != "none", "algorithm.filter.by=none"),
    (("reward.overlong.penalty",), lambda run: run.reward.overlong.buffer > 0, "reward.overlong.buffer=0"),
    (("algorithm.options",), lambda run: None in (run.algorithm.estimator.reads, run.algorithm.surrogate.reads),
     "only a third party's algorithm.advantage or algorithm.policy_loss reads options"),
    (("checkpoint.asynchronous",), lambda run: run.checkpoint.save_every > 0,
     "checkpoint.save_every=0 saves no states inside a segment"),
    (("conversion",), lambda run: run.algorithm.name != "sft", "algorithm=sft exports nothing"),
    (("conversion.ranks", "conversion.full_logits"), lambda run: run.conversion.megatron, "conversion.megatron=false"),
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
        for paths, used, why in (*_RULES, *_objective_rules(run), *_micro_batch_rules(key))
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


def _objective_rules(run: RunConfig) -> list[tuple[tuple[str, ...], _Test, str]]:
    """What only some rows of the tables read, unless the rows that the run has do."""
    algorithm = run.algorithm
    if algorithm.name == "sft":
        keys = tuple(f"algorithm.{key}" for table in TABLES.values() for row in table for key in _keys(row))
        return [(keys, lambda _: False, "algorithm=sft has no RL stage")]
    chosen = {}
    if algorithm.correction.weighting is not None:
        chosen["correction.bound"] = algorithm.correction.bounding
    given_the_section = {"advantage": algorithm.estimator, "policy_loss": algorithm.surrogate}
    if all(row.reads is not None for row in given_the_section.values()):  # else they may read any key
        chosen |= given_the_section
    return [
        (
            tuple(f"algorithm.{key}" for other in TABLES[table] for key in _keys(other) if key not in _keys(row)),
            lambda _, row=row: row.reads is None,
            f"algorithm.{table}={row.name} does not read it",
        )
        for table, row in chosen.items()
    ]  # fmt: skip


def _keys(row: Objective) -> tuple[str, ...]:
    return row.reads or ()


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
