"""What must be equal and what must be in order after a campaign was disturbed. Each finding is a line for a person."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from workflow.campaign.plan import Plan, StageSpec
from workflow.compare import NotComparable, compare, find_pairs
from workflow.drill.campaign import Campaign
from workflow.drill.evidence import starts
from workflow.drill.processes import drivers, wait_gone, working_in
from workflow.drill.watch import PUBLISHED, last_start
from workflow.manifest import ManifestError, read_manifest, verify
from workflow.rl.metrics import METRICS_FILE, SFT_CURVE_FILE, read_metrics

CLOCK = 0.05
"""Seconds by which the ends of starts may be noted late."""
LEAVING = 10.0
"""Seconds in which what the last head started must be gone."""


def problems(campaign: Campaign, reference: Campaign) -> list[str]:
    """Everything by which a disturbed campaign differs from the one that was left alone, or is not in order."""
    plan = campaign.plan()
    if plan.digest != reference.plan().digest:
        return [f"the plan is {plan.digest}, the reference's is {reference.plan().digest}"]
    found = [*_results(campaign, reference, plan)]
    for spec in plan.stages.values():
        found += step_problems(campaign.folder, spec)
        found += start_problems(campaign.folder, spec)
    return [*found, *_leftovers(campaign), *_locks(campaign)]


def _results(campaign: Campaign, reference: Campaign, plan: Plan) -> Iterator[str]:
    """Every published byte, the curves, and what was published with what it came from."""
    folders = [side.folder / "results" / plan.campaign for side in (reference, campaign)]
    try:
        pairs = find_pairs(*folders)
    except (ManifestError, NotComparable) as error:
        yield str(error)
        return
    for pair in pairs:
        known = pair.ours or pair.theirs
        for finding in compare(pair).findings:
            if finding.verdict != "equal":
                yield f"{known.name}: {finding.part} {finding}"
        if pair.ours and pair.theirs and pair.ours.manifest.digest != pair.theirs.manifest.digest:
            yield f"{known.name}: its published files differ"
    yield from verify(*(pair.theirs.path for pair in pairs if pair.theirs)).problems


def step_problems(folder: Path, spec: StageSpec) -> Iterator[str]:
    """No step is lost, and none stands twice."""
    name = {"train": METRICS_FILE, "sft": SFT_CURVE_FILE}.get(spec.stage)
    if name is None:
        return
    steps = [line["step"] for line in read_metrics(folder / spec.folder / name)]
    if steps != list(range(1, spec.steps + 1)):
        yield f"{spec.stage} {spec.name}: {name} has the steps {steps}, not 1 to {spec.steps}, each once"


def start_problems(folder: Path, spec: StageSpec) -> Iterator[str]:
    """Starts are counted without a gap, one alone has published, and never did two work at a time."""
    for step in spec.cuts or [None]:
        what = f"{spec.stage} {spec.name}" + ("" if step is None else f" to step {step}")
        try:
            attempts = read_manifest(folder / spec.manifest(step)).attempts
        except ManifestError:
            continue  # said already
        if [attempt.number for attempt in attempts] != list(range(1, len(attempts) + 1)):
            yield f"{what}: its starts are numbered {[attempt.number for attempt in attempts]}"
        ends = [attempt.end for attempt in attempts]
        if ends[-1:] != ["published"] or "published" in ends[:-1]:
            yield f"{what}: its starts ended as {ends}: the last one and no other has published"
    working: list[tuple[float, float]] = []
    begun: dict[tuple, float] = {}
    for line in starts(folder / spec.folder):
        key = (line["segment"], line["number"])
        if "begun" in line:
            if key in begun:
                yield f"{spec.stage} {spec.name}: start {key[1]} of the segment to {key[0]} began twice"
            begun[key] = line["begun"]
        # A second end, withdrawn, is said of a start whose result was damaged later; it takes no time.
        if line.get("end", "killed") not in ("killed", "withdrawn") and key in begun:
            working.append((begun[key], begun[key] + line["seconds"]))
    working.sort()
    for (_, end), (after, _) in itertools.pairwise(working):
        if after < end - CLOCK:
            yield f"{spec.stage} {spec.name}: two starts worked at the same time"


def _leftovers(campaign: Campaign) -> Iterator[str]:
    """Nothing of what was interrupted is left: no process, no living one's lock, no record of a failure, no half-written state."""
    for driver in drivers(campaign.folder):
        yield f"{driver}: {driver.process} still holds its lock"
    for process in wait_gone(working_in(campaign.folder), LEAVING):
        yield f"{process} is left: {process.command[:100]}"
    yield from _files(campaign, "store/train/*/.step*", "store/*/*/failure*.json")


def _locks(campaign: Campaign) -> Iterator[str]:
    """A start that came to its end has given up its lock. Killed after it published and before that, it leaves one that nobody needs."""
    for lock in sorted((campaign.folder / "results").glob("store/*/*/lock.json")):
        if PUBLISHED in last_start(lock.parent):  # what a start says last
            yield f"{lock.relative_to(campaign.folder)} is left"


def _files(campaign: Campaign, *patterns: str) -> Iterator[str]:
    for pattern in patterns:
        for path in sorted((campaign.folder / "results").glob(pattern)):
            yield f"{path.relative_to(campaign.folder)} is left"
