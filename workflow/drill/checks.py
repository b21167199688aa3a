"""What must be equal and what must be in order after a campaign was disturbed. Each finding is a line for a person."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from workflow.campaign.plan import Plan, StageSpec
from workflow.compare import NotComparable, compare, find_pairs
from workflow.compare.pairs import Result
from workflow.compare.results import PROVENANCE
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
        found += start_problems(campaign.folder, spec, campaign.damaged)
    return [*found, *campaign.further_problems(plan), *_leftovers(campaign), *_locks(campaign)]


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
        if pair.ours and pair.theirs and _published(pair.ours) != _published(pair.theirs):
            yield f"{known.name}: its published files differ"
    yield from verify(*(pair.theirs.path for pair in pairs if pair.theirs)).problems


def _published(result: Result) -> dict[str, object]:
    """Identity and files, but for those that say by which commit they were made: a folder may be worked in while a drill runs."""
    manifest = result.manifest
    files = {name: record for name, record in manifest.files.items() if Path(name).name not in PROVENANCE}
    return {"identity": manifest.identity, "step": manifest.step, "files": files}


def step_problems(folder: Path, spec: StageSpec) -> Iterator[str]:
    """No step is lost, and none stands twice."""
    name = {"train": METRICS_FILE, "sft": SFT_CURVE_FILE}.get(spec.stage)
    if name is None:
        return
    steps = [line["step"] for line in read_metrics(folder / spec.folder / name)]
    if steps != list(range(1, spec.steps + 1)):
        yield f"{spec.stage} {spec.name}: {name} has the steps {steps}, not 1 to {spec.steps}, each once"


def start_problems(folder: Path, spec: StageSpec, damaged: Collection[Path] = ()) -> Iterator[str]:
    """Starts are counted without a gap, one alone has published, and never did two work at a time.

    Args:
        damaged: results whose bytes a fault has damaged. Only these may be withdrawn and computed a second time.
    """
    lines = starts(folder / spec.folder)
    for step in spec.cuts or [None]:
        what = f"{spec.stage} {spec.name}" + ("" if step is None else f" to step {step}")
        if folder / spec.output_folder(step) not in damaged:
            yield from _withdrawn(what, [line for line in lines if line["segment"] == step])
        try:
            attempts = read_manifest(folder / spec.manifest(step)).attempts
        except ManifestError:
            continue  # said already
        if [attempt.number for attempt in attempts] != list(range(1, len(attempts) + 1)):
            yield f"{what}: its starts are numbered {[attempt.number for attempt in attempts]}"
        ends = [attempt.end for attempt in attempts]
        if ends[-1:] != ["published"] or "published" in ends[:-1]:
            yield f"{what}: its starts ended as {ends}: the last one and no other has published"
    yield from _two_at_a_time(f"{spec.stage} {spec.name}", lines)


def _withdrawn(what: str, lines: list[dict]) -> Iterator[str]:
    """A start that finds no valid result of an earlier one that had published says so of it, and computes everything again."""
    for number in sorted({line["number"] for line in lines if line.get("end") == "withdrawn"}):
        yield f"{what}: start {number} had published, nothing has damaged that, and it was computed again"


def _two_at_a_time(what: str, lines: list[dict]) -> Iterator[str]:
    """Of a start that was killed it is known when it began, and from its log how long it lived at least."""
    begun: dict[tuple, float] = {}
    ended: dict[tuple, float] = {}
    for line in lines:
        key = (line["segment"], line["number"])
        if "begun" in line:
            if key in begun:
                yield f"{what}: start {key[1]} of the segment to {key[0]} began twice"
            begun[key] = line["begun"]
        if (
            "seconds" in line and key in begun
        ):  # withdrawn takes no time: it is said of a start that had ended
            ended[key] = max(ended.get(key, 0.0), begun[key] + line["seconds"])
    latest = float("-inf")
    for key, at in sorted(begun.items(), key=lambda item: item[1]):
        if at < latest - CLOCK:
            yield f"{what}: two starts worked at the same time: start {key[1]} of the segment to {key[0]} began meanwhile"
        latest = max(latest, ended.get(key, at))


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
