"""Progress bars that several jobs can print on one terminal: a line now and then, never a cursor movement."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 20


class Progress:
    """A bar printed at most every ``every`` seconds, and at the end. Use as a context manager.

    >>> with Progress("sft", total=80) as bar:
    ...     bar.advance(loss=0.5)
    """

    def __init__(
        self, description: str, total: int, every: float = 5.0, stream: TextIO | None = None
    ) -> None:
        self._description = description
        self._total = max(total, 1)
        self._every = every
        self._stream = stream or sys.stderr
        self._done = 0
        self._begun = self._printed = time.monotonic()
        self._values: dict[str, float] = {}

    def advance(self, n: int = 1, **values: float) -> None:
        """``n`` more of ``total`` are done; ``values`` are shown behind the bar."""
        self._done += n
        self._values = values or self._values
        if time.monotonic() - self._printed >= self._every:
            self._print()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        elapsed = self._printed - self._begun
        share = min(self._done / self._total, 1.0)
        filled = int(share * WIDTH)
        remaining = elapsed / self._done * (self._total - self._done) if self._done else 0.0
        time_text = f"{remaining:.0f} s left" if share < 1 else f"{elapsed:.0f} s"
        values = "".join(f"  {name} {value:.4g}" for name, value in self._values.items())
        bar = "━" * filled + "─" * (WIDTH - filled)
        print(
            f"{bar} {self._done}/{self._total} {self._description}{values}  {time_text}",
            file=self._stream,
            flush=True,
        )
