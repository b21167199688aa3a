"""What was found about one part of two results. Loads no framework."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

EQUAL, CLOSE, NOT_COMPARED, DIFFERENT = "equal", "close", "not compared", "different"
_ORDER = (EQUAL, CLOSE, NOT_COMPARED, DIFFERENT)


@dataclass(frozen=True)
class Finding:
    """One part of two results."""

    part: str
    """weights, optimizer, counters, curve, samples, outcomes, metrics, files; or result, where one side has none."""
    verdict: str
    """equal (bit for bit), close (within the tolerance), different; not compared, with the reason as a note."""
    difference: float | None = None
    """Largest relative one, where it is a number."""
    note: str = ""

    def __str__(self) -> str:
        number = "" if not self.difference else f" {self.difference:.1e}"
        return f"{self.verdict}{number}{f' ({self.note})' if self.note else ''}"

    def record(self) -> dict[str, Any]:
        """JSON, which has no infinity: where names or shapes differ there is no number."""
        return asdict(self) | {"difference": None if self.difference == math.inf else self.difference}


def worst(findings: Iterable[Finding]) -> str:
    """The verdict on all of them. Where nothing was found, nothing was compared."""
    return max((finding.verdict for finding in findings), key=_ORDER.index, default=NOT_COMPARED)


def measured(part: str, largest: float, tolerance: float | None, note: str) -> Finding:
    """A part that is not equal: close or different, by its largest relative difference."""
    close = tolerance is not None and largest <= tolerance
    return Finding(part, CLOSE if close else DIFFERENT, largest, note)
