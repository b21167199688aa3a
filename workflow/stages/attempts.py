"""Every start of a stage, appended to one file in its folder. Loads no framework."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from workflow.manifest import Attempt, DeviceSeconds

ATTEMPTS = "attempts.jsonl"


class AttemptLog:
    """The starts that lead to one manifest; use from the process that holds the folder's lock.

    Args:
        folder: the stage's working folder.
        step: training: the step at which the segment ends.
        log: the job's log; its last writing tells how long a killed start lived.
    """

    def __init__(self, folder: Path, step: int | None, log: Path) -> None:
        self._path = folder / ATTEMPTS
        self._segment = step
        earlier = self._read()
        self._close(earlier, log)
        self._number = max(earlier, default=0) + 1
        self._first: int | None = None
        self._last: int | None = None
        self._ending: dict[str, Any] | None = None
        self._begun = time.time()
        self._append(
            {
                "segment": step,
                "number": self._number,
                "job": os.environ.get("SLURM_JOB_ID"),
                "restart": int(os.environ.get("SLURM_RESTART_COUNT", 0)),
                "begun": self._begun,
            }
        )

    @property
    def number(self) -> int:
        """Which start this is, counted from 1."""
        return self._number

    @property
    def seconds(self) -> float:
        """Since this start began."""
        return time.time() - self._begun

    def step_done(self, step: int) -> None:
        """Note that a training step is complete."""
        self._first = step if self._first is None else self._first
        self._last = step

    def will_end(self, end: str) -> None:
        """How this start will have ended for ``all``, when a manifest has to say it before it is true."""
        self._ending = self._ended(end)

    def end(self, end: str) -> None:
        """Note how this start ended."""
        told = self._ending is not None and self._ending["end"] == end
        self._append(self._ending if told else self._ended(end))

    def _ended(self, end: str) -> dict[str, Any]:
        return {
            "segment": self._segment,
            "number": self._number,
            "first_step": self._first,
            "last_step": self._last,
            "end": end,
            "seconds": round(self.seconds, 3),
        }

    def all(self) -> list[Attempt]:
        """Every start so far that has ended, and this one when it is known how it will."""
        fields = Attempt.model_fields
        starts = self._read()
        if self._ending is not None:
            starts[self._number] |= self._ending
        return [
            Attempt(**{key: value for key, value in entry.items() if key in fields})
            for entry in starts.values()
            if "end" in entry
        ]

    def device_seconds(self, world_size: int) -> DeviceSeconds:
        """Device time of the starts that ended: saved and published work is used, all other is lost."""
        seconds = {"used": 0.0, "lost": 0.0}
        for attempt in self.all():
            seconds["used" if attempt.end in ("published", "stopped") else "lost"] += (
                attempt.seconds * world_size
            )
        return DeviceSeconds(**seconds)

    def _read(self) -> dict[int, dict[str, Any]]:
        """The starts of this segment by number, their lines merged; a line that a kill cut short is passed over."""
        starts: dict[int, dict[str, Any]] = {}
        if not self._path.exists():
            return starts
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry["segment"] == self._segment:
                starts.setdefault(entry["number"], {}).update(entry)
        return starts

    def _close(self, starts: dict[int, dict[str, Any]], log: Path) -> None:
        """Say of earlier starts what they could not. Were there a valid manifest of theirs, this one would not have begun."""
        for entry in starts.values():
            if entry.get("end") == "published":
                entry |= {"end": "withdrawn"}
                self._append(
                    {key: value for key, value in entry.items() if key in ("segment", "number", "end")}
                )
            if "end" not in entry:
                alive = log.stat().st_mtime - entry["begun"] if log.exists() else 0.0
                ended = {"end": "killed", "seconds": round(max(alive, 0.0), 3)}
                self._append({"segment": self._segment, "number": entry["number"], **ended})

    def _append(self, entry: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = (
            self._path.exists() and not self._path.read_bytes().endswith(b"\n") and self._path.stat().st_size
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(entry) + "\n")
