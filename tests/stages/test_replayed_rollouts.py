"""Layouts that change in the middle of a run, judged on equal samples: what the run with one layout drew is replayed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.checkpoint import StateStore
from engines.rollout.base import Response
from engines.workers.group import WorkerGroup
from tests.stages.test_relay_of_layouts import planned
from tests.support.jobs import finish
from workflow.campaign.plan import write_plan
from workflow.campaign.slice import Slice
from workflow.stages import train

STEPS = 6
RELAY = "actor.relay=[{after: 2, layout: {pipeline_parallel_size: 2}}, {after: 4, layout: {data_parallel_size: 2}}]"


@dataclass
class Recorder:
    """An actor's group whose samples are kept by key, and are taken from there when ``replay`` is set."""

    group: WorkerGroup
    responses: dict[int, Response]
    replay: bool
    own: dict[int, Response] = field(default_factory=dict)
    """What the actor itself drew."""

    def __getattr__(self, name):
        return getattr(self.group, name)

    def generate(self, requests, params):
        drawn = self.group.generate(requests, params)
        self.own.update({request.key: response for request, response in zip(requests, drawn, strict=True)})
        if not self.replay:
            self.responses.update(self.own)
        return [self.responses[request.key] for request in requests]


@contextmanager
def trainer_of(spec, model: Path, step: int, responses: dict[int, Response], replay: bool):
    """The trainer of the segment that ends at ``step``, and its recorder."""
    config = Slice(spec.stage, spec.config)
    with train.worker_groups(config, model, step) as groups:
        recorder = Recorder(groups["actor"], responses, replay)
        context = SimpleNamespace(config=config, spec=spec, input_path=lambda _: model.parent)
        yield train.new_trainer(context, {**groups, "actor": recorder}), recorder


def test_on_equal_samples_every_step_is_the_same_in_every_layout(tmp_path, monkeypatch):
    plan = planned(tmp_path, relay=RELAY, further=[f"algorithm.steps={STEPS}", "algorithm.lr=1e-3"])
    frozen = write_plan(plan, tmp_path / "results" / "layouts")
    for name in ("convert", "sft"):
        spec = plan.stages[plan.runs["relay"].stages[name]]
        finish(tmp_path, frozen, name, spec.id, None)
    monkeypatch.chdir(tmp_path)
    model = tmp_path / spec.output_folder() / "model"
    unchanged, relay = (plan.stages[plan.runs[run].stages["train"]] for run in ("unchanged", "relay"))
    assert relay.cuts == [2, 4, STEPS]

    responses: dict[int, Response] = {}
    store, ours = StateStore(tmp_path / "unchanged"), []
    with trainer_of(unchanged, model, STEPS, responses, replay=False) as (trainer, _):
        for _ in range(STEPS):
            ours.append(trainer.step())
            if trainer.steps_done == 2:
                state = trainer.save(store)

    theirs, own, store = [], {}, StateStore(tmp_path / "relay")
    for end in (4, STEPS):
        with trainer_of(relay, model, end, responses, replay=True) as (trainer, recorder):
            trainer.load(state)
            theirs += [trainer.step() for _ in range(2)]
            state = trainer.save(store)
            own |= recorder.own

    assert any(abs(step["actor/loss"]) > 1e-4 for step in ours[2:])
    for before, after in zip(ours[2:], theirs, strict=True):
        assert after["step"] == before["step"]
        assert after["reward"] == before["reward"]
        assert after["actor/loss"] == pytest.approx(before["actor/loss"], rel=1e-5, abs=1e-7)
        assert after["actor/grad_norm"] == pytest.approx(before["actor/grad_norm"], rel=1e-5)
    check_free_samples(own, responses)


def check_free_samples(own: dict[int, Response], responses: dict[int, Response]) -> None:
    """What the other layouts would have drawn by themselves: the same, up to rounding in the log-probs."""
    equal = 0
    for key, response in own.items():
        pairs = enumerate(zip(response.token_ids, responses[key].token_ids, strict=False))
        first = next((i for i, (ours, theirs) in pairs if ours != theirs), len(response.token_ids))
        equal += response.token_ids == responses[key].token_ids
        assert response.log_probs[:first] == pytest.approx(responses[key].log_probs[:first], abs=1e-5)
    # A draw falls between two tokens by a rounding error of 1e-6 about once in a million.
    assert equal >= len(own) - 1
