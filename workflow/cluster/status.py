"""What a campaign's jobs are doing: one row per stage and step, from manifests, the registry and SLURM. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workflow.campaign.plan import Plan, StageSpec
from workflow.cluster.jobs import JobFolder, JobRecord, published, read_start
from workflow.cluster.states import JobState, StateWatch, controller_states, last_lines

_BAR = re.compile(r"[━─]{2,} (\d+/\d+) ")


@dataclass(frozen=True)
class StatusRow:
    """One stage's job; empty text where there is nothing to say."""

    runs: str
    stage: str
    name: str
    step: str
    job: str
    state: str
    node: str
    progress: str
    restarts: str
    time_left: str
    failure: str


def campaign_status(plan: Plan, results: Path) -> list[StatusRow]:
    """Every stage of a campaign, in the plan's order; what is published needs no word from SLURM."""
    entries = list(_entries(plan, results))
    waiting = [record.job for _, _, record, done in entries if not done and record is not None and record.job]
    states = StateWatch().query(waiting)
    alive = [job for job, state in states.items() if not state.final]
    states |= {job: state for job, state in controller_states(alive).items() if not state.final}
    return [_row(plan, results, states, *entry) for entry in entries]


def _entries(plan: Plan, results: Path) -> Iterator[tuple[StageSpec, int | None, JobRecord | None, bool]]:
    for spec in plan.stages.values():
        for step in spec.cuts or [None]:
            record = JobFolder(results, spec.stage, spec.id, step).read()
            yield spec, step, record, published(spec, step)


def _row(
    plan: Plan,
    results: Path,
    states: dict[str, JobState],
    spec: StageSpec,
    step: int | None,
    record: JobRecord | None,
    done: bool,
) -> StatusRow:
    state, start, failure = None, None, ""
    if record is not None:
        state = states.get(record.job or "")
        start = read_start(JobFolder(results, spec.stage, spec.id, step).path)
        start = start if start is not None and start.job == record.job else None
        failure = "" if done else record.failure or ""
    if not done and not failure:
        failure = _own_failure(Path(spec.failure(step)))
    word = "published" if done else "" if state is None else state.state
    if state is not None and state.state == "PENDING" and state.reason:
        word += f" ({state.reason})"
    return StatusRow(
        runs=", ".join(name for name, run in plan.runs.items() if spec.id in run.ids()),
        stage=spec.stage,
        name=spec.name,
        step="" if step is None else str(step),
        job="" if record is None else record.job or "being submitted",
        state=word,
        node=(state.nodes if state else "") or (start.node if start else ""),
        progress="" if record is None else _progress(Path(record.log)),
        restarts="" if start is None else str(start.restart),
        time_left="" if state is None else state.time_left,
        failure=failure,
    )


def _progress(log: Path) -> str:
    """The newest progress bar of a job's log."""
    bars = [match[1] for line in last_lines(log, 50) if (match := _BAR.search(line))]
    return bars[-1] if bars else ""


def _own_failure(path: Path) -> str:
    """The exception of a stage that failed without a job, on this host."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["class"]
    except (OSError, ValueError, KeyError):
        return ""
