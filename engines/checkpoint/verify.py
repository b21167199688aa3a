"""Reading a state's description and proving that its bytes are those that were published. No torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from engines.checkpoint.errors import StateDamaged, StateFormatUnknown

FORMAT = 1
STATE_FILE = "state.json"

PIECE = 16 * 1024**2
"""Bytes that are hashed at a time."""


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes, read in pieces.

    Large ones: between two of them a thread has to get the interpreter's lock back from whoever trains meanwhile, which takes
    milliseconds.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(path.stat().st_size, PIECE) + 1))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def self_digest(state: dict[str, Any]) -> str:
    """Digest of a state's description without its own ``digest`` entry."""
    rest = {key: value for key, value in state.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_state(path: Path) -> dict[str, Any]:
    """The description (``state.json``) of the state in folder ``path``, whose own digest is checked.

    Raises:
        StateDamaged: missing, unreadable or altered.
        StateFormatUnknown: written by another version's format.
    """
    file = Path(path) / STATE_FILE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StateDamaged(f"{file}: missing") from None
    except OSError as error:
        raise StateDamaged(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StateDamaged(f"{file}: not JSON ({error})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise StateFormatUnknown(f"{file}: format {found!r}, this version reads format {FORMAT}")
    if state.get("digest") != self_digest(state):
        raise StateDamaged(f"{file}: its content does not match its own digest")
    return state


def verify_state(path: Path) -> dict[str, Any]:
    """Read the state in folder ``path`` and hash every file of it again; returns its description.

    Raises:
        StateDamaged: naming the first file that is missing, cannot be read, has another size, or another digest.
        StateFormatUnknown: see :func:`read_state`.
    """
    state = read_state(path)
    for name, expected in state["files"].items():
        if problem := file_problem(Path(path) / name, expected["bytes"], expected["sha256"]):
            raise StateDamaged(problem)
    return state


def file_problem(path: Path, size: int, digest: str) -> str:
    """In what a file is not the published one, of ``size`` bytes and with the SHA-256 ``digest``; empty when it is."""
    try:
        if (found := path.stat().st_size) != size:
            return f"{path}: {found} bytes, {size} were published"
        return "" if sha256(path) == digest else f"{path}: its digest is not the published one"
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
