"""Calls of SLURM's commands, and which of their failures pass by themselves. No torch."""

from __future__ import annotations

import os
import re
import subprocess

TRANSIENT = re.compile(
    r"timed out|unable to contact|unable to establish|connection (refused|failure|reset)|zero bytes|temporarily"
    r"|try again|not responding|persistent connection|problem talking to the database|bad authentication|munge",
    re.IGNORECASE,
)
"""A daemon that is down, restarting or busy."""
NO_SUCH_JOB = re.compile(r"invalid job id|job.* not found", re.IGNORECASE)
LIMIT = re.compile(
    r"MaxSubmit|MaxJobCount|submit limit|violates accounting/QOS|job array index", re.IGNORECASE
)
"""More jobs than one may have queued: it passes as jobs end."""


class SlurmUnavailable(RuntimeError):
    """SLURM does not answer now; asking later may help."""


class SlurmLimit(RuntimeError):
    """As many jobs are queued as one may have; asking later helps."""


class SlurmRefused(RuntimeError):
    """SLURM said no."""


class NoSuchJob(SlurmRefused):
    """SLURM answers, and does not know the job (any more)."""


def slurm(*command: str, timeout: float = 60.0) -> str:
    """Standard output of one of SLURM's commands.

    Raises:
        SlurmUnavailable, SlurmLimit, NoSuchJob, SlurmRefused: with what the command said.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except FileNotFoundError:
        raise SlurmUnavailable(f"{command[0]}: no such command on this host") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(f"{command[0]} did not answer in {timeout:g} s") from None
    if done.returncode:
        raise failure(f"{command[0]}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def failure(message: str) -> RuntimeError:
    """The exception that a command's error text stands for."""
    if NO_SUCH_JOB.search(message):
        return NoSuchJob(message)
    if LIMIT.search(message):
        return SlurmLimit(message)
    if TRANSIENT.search(message):
        return SlurmUnavailable(message)
    return SlurmRefused(message)


def inherited() -> list[str]:
    """Variables of an allocation that this process was started in: sbatch would read them as options of the new job.

    SLURM_CONF stays: it says which cluster is meant.
    """
    return [
        name
        for name in sorted(os.environ)
        if name.startswith(("SLURM_", "SBATCH_", "SRUN_")) and name != "SLURM_CONF"
    ]
