"""Publishing a trainer's states: at once, or while the next steps run."""

from __future__ import annotations

import logging
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
UNSEEN_SECONDS = 60.0
"""In which a file system over a network may still not show what another node has written."""
_log = logging.getLogger(__name__)


class StateSaver:
    """Saves the states of ``trainer`` into ``store``, one after the other. Use as a context manager.

    In the background, the ranks copy their parts and write them in threads of their own; a thread of this process waits for the
    files and commits the state. So it is published as soon as it is on disk, in the middle of whatever step, and a state
    that appears is as whole and as durable as one that was waited for.

    Args:
        asynchronous: whether states are saved in the background at all.
        published: called with the step of each state, by the thread that published it.
        may_publish: called right before a state is published; must not return where that is forbidden.
    """

    def __init__(
        self,
        trainer: PPOTrainer,
        store: StateStore,
        asynchronous: bool,
        published: Callable[[int], None],
        may_publish: Callable[[], None],
    ) -> None:
        self._trainer, self._store, self._asynchronous = trainer, store, asynchronous
        self._published, self._may_publish = published, may_publish
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._publishing: Future[None] | None = None
        self._written, self._given_up = threading.Event(), threading.Event()
        self._seconds, self._seconds_behind = 0.0, 0.0

    @property
    def slowest(self) -> float:
        """Seconds that it takes, at worst, until a state is published that is asked for now: one may still be on its way."""
        return self._seconds + self._seconds_behind

    def save(self, wait: bool = True) -> bool:
        """Publish the state after the steps done so far; without ``wait``, while the next steps run, if that is chosen.

        Waits first for the state before, if that is still on its way.

        Returns:
            Whether the state is published already.
        Raises:
            StateError, WorkerError, OSError: this state could not be saved, or the one before.
        """
        self.finish()
        begun = time.monotonic()
        if not self._asynchronous:
            self._may_publish()
            self._trainer.save(self._store)
            self._published(self._trainer.steps_done)
        else:
            self._begin(begun)  # also to be waited for: a copy of another kind would need more memory
            if not wait:
                return False
            self.finish()
        self._seconds = max(self._seconds, time.monotonic() - begun)
        return True

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
            self._written.set()
            self._end()

    def __enter__(self) -> StateSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A state that is all written is still published; where an error ends the training, one that is not is given up."""
        try:
            if error is None:
                self.finish()
        finally:
            self._given_up.set()
            self._thread.shutdown()
        if error is not None and self._publishing is not None and (reason := self._publishing.exception()):
            _log.warning("A state was not saved: %s", reason)

    def _begin(self, begun: float) -> None:
        trainer = self._trainer
        self._written.clear()
        roles = trainer.write(self._store.begin(trainer.steps_done), background=True)
        self._publishing = self._thread.submit(
            self._publish, trainer.steps_done, trainer.state(), roles, begun
        )

    def _publish(
        self, step: int, state: dict[str, Any], roles: dict[str, list[ShardIndex]], begun: float
    ) -> None:
        # When the ranks say that all is written, it is: what is missing for long then is an error, which the store names.
        unseen = 0.0
        while not self._store.is_written(step, roles) and unseen < UNSEEN_SECONDS:
            if self._given_up.is_set():
                return
            if self._written.is_set():
                unseen += POLL_SECONDS
                time.sleep(POLL_SECONDS)
            else:
                self._written.wait(POLL_SECONDS)
        self._may_publish()
        self._store.commit(step, state, roles)
        self._published(step)
        self._seconds_behind = max(self._seconds_behind, time.monotonic() - begun)

    def _end(self) -> None:
        publishing, self._publishing = self._publishing, None
        publishing.result()
