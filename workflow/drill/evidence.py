"""What a campaign's files say about what happened to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workflow.drill.campaign import Campaign
from workflow.manifest import MANIFEST, TWIN, ManifestError, read_manifest
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


@dataclass(frozen=True)
class Start:
    """One start of a stage."""

    folder: Path
    """The stage's."""
    segment: int | None
    number: int

    def end(self) -> str | None:
        """How it ended in its own words; None while it goes on, and when it was killed before it could say so.

        It has published as soon as its manifest is there, which is a little before it notes that.
        """
        if self._has_published():
            return "published"
        words = [line.get("end") for line in starts(self.folder) if self._is_meant(line)]
        own = [
            word for word in words if word not in (None, "killed", "withdrawn")
        ]  # the start after it says these
        return own[-1] if own else None

    def _is_meant(self, line: dict) -> bool:
        return (line["segment"], line["number"]) == (self.segment, self.number)

    def _has_published(self) -> bool:
        output = self.folder if self.segment is None else self.folder / f"step{self.segment:06d}"
        for name in (TWIN, MANIFEST):
            with suppress(ManifestError):
                if any(one.number == self.number for one in read_manifest(output / name).attempts[-1:]):
                    return True
        return False


def newest_start(folder: Path) -> Start | None:
    """The start of a stage that began last."""
    begun = [line for line in starts(folder) if "begun" in line]
    return Start(folder, begun[-1]["segment"], begun[-1]["number"]) if begun else None


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
