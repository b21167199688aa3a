"""What a converted checkpoint says about itself: its source, the digest of every file, and what was verified. Loads no framework."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from engines.config import Config, ConfigError, parse
from engines.model_folder import ModelFolderError
from workflow.campaign.stages import MEGATRON
from workflow.manifest import FileRecord, canonical_json, compare_files, write_json

RECORD = "conversion.json"
RELEASE = "release"
"""Folder in which Megatron looks for a checkpoint that is no step of a training."""
TRACKER = "latest_checkpointed_iteration.txt"
"""File in which Megatron finds the name of that folder."""
VERSION = MEGATRON.version
"""Raised whenever the same source would be converted into other bytes."""
Format = Literal["megatron", "hf"]


class ConversionRecord(Config):
    """Written last, into the folder that it describes. Holds no path of a machine.

    Its file has one entry more, ``checksum``: the digest of all others.
    """

    format: Literal[1] = 1
    version: int
    to: Format
    source: str
    """Digest of the source's files, weights first of all; with ``to`` and ``version`` it says which result this is."""
    files: dict[str, FileRecord]
    """Every file of the folder but this one."""
    verified: dict[str, Any]
    """What was compared before the folder appeared."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Versions of what converted."""


def source_digest(files: Mapping[str, FileRecord]) -> str:
    """One digest for the content of ``files``."""
    return _digest({name: record.sha256 for name, record in files.items()})


def write_record(folder: Path, record: ConversionRecord) -> None:
    """Write ``record`` into ``folder``."""
    values = record.model_dump(mode="json")
    write_json(folder / RECORD, values | {"checksum": _digest(values)})


def read_record(folder: Path) -> ConversionRecord:
    """The record of the converted checkpoint in ``folder``; the files that it names are not opened.

    Raises:
        ModelFolderError: missing, damaged or altered.
    """
    path = folder / RECORD
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        checksum = values.pop("checksum", None)
        record = parse(ConversionRecord, values)
    except FileNotFoundError:
        raise ModelFolderError(
            f"{path}: missing; a distributed checkpoint is read only when a record says what its files are, as `baton convert` writes it"
        ) from None
    except (ValueError, AttributeError, ConfigError) as error:
        raise ModelFolderError(f"{path}: no record of a conversion ({error})") from None
    if checksum != _digest(values):
        raise ModelFolderError(
            f"{path}: altered since it was written: its content does not match its checksum"
        )
    return record


def verify_record(folder: Path) -> ConversionRecord:
    """Read the record in ``folder`` and hash every file that it names.

    Raises:
        ModelFolderError: see :func:`read_record`; or a file is missing, has another digest, or is not in the record.
    """
    record = read_record(folder)
    if problems := compare_files(folder, record.files):
        raise ModelFolderError(problems[0])
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if strange := sorted(found - record.files.keys() - {RECORD}):
        raise ModelFolderError(f"{folder / strange[0]}: {RECORD} does not know this file")
    return record


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(values).encode()).hexdigest()
