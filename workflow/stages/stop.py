"""Being asked to stop: by a person, by the scheduler. Loads no framework."""

from __future__ import annotations

import signal
import time

ONE_REQUEST_SECONDS = 5.0
"""In which several signals are one request to stop."""


class StoppedOnRequest(BaseException):
    """The stage stopped because it was asked to; its state is saved and the same command continues.

    No Exception, so that no library takes it for an error of its own and goes on.
    """


class StoppedByUser(StoppedOnRequest):
    """Stopped by the file ``stop`` in the run's folder: nobody starts the stage again before it is gone."""


class StopRequest:
    """Whether somebody asked this process to stop (SIGTERM, SIGINT, SIGUSR2).

    From ``interrupt`` on, a request interrupts the stage at once. A stage that looks at ``requested`` between its steps says
    so once with ``will_poll``, and is interrupted only by a second request. Signals within a few seconds are one request:
    SLURM signals every process of a job that it ends, and the job's launcher passes its own signal on.
    """

    def __init__(self) -> None:
        self.requested = False
        self._held = True
        self._since = 0.0

    def will_poll(self) -> None:
        """From now on the stage looks at ``requested`` itself, saves, and raises StoppedOnRequest."""
        self._held = True

    def interrupt(self) -> None:
        """From now on a request interrupts; one that has come already does so now."""
        self._held = False
        if self.requested:
            raise StoppedOnRequest("interrupted")

    def install(self) -> None:
        """Listen to the signals; they are only noted yet. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        now, again = time.monotonic(), self.requested
        if again and now - self._since <= ONE_REQUEST_SECONDS:
            return
        self.requested, self._since = True, now
        if again or not self._held:
            raise StoppedOnRequest(f"interrupted by {signal.Signals(number).name}")
