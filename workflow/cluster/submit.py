"""One job through submitit: our options word for word, a pickled module-level function with one string, no srun. No torch.

The batch shell becomes submitit's process (``exec``), so a signal to the batch step reaches the launcher and nobody else; and without
an srun around it the stage sees the job's own node and task counts.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError, JobPaths

from engines.config import ConfigError
from workflow.campaign.site import UNKNOWN, SiteConfig
from workflow.cluster.launcher import launch
from workflow.cluster.placement import SbatchRequest
from workflow.cluster.slurm import SlurmUnavailable, failure, inherited


class _Executor(submitit.SlurmExecutor):
    """submitit's executor with the text of the batch script from the placement."""

    def __init__(self, folder: Path, request: SbatchRequest, preamble: str, guard: Path) -> None:
        super().__init__(folder=folder / "%j", python='exec "$launcher"')
        self._request, self._preamble, self._guard = request, preamble, guard

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._request.text(f"{self._preamble}{command}\n")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # Held by sbatch itself, so that a new head can tell whether one is still under way for a head that was killed.
        return [*without_allocation(), "flock", str(self._guard), "sbatch", str(submission_file_path)]


def submit(request: SbatchRequest, task: str, folder: Path, preamble: str, guard: Path) -> str:
    """Submit the launcher with ``task`` and return the job's id.

    Args:
        task: JSON of a :class:`workflow.cluster.launcher.Task`.
        folder: for submitit's files, seen by all nodes.
        preamble: see :func:`preamble`.
        guard: file that is locked for as long as sbatch runs.

    Raises:
        SlurmUnavailable, SlurmLimit: later it may work.
        SlurmRefused: with sbatch's reason.
    """
    try:
        return _Executor(folder.absolute(), request, preamble, guard).submit(launch, task).job_id
    except FailedSubmissionError as error:  # sbatch said something that holds no id: the name will tell
        raise SlurmUnavailable(str(error)) from None
    except FailedJobError as error:
        raise failure(str(error)) from None


def without_allocation() -> list[str]:
    """The words before a command that must not know in which allocation it is called."""
    return ["env", *(f"--unset={name}" for name in inherited())]


def give_task(job: str, task: str, folder: Path) -> None:
    """Give a job its task when whoever submitted it was killed before."""
    paths = JobPaths(folder.absolute() / "%j", job)
    if not paths.submitted_pickle.exists():
        paths.folder.mkdir(parents=True, exist_ok=True)
        temporary = paths.folder / ".task.pkl"
        DelayedSubmission(launch, task).dump(temporary)
        temporary.rename(paths.submitted_pickle)


def preamble(site: SiteConfig, code: Path, folder: Path) -> str:
    """Shell lines before the launcher starts: it runs in the light environment of its CPU architecture, from the copy of the source.

    Raises:
        ConfigError: a launcher venv is unknown.
    """
    if UNKNOWN in site.launcher.values():
        raise ConfigError(
            f"site {site.name!r}: launcher is unknown for {', '.join(site.launcher)}; set its venv"
        )
    cases = [
        f"  {arch}) launcher={shlex.quote(venv)}/bin/python ;;"
        for arch, venv in sorted(site.launcher.items())
    ]
    return "\n".join(
        [
            "trap '' USR2  # ignored until the launcher listens",
            f"cd {shlex.quote(str(folder))} || exit 1",
            f"launcher={shlex.quote(sys.executable)}",
            *(['case "$(uname -m)" in', *cases, "esac"] if cases else []),
            f"export PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(code))} SUBMITIT_EXECUTOR=slurm",
            "",
        ]
    )
