"""What a drill found, as JSON and as a page to read."""

from __future__ import annotations

import signal
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workflow.drill.run import Drill, Record
from workflow.manifest import write_json, write_text

DISKS = {
    "tmpfs": "a filesystem of its own in memory, filled to the last bytes",
    "limit": "a limit of the size of files (no filesystem in memory: this user may mount none, or it would not fit)",
}


def reported(drill: Drill) -> Path:
    """Run a drill and write what it found, also when an error, an interrupt or SIGTERM ends it; returns the page's path."""
    before = signal.signal(signal.SIGTERM, _leave)  # a batch system's, which would leave no time
    try:
        drill.run()
    finally:
        signal.signal(signal.SIGTERM, before)
        if drill.record is not None:
            page = write_report(drill.record, drill.output)
    return page


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def write_report(record: Record, folder: Path) -> Path:
    """Write ``drill.json`` and ``drill.md``; returns the page's path."""
    write_json(folder / "drill.json", summary(record))
    page = folder / "drill.md"
    write_text(page, "\n".join(_page(record)) + "\n")
    return page


def summary(record: Record) -> dict[str, Any]:
    """All of it, JSON."""
    return {
        **asdict(record),
        "passed": record.passed,
        "hits": len(record.hits),
        "in_time": record.in_time,
        "by_kind": dict(Counter(strike.kind for strike in record.hits)),
    }


def _page(record: Record) -> Iterator[str]:
    differences = [problem for one in record.rounds for problem in one.problems]
    hits = len(record.hits)
    if record.passed:
        yield "# Drill: nothing differs"
    elif record.ended:
        yield "# Drill: ended before its time"
    else:
        yield f"# Drill: {len(differences)} differences" if differences else "# Drill: too few faults hit"
    yield ""
    yield (
        f"`{' '.join(record.words)}`, seed {record.seed}: {hits} faults that hit something, {record.in_time} of them during a "
        f"load, save or publication, in {len(record.rounds)} campaigns; {len(record.strikes) - hits} hit nothing and were drawn again."
    )
    yield ""
    yield (
        "Compared with the campaign that was left alone: every published byte (weights, optimizer states, counters, the digest of "
        "all sampled tokens), every curve, every step once, every start accounted for, nothing left behind."
    )
    yield f"The full disk was {DISKS[record.disk]}." if record.disk else ""
    yield ""
    if record.ended:
        yield f"- **ended by**: {record.ended}"
    for problem in differences:
        yield f"- **differs**: {problem}"
    yield from _kinds(record)
    yield from _campaigns(record)
    yield from _all(record)


def _kinds(record: Record) -> Iterator[str]:
    yield from ("", "| fault | hits | during a load | a save | a publication |", "|---|---|---|---|---|")
    for kind, count in sorted(Counter(strike.kind for strike in record.hits).items()):
        during = Counter(strike.during for strike in record.hits if strike.kind == kind)
        yield f"| {kind} | {count} | {during['load']} | {during['save']} | {during['publication']} |"


def _campaigns(record: Record) -> Iterator[str]:
    phases = ", ".join(
        f"{len(seconds)} of kind {phase} (median {1000 * statistics.median(seconds):.0f} ms)"
        for phase, seconds in sorted(record.phases.items())
    )
    yield from (
        "",
        "| campaign | seconds | starts of the command | faults | differences |",
        "|---|---|---|---|---|",
    )
    yield f"| left alone | {record.reference_seconds:.0f} | 1 | 0 | |"
    for number, one in enumerate(record.rounds, 1):
        faults = sum(strike.round == number for strike in record.hits)
        yield f"| {number} | {one.seconds:.0f} | {one.starts} | {faults} | {len(one.problems)} |"
    yield from (
        "",
        f"The moments that were aimed at, in the campaign left alone: {phases}." if phases else "",
    )


def _all(record: Record) -> Iterator[str]:
    yield from (
        "",
        "| # | campaign | after s | fault | during | what it hit | effect |",
        "|---|---|---|---|---|---|---|",
    )
    number = 0
    for strike in record.strikes:
        number += strike.counted
        place = str(number) if strike.counted else "–"
        cells = (strike.kind, strike.during or "", strike.victim, strike.effect)
        told = " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
        yield f"| {place} | {strike.round} | {strike.at:.1f} | {told} |"
