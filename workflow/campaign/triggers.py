"""Files by which a person speaks to a running stage: ``save`` and ``stop`` in a run's folder. Loads no framework."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workflow.campaign.plan import Plan, StageSpec

SAVE, STOP = "save", "stop"


@dataclass(frozen=True)
class Triggers:
    """What people ask of one stage. One that several runs share saves when any of them is asked to, and stops when all are."""

    folders: tuple[Path, ...]
    """Of the runs that the stage belongs to."""

    @classmethod
    def of(cls, plan: Plan, campaign: Path, spec: StageSpec) -> Triggers:
        """Those of a stage of ``plan``.

        Args:
            campaign: the campaign's folder, which holds the plan.
        """
        return cls(tuple(campaign / name for name, run in plan.runs.items() if spec.id in run.ids()))

    @property
    def save_asked(self) -> bool:
        """Whether the stage is to save its state after the step that it is in."""
        return any((folder / SAVE).exists() for folder in self.folders)

    @property
    def stop_asked(self) -> bool:
        """Whether the stage is to save and end, and not to start before the files are gone."""
        return bool(self.folders) and all((folder / STOP).exists() for folder in self.folders)

    def saved(self) -> None:
        """Done as asked: the files ``save`` go."""
        for folder in self.folders:
            (folder / SAVE).unlink(missing_ok=True)

    @property
    def way_on(self) -> str:
        """For people, after a stop."""
        files = " ".join(str(folder / STOP) for folder in self.folders)
        return f"stopped by {files}; to go on, rm {files} and run the same command"
