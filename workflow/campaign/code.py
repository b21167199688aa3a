"""Which source a plan was made by, and a copy of it for the campaign's jobs, so that editing a file changes no running campaign."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import workflow
from engines.checkpoint.verify import sha256
from workflow.manifest import canonical_json

PACKAGES = ("engines", "workflow")
COMMIT_FILE = "git_commit.txt"
"""In a snapshot, the commit that it was made from."""
ENVIRONMENTS = {
    "cpu": ("env/torch.txt", "env/cpu-light.txt"),
    "cuda": ("env/cuda.txt", "env/torch.txt", "env/cpu-light.txt"),
    "npu": ("env/ascend.txt", "env/cpu-light.txt"),
}
"""Lock files of the stage environments, by device key."""


def source_root() -> Path:
    """The folder that holds the packages which this process runs."""
    return Path(workflow.__file__).parent.parent


def code_digest(root: Path) -> str:
    """Digest over every source file of the packages below ``root``."""
    names = {path.relative_to(root).as_posix(): sha256(path) for path in _sources(root)}
    return hashlib.sha256(canonical_json(names).encode()).hexdigest()


def environment_digest(root: Path, environment: str) -> str:
    """Digest of an environment's lock files (those that exist).

    Args:
        environment: a device key, then what is installed on top: ``cpu``, ``cpu+megatron``.
    """
    device, *on_top = environment.split("+")
    files = [root / name for name in (*ENVIRONMENTS[device], *(f"env/{name}.txt" for name in on_top))]
    names = {path.name: sha256(path) for path in files if path.is_file()}
    return hashlib.sha256(canonical_json(names).encode()).hexdigest()


def source_commit(root: Path) -> str | None:
    """The commit that the source at ``root`` was checked out from, with ``-dirty`` when tracked files differ from it.

    A snapshot remembers it from when it was made: the repository may have moved on since. None outside a repository.
    """
    if (known := root / COMMIT_FILE).exists():
        return known.read_text(encoding="utf-8") or None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def snapshot(root: Path, digest: str, store: Path) -> Path:
    """Copy the packages below ``root`` into ``store/<digest>`` unless they are there, with the commit; returns that folder."""
    target = store / digest[:16]
    if target.is_dir() and code_digest(target) == digest:
        return target
    store.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=store, prefix="."))
    for path in _sources(root):
        copy = temporary / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    (temporary / COMMIT_FILE).write_text(source_commit(root) or "", encoding="utf-8")
    if target.exists():  # altered by hand: put it aside, jobs that run from it keep their open files
        target.rename(Path(tempfile.mkdtemp(dir=store, prefix=".")) / target.name)
    temporary.rename(target)
    return target


def _sources(root: Path) -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".smk":
                yield path
