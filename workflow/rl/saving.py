"""Publishing a trainer's states: at once, or while the next steps run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from engines.checkpoint import ShardIndex, StateStore
from workflow.rl.trainer import PPOTrainer

POLL_SECONDS = 0.05
"""Between two looks whether the ranks' files are there."""


class StateSaver:
    """Saves the states of ``trainer`` into ``store``, one after the other. Use as a context manager.

    In the background, the ranks copy their parts and write them in threads of their own; a thread of this process waits for the
    files and commits the state. So it is published as soon as it is on disk, in the middle of whatever step, and a state
    that appears is as whole and as durable as one that was waited for.

    Args:
        published: called with the step of each state, by the thread that published it.
        may_publish: called right before a state is published in the background; must not return where that is forbidden.
    """

    def __init__(
        self,
        trainer: PPOTrainer,
        store: StateStore,
        published: Callable[[int], None],
        may_publish: Callable[[], None],
    ) -> None:
        self._trainer, self._store = trainer, store
        self._published, self._may_publish = published, may_publish
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._publishing: Future[None] | None = None
        self._given_up = threading.Event()
        self._seconds, self._seconds_behind = 0.0, 0.0

    @property
    def slowest(self) -> float:
        """Seconds that it takes, at worst, until a state is published that is asked for now: one may still be on its way."""
        return self._seconds + self._seconds_behind

    def save(self) -> None:
        """Publish the state after the steps done so far, and wait for it."""
        self.finish()
        begun = time.monotonic()
        self._trainer.save(self._store)
        self._published(self._trainer.steps_done)
        self._seconds = max(self._seconds, time.monotonic() - begun)

    def save_behind(self) -> None:
        """Have that state published while the next steps run. Waits for the state before, if that is still on its way.

        Raises:
            StateError, WorkerError, OSError: that one could not be saved.
        """
        self.finish()
        begun, trainer = time.monotonic(), self._trainer
        roles = trainer.write(self._store.begin(trainer.steps_done), background=True)
        self._publishing = self._thread.submit(
            self._publish, trainer.steps_done, trainer.state(), roles, begun
        )

    def check(self) -> None:
        """Raise what kept a state from being saved in the background, if anything did: no later than after the next step."""
        if self._publishing is not None:
            self._trainer.check_written()
            if self._publishing.done():
                self._end()

    def finish(self) -> None:
        """Wait until nothing is on its way. Raises as :meth:`check` does."""
        if self._publishing is not None:
            self._trainer.check_written(wait=True)
            self._end()

    def __enter__(self) -> StateSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A state whose files are all there is still published; others are given up, where an error ends the training."""
        try:
            if error is None:
                self.finish()
        finally:
            self._given_up.set()
            self._thread.shutdown()

    def _publish(
        self, step: int, state: dict[str, Any], roles: dict[str, list[ShardIndex]], begun: float
    ) -> None:
        while not self._store.is_written(step, roles):
            if self._given_up.wait(POLL_SECONDS):
                return
        self._may_publish()
        self._store.commit(step, state, roles)
        self._published(step)
        self._seconds_behind = max(self._seconds_behind, time.monotonic() - begun)

    def _end(self) -> None:
        publishing, self._publishing = self._publishing, None
        publishing.result()
