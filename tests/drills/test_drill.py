"""Drills: the campaign that is left alone and the one under faults, on this machine; and that a drill can fail."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import yaml

from workflow.drill.campaign import Campaign
from workflow.drill.faults import Signal, driver_processes
from workflow.drill.run import Drill, Record
from workflow.drill.watch import SAVE

SMALL = {
    "name": "small",
    "segments": 1,  # left alone, it never loads a state
    "common": [
        *("model=micro-qwen3", "data.train_size=16", "data.heldout_size=8", "evaluate.problems=8"),
        *("sft.steps=2", "sft.batch_size=4", "sft.demonstrations=16", "rollout.max_new_tokens=8"),
        *(
            "algorithm=grpo",
            "algorithm.steps=6",
            "algorithm.prompts_per_step=4",
            "algorithm.samples_per_prompt=2",
        ),
        *("algorithm.mini_batch_size=8", "algorithm.lr=1e-3", "algorithm.entropy_coefficient=0.01"),
        "checkpoint.save_every=1",
    ],
    "runs": {"grpo": []},
}


@dataclass
class SmallCampaign(Campaign):
    """Without a workflow engine, and with a defect if one is named."""

    defect: str = "none"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.drills.head", *self.words, self.defect]


def small_drill(folder: Path, defect: str) -> Record:
    """A drill that asks the training to stop while it saves, so that another process goes on."""
    campaign = folder / "small.yaml"
    campaign.write_text(yaml.safe_dump(SMALL))
    stop = Signal("SIGTERM to the driver", signal.SIGTERM, driver_processes)
    return Drill(
        words=[str(campaign)],
        kills=1,
        seed=0,
        output=folder / "drill",
        faults=lambda how: [stop],
        make=partial(SmallCampaign, defect=defect),
        phases=[SAVE],
        aimed=1,
        share_in_time=0,
    ).run()


def test_what_goes_on_as_it_should_passes(tmp_path):
    record = small_drill(tmp_path, "none")
    assert (record.passed, len(record.hits)) == (True, 1), record
    assert len(record.phases["save"]) == 6
    assert not (tmp_path / "drill" / "disturbed1").exists()


@pytest.mark.parametrize(
    ("defect", "told"),
    [
        ("optimizer_is_not_restored", "train micro-qwen3-sorting-grpo step 6: optimizer different"),
        ("last_step_is_done_again", "train micro-qwen3-sorting-grpo step 6: samples different"),
    ],
)
def test_a_planted_defect_is_found(tmp_path, defect, told):
    record = small_drill(tmp_path, defect)
    assert not record.passed
    problems = record.rounds[-1].problems
    assert any(problem.startswith(told) for problem in problems), problems
    assert (tmp_path / "drill" / "disturbed1").exists()  # to be looked at
