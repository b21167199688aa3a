"""A head that takes little: all stages of a campaign, one after the other, as forks of one process that has imported torch.

``python -m tests.drills.head CAMPAIGN DEFECT``, in the folder of the campaign. ``DEFECT`` names a function of this module that
breaks the stages before they run.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo

import workflow.stages.convert
import workflow.stages.evaluate
import workflow.stages.export
import workflow.stages.sft
import workflow.stages.train  # noqa: F401 - to be forked
from tests.support.processes import fork
from workflow.campaign.build import make_plan
from workflow.campaign.code import source_root
from workflow.campaign.plan import CURRENT, RESULTS, StageSpec, write_plan
from workflow.campaign.schema import CampaignOptions
from workflow.campaign.view import write_view
from workflow.rl.filtering import Samples
from workflow.rl.trainer import PPOTrainer
from workflow.stages.runner import PUBLISHED, run


def none() -> None:
    """The stages as they are."""


def optimizer_is_not_restored() -> None:
    """Training goes on with the weights of the state and a new optimizer."""
    load = PPOTrainer.load

    def broken(self: PPOTrainer, folder: Path) -> None:
        load(self, folder)
        self.groups["actor"].reset("actor")

    PPOTrainer.load = broken


def data_begin_anew() -> None:
    """Training goes on with the first problems of the first epoch."""
    load = PPOTrainer.load_state

    def broken(self: PPOTrainer, state: dict) -> None:
        load(self, state | {"cursor": {"epoch": 0, "position": 0}})

    PPOTrainer.load_state = broken


def killed_in_a_refill() -> None:
    """Training is killed when dynamic sampling has answers to more prompts, once in step 2 and once in step 5."""
    sample = PPOTrainer.sample_round

    def broken(self: PPOTrainer, prompts: int, number: int, *more: object) -> Samples:
        found = sample(self, prompts, number, *more)
        mark = Path(f"killed-in-step{self.steps_done + 1}")
        if number > 0 and self.steps_done + 1 in (2, 5) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    PPOTrainer.sample_round = broken


def main() -> int:
    """All that is not published yet; 1 as soon as something fails."""
    torch.set_num_threads(1)
    campaign, defect = sys.argv[1:]
    globals()[defect]()
    plan, _ = make_plan(CampaignOptions(campaign=campaign, site="local"), source_root())
    path = write_plan(plan, RESULTS / plan.campaign)
    current = path.with_name(CURRENT)
    if not current.is_symlink():
        current.symlink_to(path.name)
    for spec in plan.stages.values():
        for step in spec.cuts or [None]:
            process = fork(_stage, spec, path, step)
            process.join()
            if process.exitcode != PUBLISHED:
                return 1
    for name in plan.runs:
        write_view(plan, path, name)
    return 0


def _stage(spec: StageSpec, plan: Path, step: int | None) -> None:
    os._exit(run(spec.stage, plan, spec.id, step))


if __name__ == "__main__":
    sys.exit(main())
