"""One answer about a site file. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["good", "open", "wrong"]
"""open: unknown in the site file, or it could not be found out."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to change."""

    verdict: Verdict
    subject: str
    """Key of the site file, or what was looked at."""
    message: str
    remedy: str = ""
    """What to change; empty when nothing."""

    def __str__(self) -> str:
        mark = {"good": "ok   ", "open": "open ", "wrong": "WRONG"}[self.verdict]
        return f"{mark} {self.subject}: {self.message}"
