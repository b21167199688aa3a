"""The head as a small job, for sites whose login nodes end long processes. No torch.

Before its time limit the job ends its head and requeues itself; the next start finds the campaign's jobs again, as after any kill.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from workflow.campaign.code import source_root
from workflow.campaign.site import SiteConfig
from workflow.cluster.jobs import FOLDER
from workflow.cluster.placement import PREFIX, place
from workflow.cluster.slurm import slurm
from workflow.cluster.states import StateWatch, find_jobs
from workflow.cluster.submit import preamble, without_allocation
from workflow.manifest import write_text

_SCRIPT = """\
export PYTHONPATH="$PYTHONPATH:."
"$launcher" -m snakemake --profile slurm --config {options} &
head=$!
leave() {{ kill -KILL "$head"; until scontrol requeue "$SLURM_JOB_ID"; do sleep 5; done; sleep 60; }}
trap leave USR2
wait "$head"
"""


def submit_head(campaign: str, options: Sequence[str], site: SiteConfig, results: Path) -> tuple[str, bool]:
    """Submit the head of a campaign, unless it is there. Returns the job's id, and whether it is new.

    Args:
        options: of ``snakemake --config``, one word each.

    Raises:
        ConfigError: the site does not say where its jobs for the device key cpu go.
        SlurmUnavailable, SlurmLimit, SlurmRefused: with what SLURM said.
    """
    campaign = Path(campaign).stem
    here = hashlib.sha256(str(Path.cwd()).encode()).hexdigest()[:8]
    name = f"{PREFIX}:head:{campaign}:{here}"
    for job, state in StateWatch().query(find_jobs(name)).items():
        if not state.final:
            return job, False
    request = place(name, "cpu", 1, site, output=head_log(campaign, results).absolute())
    script = preamble(site, source_root(), Path.cwd()) + _SCRIPT.format(options=shlex.join(options))
    path = results / FOLDER / f"head-{campaign}.sh"
    write_text(path, request.text(script))
    request.output.parent.mkdir(parents=True, exist_ok=True)
    return slurm(*without_allocation(), "sbatch", "--parsable", str(path)).strip().split(";")[0], True


def head_log(campaign: str, results: Path) -> Path:
    """Where the head writes."""
    return results / Path(campaign).stem / "head.txt"
