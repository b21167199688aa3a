"""The record that a stage publishes: what was computed, from what, by what, and the digest of every published file.

A manifest is written last and appears by one rename, so a valid manifest *is* the success of its stage. Loads no framework.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from engines.checkpoint.store import RELEASED_FILE, make_durable
from engines.checkpoint.verify import STATE_FILE, file_problem, sha256
from engines.config import Config, ConfigError, LayoutConfig, parse

TWIN = ".published.json"
"""A second name of the published manifest. A workflow engine may remove the first one together with a job that it believes failed."""
MANIFEST = "manifest.json"


class ManifestError(RuntimeError):
    """A manifest is missing, damaged, or does not describe what is beside it."""


class FileRecord(Config):
    """One published file."""

    bytes: int = Field(ge=0)
    """Size."""
    sha256: str
    """Hex digest of the content."""


class InputRecord(Config):
    """One manifest that the stage started from."""

    stage: str
    """Stage that published it."""
    id: str
    """Its id in the plan."""
    step: int | None = None
    """Training states: the step."""
    manifest: str
    """Path of its manifest, relative to the folder of this one."""
    digest: str
    """Its ``Manifest.digest`` when it was read."""


class Device(Config):
    """Which device key was asked for, which one was taken, and why."""

    asked: str
    computed: str
    why: str


class Hardware(Config):
    """Kinds, never names, of what computed the result."""

    cpu: str
    accelerator: str | None = None


class Attempt(Config):
    """One start of the stage."""

    number: int
    """Counted from 1."""
    job: str | None = None
    """Scheduler's job id, if there was one."""
    restart: int = 0
    """Scheduler's restart count."""
    first_step: int | None = None
    """Training: first step of this start."""
    last_step: int | None = None
    """Training: last step of this start."""
    end: Literal["published", "stopped", "refused", "error", "killed", "withdrawn"]
    """How it ended. The start after it tells what it could not: killed; withdrawn, when what it published was damaged later."""
    seconds: float = Field(ge=0)
    """Wall time (0 when killed: nobody was left to measure)."""


class DeviceSeconds(Config):
    """Device time, world size x wall time."""

    used: float = 0.0
    """That led to what is published."""
    lost: float = 0.0
    """Of starts that ended otherwise."""


class Manifest(Config):
    """What a stage publishes. Holds no path of a machine and no user's name.

    Its file has one entry more, ``checksum``: the digest of all others, so that whatever is altered in it is noticed.
    """

    format: Literal[1] = 1
    stage: str
    version: int
    id: str
    """First 16 digits of the identity."""
    identity: str
    """Numeric identity: everything that can change a bit of the result."""
    learning_identity: str
    """The same without backend, device, layout, dtype and threads."""
    slug: str
    step: int | None = None
    """Training states: the step after which the state was saved."""
    config: dict[str, Any]
    """The resolved slice; paths stand as digests of what they hold."""
    inputs: dict[str, InputRecord] = {}
    files: dict[str, FileRecord]
    """Every published file, by its path relative to the manifest's folder."""
    steps_planned: int = Field(ge=0)
    steps_done: int = Field(ge=0)
    seeds: dict[str, int] = {}
    backends: dict[str, str] = {}
    """Engine per role."""
    device: Device
    layout: LayoutConfig
    """Of the role with the most ranks."""
    world_size: int
    """Ranks of the stage's largest role."""
    dtype: str
    threads: int
    """CPU threads per rank."""
    environment: str
    """Digest of the environment's lock file."""
    code: str
    """Digest of the source that ran."""
    packages: dict[str, str] = {}
    """Versions of what computed."""
    hardware: Hardware
    git_commit: str | None = None
    attempts: list[Attempt] = []
    device_seconds: DeviceSeconds = DeviceSeconds()
    metrics: dict[str, Any] = {}
    """Summary, JSON."""
    extra: dict[str, Any] = {}
    """What only this stage has to say, JSON."""
    created: str
    """UTC, ISO 8601."""

    @property
    def digest(self) -> str:
        """Digest of what was computed (identity, step, files): equal for equal results, however often they were computed."""
        content = {
            "identity": self.identity,
            "step": self.step,
            "files": {name: record.sha256 for name, record in self.files.items()},
        }
        return _checksum(content)


def canonical_json(value: Any) -> str:
    """The one JSON text of ``value`` that digests are taken of. NaN and infinities are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON so that ``path`` appears, complete and durable, by one rename."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` appears, complete and durable, by one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        Path(temporary).rename(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    make_durable(path.parent)


def describe_files(folder: Path, names: Iterable[Path | str]) -> dict[str, FileRecord]:
    """Size and digest of each file in ``names`` (relative to ``folder``); a folder stands for all files below it.

    All are durable when this returns: a manifest must not outlive what it describes.

    Raises:
        ManifestError: a file is missing or lies outside ``folder``.
    """
    records: dict[str, FileRecord] = {}
    for name in names:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ManifestError(f"{name}: a published file must lie in {folder}")
        if not path.exists():
            raise ManifestError(f"{path}: to be published, but missing")
        found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in found:
            make_durable(file)
            records[file.relative_to(folder).as_posix()] = FileRecord(
                bytes=file.stat().st_size, sha256=sha256(file)
            )
    for parent in {parent for name in records for parent in Path(name).parents}:
        make_durable(folder / parent)
    return records


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Publish ``manifest`` at ``path`` by one rename, after all its bytes are on disk."""
    values = manifest.model_dump(mode="json")
    write_json(path, values | {"checksum": _checksum(values)})


def read_manifest(path: Path) -> Manifest:
    """Read and validate the manifest at ``path`` (the files it names are not opened).

    Raises:
        ManifestError: missing, no JSON, of another schema, or altered since it was written.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ManifestError(f"{path}: missing") from None
    except ValueError as error:
        raise ManifestError(f"{path}: not JSON ({error})") from None
    checksum = values.pop("checksum", None) if isinstance(values, dict) else None
    try:
        manifest = parse(Manifest, values)
    except ConfigError as error:
        raise ManifestError(f"{path}: not a manifest: {error}") from None
    if checksum != _checksum(values):
        raise ManifestError(
            f"{path}: altered since it was published: its content does not match its checksum"
        )
    return manifest


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(values).encode()).hexdigest()


def is_released(folder: Path) -> bool:
    """Whether the bytes of the training state in ``folder`` were given up after its successor was verified."""
    return (folder / RELEASED_FILE).exists()


def check_files(folder: Path, manifest: Manifest) -> list[str]:
    """Hash every published file again; one line per file that is missing or differs.

    Of a released state only its description is left, under another name.
    """
    files = manifest.files
    if is_released(folder):
        described = manifest.files.get(STATE_FILE)
        files = {RELEASED_FILE: described} if described else {}
    return compare_files(folder, files)


def compare_files(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Hash files in ``folder`` again; one line per file that is missing or is not what its record says."""
    problems = (file_problem(folder / name, record.bytes, record.sha256) for name, record in files.items())
    return [problem for problem in problems if problem]


@dataclass
class Verification:
    """What ``verify`` found."""

    manifests: int = 0
    """Manifests whose files were hashed again."""
    files: int = 0
    """Files that were hashed again."""
    released: int = 0
    """Training states whose bytes were given up; their manifests were read."""
    problems: list[str] = field(default_factory=list)
    """One line each; empty when everything is as published."""


def verify(*paths: Path) -> Verification:
    """Hash every file of the manifests at ``paths`` again, and of everything they came from."""
    result = Verification()
    seen: set[Path] = set()
    waiting = [path.resolve() for path in paths]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            manifest = read_manifest(path)
        except ManifestError as error:
            result.problems.append(str(error))
            continue
        result.manifests += 1
        if is_released(path.parent):
            result.released += 1
        else:
            result.files += len(manifest.files)
        result.problems += check_files(path.parent, manifest)
        for name, record in manifest.inputs.items():
            source = (path.parent / record.manifest).resolve()
            result.problems += _check_input(path, name, record, source)
            waiting.append(source)
    return result


def _check_input(path: Path, name: str, record: InputRecord, source: Path) -> list[str]:
    try:
        found = read_manifest(source).digest
    except ManifestError:
        return []  # named when the input itself is visited
    if found == record.digest:
        return []
    return [f"{path}: its input {name!r} ({source}) is not the result it was computed from"]
