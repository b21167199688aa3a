"""Seeing from outside, at once, when a stage loads, saves or publishes: by what appears and is opened in its folders. Linux only.

The kernel (inotify) tells of every file that is made, moved or opened, so nothing in the stages has to say where they are:

- *save*: a temporary folder ``.step000040.1a2b`` appears; it ends when that folder is gone, because it was renamed.
- *load*: a training that has said nothing yet but that it starts opens a state's description; it ends when the log says where it goes on.
- *publication*: the state at which a training's segment ends is there, or the temporary file of a manifest appears; it ends when
  the log says that it is published.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from engines.checkpoint.verify import STATE_FILE
from workflow.drill.processes import Driver, drivers

SAVE, LOAD, PUBLICATION = PHASES = ("save", "load", "publication")
_MODIFY, _OPEN, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x20, 0x40, 0x80, 0x100, 0x200
_IS_FOLDER = 0x40000000
_EVENTS = _MODIFY | _OPEN | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_EVENT = struct.Struct("iIII")
_TEMPORARY_STATE = re.compile(r"\.step\d{6,}\.[0-9a-f]+")
_STATE = re.compile(r"step\d{6,}")
_LOG = re.compile(r"log(-step\d+)?\.txt")
PUBLISHED = "published "
"""What a start's log says at its very end, when it was a success."""
_TEMPORARY_MANIFEST = "..published.json."


@dataclass(frozen=True)
class Moment:
    """A phase that has begun, or has ended."""

    phase: str
    folder: Path
    """The stage's."""
    begun: float
    """time.monotonic()."""
    ended: float | None = None


class Watcher:
    """What the stages of the campaign in ``folder`` are doing. Use as a context manager.

    Raises:
        OSError: the kernel has no inotify, or no more of it for this user.
    """

    def __init__(self, folder: Path) -> None:
        self.store = folder / "results" / "store"
        self._c = ctypes.CDLL(None, use_errno=True)
        self._folders: dict[int, Path] = {}
        self._campaign = folder
        self._open: dict[tuple[str, Path], float] = {}
        self._writers: dict[tuple[str, Path], Driver | None] = {}
        """Who had the stage's lock when a phase was seen to begin."""
        self.store.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._checked(self._c.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._add(self.store)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def moments(self, seconds: float) -> list[Moment]:
        """What began or ended, as soon as something did; nothing after ``seconds``."""
        end = time.monotonic() + seconds
        found: list[Moment] = []
        while not found and (left := end - time.monotonic()) > 0:
            if select.select([self._descriptor], [], [], left)[0]:
                found = [moment for event in self._read() for moment in self._understand(*event)]
        return found

    def drain(self) -> None:
        """Pass over all that happened meanwhile: what is seen late may be over, and who did it dead."""
        while select.select([self._descriptor], [], [], 0)[0]:
            for event in self._read():
                self._understand(*event)

    def going_on(self, phase: str, folder: Path) -> bool:
        """Whether the stage in ``folder`` is in the phase that was seen to begin: by its files, which a start that failed leaves as they
        are, and by whoever held its lock then, who must be alive."""
        writer = self._writers.get((phase, folder))
        if writer is None or not writer.process.alive:
            return False
        if phase == SAVE:
            return any(_TEMPORARY_STATE.fullmatch(name) for name in _names(folder))
        word = "going on after" if phase == LOAD else PUBLISHED
        return word not in last_start(folder)

    def _understand(self, folder: Path, name: str, mask: int) -> list[Moment]:
        path = folder / name
        if mask & _IS_FOLDER:
            if mask & (_CREATE | _MOVED_TO) and self._is_watched(path):
                self._add(path)
            if _TEMPORARY_STATE.fullmatch(name):
                if mask & _CREATE:
                    return self._begin(SAVE, folder)
                return self._end(SAVE, folder) if mask & (_MOVED_FROM | _DELETE) else []
            if _STATE.fullmatch(name) and mask & _MOVED_TO and (folder / f"log-{name}.txt").exists():
                return self._begin(PUBLICATION, folder)
            return []
        stage = folder.parent if _STATE.fullmatch(folder.name) else folder
        if name.startswith(_TEMPORARY_MANIFEST) and mask & _CREATE:
            return self._begin(PUBLICATION, stage)
        if name == STATE_FILE and mask & _OPEN and self._is_starting(stage):
            return self._begin(LOAD, stage)
        if _LOG.fullmatch(name) and mask & _MODIFY:
            said = last_start(stage)
            found = self._end(LOAD, stage) if "going on after" in said else []
            return found + (self._end(PUBLICATION, stage) if PUBLISHED in said else [])
        return []

    def _is_starting(self, stage: Path) -> bool:
        said = last_start(stage)
        return bool(said) and "going on after" not in said and "starting from" not in said

    def _begin(self, phase: str, folder: Path) -> list[Moment]:
        known = self._open.get((phase, folder))
        now = time.monotonic()
        if phase != SAVE and known is not None and now - known < 1:
            return []  # one load opens several files, and one publication makes several
        self._open[phase, folder] = now
        self._writers[phase, folder] = self._driver_of(folder)
        return [Moment(phase, folder, now)]

    def _end(self, phase: str, folder: Path) -> list[Moment]:
        begun = self._open.pop((phase, folder), None)
        return [] if begun is None else [Moment(phase, folder, begun, time.monotonic())]

    def _driver_of(self, stage: Path) -> Driver | None:
        return next((driver for driver in drivers(self._campaign) if driver.folder == stage), None)

    def _is_watched(self, path: Path) -> bool:
        """The store's folders of stages, a stage's folder, and the folders of its states."""
        depth = len(path.relative_to(self.store).parts)
        return depth < 3 or (depth == 3 and _STATE.fullmatch(path.name) is not None)

    def _add(self, path: Path) -> None:
        encoded = os.fsencode(path)
        watch = self._c.inotify_add_watch(self._descriptor, ctypes.c_char_p(encoded), _EVENTS)
        if watch < 0:
            return  # gone again
        self._folders[watch] = path
        for name in _names(path):  # made before the watch
            if (path / name).is_dir() and self._is_watched(path / name):
                self._add(path / name)

    def _read(self) -> list[tuple[Path, str, int]]:
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return []
        events, place = [], 0
        while place < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, place)
            place += _EVENT.size
            name = os.fsdecode(data[place : place + length].rstrip(b"\0"))
            place += length
            if watch in self._folders and name:
                events.append((self._folders[watch], name, mask))
        return events

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"inotify: {os.strerror(number)}")
        return result


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def last_start(stage: Path) -> str:
    """What the newest log of a stage says since its last start."""
    logs = [stage / name for name in _names(stage) if _LOG.fullmatch(name)]
    try:
        newest = max(logs, key=lambda path: path.stat().st_mtime_ns)
        text = newest.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""
    start = text.rfind(": start ")
    return text[start:] if start >= 0 else ""
