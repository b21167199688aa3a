"""All that can be known to be wrong before anything is submitted: sizes, files, prompts, free disk. Loads no framework."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

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
    missing = [
        spec
        for spec in plan.stages.values()
        if not Path(spec.manifest(spec.cuts[-1] if spec.cuts else None)).exists()
    ]
    needed = sum(spec.forecast_bytes for spec in missing)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise DiskFull(
            f"{folder}: the campaign is expected to write {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "free some disk, or keep fewer states (checkpoint.retain)"
        )


def check_data(runs: Iterable[PlannedRun]) -> None:
    """Read or generate every problem, and measure every prompt with the tokenizer it will meet.

    A tokenizer inside a package is known only after ``convert``; there the supervised stage refuses a long prompt.

    Raises:
        ConfigError: a sequence does not fit the token budget or the model.
        DataError, RowError, PromptError: from the data itself.
    """
    seen: list[tuple[DataConfig, ModelConfig, int]] = []
    longest = 0
    for planned in runs:
        run = planned.config
        key = (run.data, run.model, run.seed if run.model.architecture else 0)
        if key not in seen:
            seen.append(key)
            longest = _longest_prompt(run)
        _check_budgets(run, longest)


def _longest_prompt(run: RunConfig) -> int:
    """Tokens of the longest prompt; every demonstration is spelled too."""
    splits = [load_problems(run.data, split) for split in ("train", "heldout")]
    if run.model.package is not None:
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if run.model.path is None else Path(run.model.path)
        if run.model.tokenizer is not None:
            texts = tokenizer_texts(run.data, CHAT_TEMPLATE)
            try:
                save_tokenizer(train_tokenizer(texts, run.model.tokenizer.vocab_size), folder)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        encoder = PromptEncoder(folder)
        try:
            longest = max(len(encoder.prompt_ids(run.data, p)) for problems in splits for p in problems)
            for problem in splits[0][: run.sft.demonstrations]:
                encoder.answer_ids(demonstration(run.data, problem))
        except PromptError as error:
            raise ConfigError(str(error).replace(f"{folder}", "model")) from None
    return longest


def _check_budgets(run: RunConfig, longest: int) -> None:
    response = run.rollout.max_new_tokens
    for role in ("actor", "critic", "reference"):
        engine = run.role_engine(role)
        budget = min(engine.token_budget, engine.inference_token_budget or engine.token_budget)
        if engine.dynamic_micro_batches and longest + response > budget:
            raise ConfigError(
                f"{role}.engine: a prompt of {longest} tokens and rollout.max_new_tokens={response} are more than the "
                f"token budget of {budget}"
            )
    room = (run.model.architecture or {}).get("max_position_embeddings")
    if room is not None and longest + response > room:
        raise ConfigError(
            f"a prompt of {longest} tokens and rollout.max_new_tokens={response} are more than "
            f"model.architecture.max_position_embeddings={room}"
        )
