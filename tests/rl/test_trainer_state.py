"""What a step changes is saved, what is saved is restored, and where in an epoch a run resumes changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from engines.checkpoint import StateError, StateStore, read_state
from tests.rl.training import STEPS, tensors, train_slice, trainer_of
from workflow.rl.trainer import PPOTrainer


@pytest.mark.parametrize("prompts", [4, 8, 12])
def test_a_run_resumes_anywhere_in_a_shuffled_epoch_and_at_its_end(model, tmp_path, prompts):
    """16 problems: epochs end every fourth step, every second step, and in the middle of steps."""
    config, _ = train_slice(tmp_path, f"algorithm.prompts_per_step={prompts}")
    whole, resumed = StateStore(tmp_path / "whole"), StateStore(tmp_path / "resumed")
    with trainer_of(config, model) as trainer:
        for _ in range(STEPS):
            trainer.step()
            trainer.save(whole)
        expected = trainer.state()
    ends = [read_state(path)["trainer"]["cursor"] for path in sorted(whole.folder.iterdir())]
    assert {cursor["position"] for cursor in ends} == {4: {4, 8, 12, 16}, 8: {8, 16}, 12: {12, 8, 4, 16}}[
        prompts
    ]
    for step in range(1, STEPS):
        with trainer_of(config, model) as trainer:
            trainer.load(whole.newest(at_most=step))
            while trainer.steps_done < STEPS:
                trainer.step()
            last = trainer.save(StateStore(resumed.folder / str(step)))
        assert read_state(last)["trainer"] == expected, f"resumed after step {step}"
        assert tensors(last) == tensors(whole.newest()), f"resumed after step {step}"


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
