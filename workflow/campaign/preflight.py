"""All that can be known to be wrong before anything is submitted: sizes, files, prompts, free disk. Loads no framework."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engines.architectures import max_positions
from engines.config import ConfigError
from workflow.campaign.build import PlannedRun
from workflow.campaign.plan import Plan
from workflow.campaign.schema import DataConfig, ModelConfig, RunConfig, TrackingConfig
from workflow.data import (
    PromptEncoder,
    PromptError,
    demonstration,
    load_problems,
    save_tokenizer,
    tokenizer_texts,
    train_tokenizer,
)
from workflow.data.tokenizer import CHAT_TEMPLATE


class DiskFull(RuntimeError):
    """Less disk is free than the campaign is expected to write."""


def check_sizes(run: RunConfig) -> None:
    """Refuse numbers that do not fit each other.

    Raises:
        ConfigError: naming both keys.
    """
    data, algorithm = run.data, run.algorithm
    bounds = [
        ("evaluate.problems", run.evaluate.problems, "data.heldout_size", data.heldout_size),
        ("sft.demonstrations", run.sft.demonstrations, "data.train_size", data.train_size),
        ("sft.batch_size", run.sft.batch_size, "sft.demonstrations", run.sft.demonstrations),
    ]
    if algorithm.name != "sft":
        bounds.append(
            ("algorithm.prompts_per_step", algorithm.prompts_per_step, "data.train_size", data.train_size)
        )
        longest = run.rollout.max_new_tokens
        bounds.append(
            ("reward.overlong.buffer", run.reward.overlong.buffer, "rollout.max_new_tokens", longest)
        )
    for key, value, limit_key, limit in bounds:
        if value > limit:
            raise ConfigError(f"{key}={value}: more than {limit_key}={limit}")
    if run.data.tasks is None:
        for key in ("train_file", "heldout_file"):
            path = Path(getattr(data, key))
            if not path.is_file():
                raise ConfigError(f"data.{key}={str(path)!r}: no such file")


def check_trackers(run: RunConfig) -> None:
    """Refuse a tracker whose package is not installed here, where the report will be written.

    Raises:
        ConfigError: naming the key and the package.
    """
    for name in TrackingConfig.model_fields:
        if getattr(run.tracking, name) and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracking.{name}=True: the package {name} is not installed; install it or set it to false"
            )


def check_disk(plan: Plan, folder: Path) -> None:
    """Compare free disk with the bytes that the plan's unpublished stages are expected to write.

    Raises:
        DiskFull: with both numbers.
    """
    needed, free = needed_bytes(plan), free_bytes(folder)
    if needed > free:
        raise DiskFull(
            f"{folder}: the campaign is expected to write {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "free some disk, or keep fewer states (checkpoint.retain)"
        )


def needed_bytes(plan: Plan) -> int:
    """What the stages of a plan that are not published are expected to write."""
    return sum(
        spec.forecast_bytes
        for spec in plan.stages.values()
        if not Path(spec.manifest(spec.cuts[-1] if spec.cuts else None)).exists()
    )


def free_bytes(folder: Path) -> int:
    """Free disk where ``folder`` is or will be."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


@dataclass(frozen=True)
class Lengths:
    """The longest sequences of a run, in tokens; 0 where nothing is known of them."""

    train_prompt: int = 0
    heldout_prompt: int = 0
    demonstration: int = 0
    """Prompt and answer. What a function of the user answers for a weak teacher is not in it."""


NOTHING_KNOWN = Lengths()


def check_data(runs: Iterable[PlannedRun]) -> None:
    """Read or generate every problem, and measure every prompt with the tokenizer it will meet.

    A tokenizer inside a package is known only after ``convert``; there the supervised stage refuses a long prompt.

    Raises:
        ConfigError: a sequence does not fit the token budget or the model.
        DataError, RowError, PromptError: from the data itself.
    """
    measured: list[tuple[tuple[DataConfig, ModelConfig, int], Lengths]] = []
    for run in runs:
        config = run.config
        key = (config.data, config.model, config.sft.demonstrations)
        lengths = next((found for known, found in measured if known == key), None)
        if lengths is None:
            lengths = _measure(config)
            measured.append((key, lengths))
        try:
            check_budgets(run, lengths)
        except ConfigError as error:
            raise ConfigError(f"run {run.name!r}: {error}") from None


def _measure(run: RunConfig) -> Lengths:
    """Encode every prompt, and every answer that is demonstrated."""
    train, heldout = (load_problems(run.data, split) for split in ("train", "heldout"))
    if run.model.package is not None:
        return NOTHING_KNOWN
    with tempfile.TemporaryDirectory() as made:
        folder = run.model.folder or Path(made)
        if run.model.tokenizer is not None:
            texts = tokenizer_texts(run.data, CHAT_TEMPLATE)
            try:
                save_tokenizer(train_tokenizer(texts, run.model.tokenizer.vocab_size), folder)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        encoder = PromptEncoder(folder)
        rows = (run.model.architecture or {}).get("vocab_size", encoder.vocab_size)
        if rows < encoder.vocab_size:
            raise ConfigError(
                f"model.architecture.vocab_size={rows}: the tokenizer has {encoder.vocab_size} tokens; leave it out or raise it"
            )
        try:
            prompts = [len(encoder.prompt_ids(run.data, problem)) for problem in train]
            answers = [
                len(encoder.answer_ids(demonstration(run.data, problem)))
                for problem in train[: run.sft.demonstrations]
            ]
            longest_heldout = max(len(encoder.prompt_ids(run.data, problem)) for problem in heldout)
        except PromptError as error:
            raise ConfigError(str(error).replace(f"{folder}", "model")) from None
    demonstrated = prompts[: len(answers)]
    together = max(map(sum, zip(demonstrated, answers, strict=True)))
    if run.data.wrong_share:  # a weak teacher may give another problem's answer
        together = max(demonstrated) + max(answers)
    return Lengths(max(prompts), longest_heldout, together)


def check_budgets(run: PlannedRun, lengths: Lengths = NOTHING_KNOWN) -> None:
    """Refuse sequences that are longer than the model's positions, or than the micro-batches of an engine that sees them.

    Raises:
        ConfigError: naming the keys.
    """
    config = run.config
    shown = f"a demonstration of {lengths.demonstration} tokens with its prompt"
    sampled, sampled_text = _sampled(lengths.train_prompt, config.rollout.max_new_tokens, "rollout")
    section = "rollout" if config.evaluate.max_new_tokens is None else "evaluate"
    evaluated = _sampled(lengths.heldout_prompt, getattr(config, section).max_new_tokens, section)
    learns = config.algorithm.name != "sft"
    sequences = [(lengths.demonstration, shown), evaluated, *([(sampled, sampled_text)] if learns else [])]
    room = max_positions(run.model.config)
    for tokens, text in sequences:
        if room is not None and tokens > room:
            raise ConfigError(f"{text}: more than max_position_embeddings={room} of {run.model.source}")
    for path in run.devices:
        role = path.rpartition(".")[0]
        engine = config.role_engine(role) if role else config.engine
        tokens, text = (sampled, sampled_text) if role else (lengths.demonstration, shown)
        budget = engine.token_budget
        if role:
            budget = min(budget, engine.inference_token_budget or budget)
        if engine.dynamic_micro_batches and tokens > budget:
            raise ConfigError(f"{path}: {text}: more than the token budget of {budget}")


def _sampled(prompt: int, response: int, section: str) -> tuple[int, str]:
    text = f"a prompt of {prompt} tokens and " if prompt else ""
    return prompt + response, f"{text}{section}.max_new_tokens={response}"
