"""The states of one stage: begun in a temporary folder, published by one rename, found again, released. No torch."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engines.checkpoint.errors import StateDamaged, StateDiskFull, StateError, StateExists
from engines.checkpoint.index import ShardIndex, merge_indexes
from engines.checkpoint.verify import FORMAT, STATE_FILE, read_state, self_digest, sha256, verify_state

RELEASED_FILE = "released.json"
_STEP = re.compile(r"step(\d{6,})")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger(__name__)


class StateStore:
    """The states below one folder, ``step000040`` for the state after step 40.

    One process at a time writes into a folder: the stage's lock sees to it. So a temporary folder that is found
    here belongs to a process that died.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._begun: dict[int, Path] = {}

    def begin(self, step: int, expected_bytes: int | None = None) -> Path:
        """A fresh temporary folder for the state after ``step``; each role writes into a folder of its name there.

        ``expected_bytes`` is what will be written, by default as much as the newest state has.

        Raises:
            StateDiskFull: less than that is free. Earlier states are untouched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        needed = self._newest_bytes() if expected_bytes is None else expected_bytes
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise StateDiskFull(
                f"{self.folder}: the state of step {step} needs {needed:,} bytes and {free:,} are free; "
                "free some disk and run the same command again"
            )
        # A name that no process used before: a worker that outlived its head must not write into a later attempt.
        temporary = self.folder / f".{_name(step)}.{secrets.token_hex(4)}"
        temporary.mkdir()
        self._begun[step] = temporary
        return temporary

    def commit(self, step: int, trainer: dict[str, Any], roles: dict[str, list[ShardIndex]]) -> Path:
        """Publish what was written since ``begin(step)``: digests, description, fsync, rename. Returns the folder.

        Args:
            trainer: the controller's own state, JSON.
            roles: for every role, what each of its ranks returned from ``write_shards``.

        Raises:
            StateIncomplete: the ranks' blocks do not tile every tensor, or a file is missing.
            StateExists: an intact state of this step is already there.
            StateDiskFull: the disk filled up meanwhile.
        """
        temporary = self._begun.pop(step, None)
        if temporary is None:
            raise StateError(f"{self.folder}: commit of step {step} without begin")
        state = {
            "format": FORMAT,
            "step": step,
            "trainer": trainer,
            "roles": {role: merge_indexes(role, indexes) for role, indexes in roles.items()},
        }
        with disk_full_is_named(self.folder):
            state["files"] = _describe_files(temporary)
            _check_files(temporary, state)
            state = json.loads(json.dumps(state, allow_nan=False))  # the digest is of what will be read back
            _write_json(temporary / STATE_FILE, {**state, "digest": self_digest(state)})
        for folder in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
            make_durable(folder)
        return self._publish(temporary, step)

    def is_written(self, step: int, roles: dict[str, list[ShardIndex]]) -> bool:
        """Whether every file that ranks said they would write since ``begin(step)`` is there. A file appears whole."""
        names = {f"{role}/{name}" for role, indexes in roles.items() for i in indexes for name in i.files}
        folder = self._begun[step]
        # Listed, not asked for one by one: a file system over a network remembers for long what was not there.
        return names <= {path.relative_to(folder).as_posix() for path in folder.rglob("*")}

    def newest(self, verify: bool = True, at_most: int | None = None) -> Path | None:
        """The folder of the newest state (not after step ``at_most``), or None. With ``verify`` every byte is hashed again.

        States that are damaged are named in a warning, with the file and the reason, and passed over.
        """
        considered = self._folders(lambda step: at_most is None or step <= at_most)
        return next((path for _, path in _intact(considered, verify)), None)

    def retain(
        self, *policies: str, keep: Collection[int] = (), of: Callable[[int], bool] = lambda step: True
    ) -> list[int]:
        """Release the bytes of states that neither a policy nor ``keep`` (steps) keeps; returns the released steps.

        ``all`` keeps every state, ``last`` the newest, ``every:N`` the newest and each whose step N divides.
        Only states older than the newest verified one are ever released. What a released folder holds besides
        the state (a manifest) stays; ``released.json`` then describes what was there.

        Args:
            of: of the steps that it is about: other states are neither looked at nor touched.
        """
        intervals = [parse_policy(policy) for policy in policies]
        for step, path in self._folders(of).items():
            if step not in keep and (path / RELEASED_FILE).exists():
                _remove_files(path)  # a process may have died while it released
        considered = self._folders(of)
        newest = next((step for step, _ in _intact(considered)), None)
        released: list[int] = []
        if newest is None or 1 in intervals:
            return released
        for step, path in considered.items():
            if step >= newest or step in keep or not (path / STATE_FILE).exists():
                continue
            if any(interval and step % interval == 0 for interval in intervals):
                continue
            try:
                _release(path)
            except StateError as error:
                _log.warning("Damaged training state left where it is: %s", error)
            else:
                released.append(step)
        return sorted(released)

    def _folders(self, of: Callable[[int], bool] = lambda step: True) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        found = [path for path in self.folder.iterdir() if _STEP.fullmatch(path.name)]
        return {_step(path): path for path in found if of(_step(path)) and _holds_anything(path)}

    def _newest_bytes(self) -> int:
        for path in sorted(self._folders().values(), key=_step, reverse=True):
            if (path / STATE_FILE).exists():
                return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return 0

    def _remove_leftovers(self) -> None:
        for path in self.folder.iterdir():
            if re.fullmatch(rf"\.{_STEP.pattern}\.[0-9a-f]+", path.name):
                shutil.rmtree(path)

    def _publish(self, temporary: Path, step: int) -> Path:
        final = self.folder / _name(step)
        if final.exists() and any(final.iterdir()):
            if not (final / RELEASED_FILE).exists():
                try:
                    verify_state(final)
                except StateError as error:
                    _log.warning("Damaged training state replaced: %s", error)
                else:
                    shutil.rmtree(temporary)
                    raise StateExists(f"{final}: an intact state of step {step} is already published")
            _put_into(final, temporary)
        else:
            temporary.rename(final)
        make_durable(self.folder)
        return final


def make_durable(path: Path) -> None:
    """Have a file's bytes, or the names in a folder, on disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_full_is_named(folder: Path) -> Iterator[None]:
    """Turn the system's ways to say that the disk, a quota or a limit is exhausted into StateDiskFull."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise StateDiskFull(f"{folder}: {os.strerror(error.errno)} while writing a state") from error


def _intact(folders: dict[int, Path], verify: bool = True) -> Iterator[tuple[int, Path]]:
    """Those that can be read, the newest first."""
    for step, path in sorted(folders.items(), reverse=True):
        if (path / RELEASED_FILE).exists():
            continue
        try:
            state = verify_state(path) if verify else read_state(path)
            if state["step"] != step:
                raise StateDamaged(f"{path / STATE_FILE}: is of step {state['step']}")
        except StateError as error:
            _log.warning("Damaged training state passed over: %s", error)
            continue
        yield step, path


def _holds_anything(path: Path) -> bool:
    """An empty folder holds no state: a workflow engine makes it for the manifest that is to come."""
    with suppress(FileNotFoundError):  # another process has just released all of it
        return any(path.iterdir())
    return False


def _name(step: int) -> str:
    return f"step{step:06d}"


def _step(path: Path) -> int:
    return int(_STEP.fullmatch(path.name).group(1))


def parse_policy(policy: str) -> int:
    """The N of ``every:N``; ``all`` is 1, ``last`` is 0.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"all|last|every:([1-9]\d*)", policy)
    if match is None:
        raise ValueError(f"retain={policy!r}: must be all, last or every:N")
    return int(match[1]) if match[1] else int(policy == "all")


def _describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in files
    }


def _check_files(folder: Path, state: dict[str, Any]) -> None:
    for role, entry in state["roles"].items():
        named = {shard["file"] for tensor in entry["tensors"].values() for shard in tensor["shards"]}
        if missing := sorted(named - state["files"].keys()):
            raise StateDamaged(f"{folder}: {role} names files that were not written: {missing[:5]}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _put_into(final: Path, temporary: Path) -> None:
    """Move a state's files into a folder whose own are released or damaged. What else is there (manifests) stays.

    Killed in between, it leaves a state without description, or one that counts as released.
    """
    (final / STATE_FILE).unlink(missing_ok=True)
    for entry in temporary.iterdir():
        if entry.name != STATE_FILE:
            shutil.rmtree(final / entry.name, ignore_errors=True)
            entry.rename(final / entry.name)
    make_durable(final)
    (temporary / STATE_FILE).rename(final / STATE_FILE)
    (final / RELEASED_FILE).unlink(missing_ok=True)
    make_durable(final)
    temporary.rmdir()


def _release(path: Path) -> None:
    read_state(path)
    (path / STATE_FILE).rename(path / RELEASED_FILE)
    make_durable(path)
    _remove_files(path)


def _remove_files(path: Path) -> None:
    """Remove the files that a released state's description names, and its folders; all of it when nothing else is there."""
    described = json.loads((path / RELEASED_FILE).read_text(encoding="utf-8"))
    for name in described["files"]:
        (path / name).unlink(missing_ok=True)
    for role in described["roles"]:
        if (path / role).is_dir() and not any((path / role).iterdir()):
            (path / role).rmdir()
    if [entry.name for entry in path.iterdir()] == [RELEASED_FILE]:
        shutil.rmtree(path)
