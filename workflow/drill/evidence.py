"""What a campaign's files say about what happened to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from workflow.drill.campaign import Campaign
from workflow.stages.attempts import ATTEMPTS

_NO_SPACE = re.compile(r"No space left|File too large|DiskFull|bytes and [\d,]+ are free|Errno 2[78]\b")
_ASKED_TO_END = "Will exit after finishing currently running jobs"
"""What snakemake says of a SIGTERM."""
_LOUD = re.compile(r" (WARNING|ERROR) ")


def starts(folder: Path) -> list[dict]:
    """The lines of a stage's record of attempts; one that was cut short is passed over."""
    found = []
    for line in _lines(folder / ATTEMPTS):
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def ends(folder: Path) -> list[str]:
    """How the starts of a stage ended, in the order in which that was noted."""
    return [line["end"] for line in starts(folder) if "end" in line]


def complaints(campaign: Campaign) -> list[str]:
    """What heads and stages said about a full disk."""
    return [line for line in _said(campaign) if _NO_SPACE.search(line)]


def times_asked_to_end(campaign: Campaign) -> int:
    """How often heads said that they were asked to end."""
    return sum(_ASKED_TO_END in line for line in _lines(campaign.output))


def damage_noticed(campaign: Campaign, state: Path) -> int:
    """How often somebody named the damaged ``state``."""
    name = f"{state.parent.name}/{state.name}/"
    return sum(name in line and _LOUD.search(line) is not None for line in _said(campaign))


def _said(campaign: Campaign) -> Iterator[str]:
    logs = sorted(campaign.folder.glob("results/store/*/*/log*.txt"))
    for path in [campaign.output, *logs]:
        yield from _lines(path)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
