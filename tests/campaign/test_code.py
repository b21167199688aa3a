"""Snapshots of the source: jobs run what the campaign started with, and say which commit that was."""

from __future__ import annotations

import subprocess
from pathlib import Path

from workflow.campaign.code import code_digest, snapshot, source_commit


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "a change")
    return git(folder, "rev-parse", "HEAD")


def test_a_snapshot_names_the_commit_it_was_made_from(tmp_path):
    root = tmp_path / "repository"
    for package in ("engines", "workflow"):
        (root / package).mkdir(parents=True)
        (root / package / "module.py").write_text("x = 1\n")
    assert source_commit(root) is None
    git(tmp_path, "init", "--quiet", str(root))
    first = commit(root)
    copies = [snapshot(root, code_digest(root), tmp_path)]
    (root / "engines" / "module.py").write_text("x = 2\n")
    assert source_commit(root) == f"{first}-dirty"
    copies.append(snapshot(root, code_digest(root), tmp_path))
    second = commit(root)
    assert source_commit(root) == second
    assert [source_commit(copy) for copy in copies] == [first, f"{first}-dirty"]
    assert [code_digest(copy) == code_digest(root) for copy in copies] == [False, True]


def test_a_snapshot_of_what_is_no_repository_names_no_commit(tmp_path):
    root = tmp_path / "source"
    (root / "engines").mkdir(parents=True)
    copy = snapshot(root, code_digest(root), tmp_path / "store")
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("")
    commit(tmp_path)
    assert source_commit(copy) is None
