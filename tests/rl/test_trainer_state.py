"""What a step changes is saved, what is saved is restored, and where in an epoch a run resumes changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.checkpoint import StateError, StateStore, read_state
from engines.training.batch import PackedBatch
from tests.rl.training import STEPS, tensors, train_slice, trainer_of
from workflow.campaign.slice import Slice
from workflow.rl.trainer import PPOTrainer

REWARD = ("reward.kind=function", "reward.function=tests.support.rewards:share_of_digits")
"""One in which the samples of a prompt often differ, and sometimes do not."""


@pytest.mark.parametrize("prompts", [4, 8, 12])
def test_a_run_resumes_anywhere_in_a_shuffled_epoch_and_at_its_end(model, tmp_path, prompts):
    """16 problems: epochs end every fourth step, every second step, and in the middle of steps."""
    config, _ = train_slice(tmp_path, f"algorithm.prompts_per_step={prompts}")
    whole, _ = run_whole(config, model, tmp_path)
    ends = [read_state(path)["trainer"]["cursor"] for path in sorted(whole.folder.iterdir())]
    assert {cursor["position"] for cursor in ends} == {4: {4, 8, 12, 16}, 8: {8, 16}, 12: {12, 8, 4, 16}}[
        prompts
    ]
    resumes_after_every_step(config, model, whole)


def test_a_run_with_dynamic_sampling_resumes_anywhere(model, tmp_path):
    words = ("algorithm.filter.by=reward", "algorithm.filter.max_rounds=2", *REWARD)
    config, _ = train_slice(tmp_path, "algorithm.prompts_per_step=4", *words)
    whole, history = run_whole(config, model, tmp_path)
    assert any(metrics["filter_rounds"] > 1 for metrics in history)
    assert any(0 < metrics["filter_useful"] < 1 for metrics in history)
    resumes_after_every_step(config, model, whole)


def test_a_run_with_a_correction_resumes_anywhere(model, tmp_path, monkeypatch):
    """As if the rollout had computed otherwise: some tokens are weighted, some responses rejected."""
    bounds = ("algorithm.correction.reject_low=0.9", "algorithm.correction.reject_high=1.1")
    words = ("algorithm.correction.weights=token", "algorithm.correction.reject=mean", *bounds)
    config, _ = train_slice(tmp_path, "algorithm.prompts_per_step=4", *words)
    infer = PPOTrainer._infer

    def shifted(trainer: PPOTrainer, role: str, batch: PackedBatch) -> dict[str, Any]:
        found = infer(trainer, role, batch)
        if role == "actor":
            found["log_probs"] += 0.3 * torch.sin(batch.tokens["input_ids"].float())
        return found

    monkeypatch.setattr(PPOTrainer, "_infer", shifted)
    whole, history = run_whole(config, model, tmp_path)
    assert any(0 < metrics["rejected"] < 1 for metrics in history)
    resumes_after_every_step(config, model, whole)


def run_whole(config: Slice, model: Path, folder: Path) -> tuple[StateStore, list[dict[str, Any]]]:
    """A run that nothing interrupts: its states after every step, and what each step says."""
    store, history = StateStore(folder / "whole"), []
    with trainer_of(config, model) as trainer:
        for _ in range(STEPS):
            history.append(trainer.step())
            trainer.save(store)
    return store, history


def resumes_after_every_step(config: Slice, model: Path, whole: StateStore) -> None:
    """Whichever state of the run one goes on from, its last state comes out, bit for bit."""
    expected = whole.newest()
    for step in range(1, STEPS):
        with trainer_of(config, model) as trainer:
            trainer.load(whole.newest(at_most=step))
            while trainer.steps_done < STEPS:
                trainer.step()
            last = trainer.save(StateStore(whole.folder.parent / "resumed" / str(step)))
        assert read_state(last)["trainer"] == read_state(expected)["trainer"], f"resumed after step {step}"
        assert tensors(last) == tensors(expected), f"resumed after step {step}"


def leaves(values: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def test_what_a_step_changes_is_saved_and_what_is_saved_is_restored(model, tmp_path):
    config, _ = train_slice(tmp_path)
    store = StateStore(tmp_path / "states")
    with trainer_of(config, model) as trainer:
        fresh = trainer.state()
        trainer.step()  # only the critic learns
        trainer.step()
        path = trainer.save(store)
        saved = trainer.state()
        own = own_values(trainer)
    paths = [path for path, _ in leaves(saved)]
    changed = [
        path for (path, one), (_, other) in zip(leaves(fresh), leaves(saved), strict=True) if one != other
    ]
    assert set(paths) - set(changed) == {("run",)}  # no other is what a fresh trainer has
    with trainer_of(config, model) as trainer:
        for path_in_state, value in leaves(saved):
            if path_in_state == ("run",):
                continue
            perturbed = copy.deepcopy(saved)
            place = perturbed
            for name in path_in_state[:-1]:
                place = place[name]
            place[path_in_state[-1]] = value + (type(value)(1) if not isinstance(value, str) else "x")
            trainer.load_state(perturbed)
            assert trainer.state() == perturbed, path_in_state
        trainer.load(path)
        assert trainer.state() == saved
        assert own_values(trainer) == own  # there is nothing that a step changes and that is not restored
    with trainer_of(config, model, run="another") as trainer:
        with pytest.raises(StateError, match="the state is of run a run, this is run another"):
            trainer.load(path)
        assert trainer.state() == fresh | {"run": "another"}


def own_values(trainer: PPOTrainer) -> dict[str, str]:
    """All that the trainer holds itself, as text: its fields, and theirs."""
    elsewhere = {"groups", "encoder", "rewarder", "problems"}
    found = {}
    for name, value in vars(trainer).items():
        if name not in elsewhere:
            inner = (
                {k: v for k, v in vars(value).items() if k != "_orders"}
                if name in ("cursor", "kl")
                else value
            )
            found[name] = repr(inner)
    return found
