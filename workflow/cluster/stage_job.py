"""A stage on its way through SLURM: its command, its job, and how it failed. No torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from engines.config import ConfigError
from workflow.campaign.plan import StageSpec
from workflow.cluster.jobs import JobFolder, JobRecord
from workflow.cluster.states import RETRIED, UNKNOWN, FailureClass, JobState


@dataclass
class Failure:
    """A stage's job ended without a manifest."""

    kind: FailureClass
    message: str
    """With the last lines of the job's log, and where it is."""

    @property
    def retry(self) -> bool:
        """Whether a new job can help."""
        return self.kind in RETRIED


@dataclass(eq=False)
class StageJob:
    """A stage that is to be published by a SLURM job."""

    spec: StageSpec
    step: int | None
    command: StageCommand
    walltime_seconds: int | None
    retried: bool
    """Whether this head has already had a job for it that failed."""
    folder: JobFolder
    record: JobRecord | None = None
    submitted: bool = False
    state: JobState = field(default_factory=lambda: JobState(UNKNOWN))
    not_before: float = 0.0
    """Monotonic time of the next try to submit."""
    waits: int = 0
    said: str = ""
    """Why it waits, when that was said already."""
    missed: str = ""
    """Name of a job that SLURM has said not to have."""
    ended: float | None = None
    """When it was first seen to have ended without a reason so far."""
    outcome: Failure | bool | None = None
    """None while it goes on; True when published."""

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.spec.stage} {self.spec.name}" + ("" if self.step is None else f" step {self.step}")


@dataclass(frozen=True)
class StageCommand:
    """A rule's shell command, taken apart: ``NAME=VALUE ... python -m workflow.stages ...``."""

    variables: dict[str, str]
    arguments: list[str]

    @classmethod
    def read(cls, shell: str) -> StageCommand:
        """Take a rule's command apart.

        Raises:
            ConfigError: it is no stage's command.
        """
        words = shlex.split(shell)
        variables = {}
        while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words[1:3] != ["-m", "workflow.stages"]:
            raise ConfigError(
                f"not the command of a stage: {shell!r}; a rule that runs no stage needs localrule: True"
            )
        return cls(variables, words[1:])
