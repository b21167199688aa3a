"""Snapshots of the source: jobs run what the campaign started with, and say which commit that was."""

from __future__ import annotations

import subprocess
from pathlib import Path

from engines.registry import EngineRegistry
from workflow.campaign.code import (
    ENVIRONMENTS,
    code_digest,
    environment_digest,
    snapshot,
    source_commit,
    source_root,
)


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


def test_the_digest_of_an_environment_is_of_all_that_is_installed_in_it(tmp_path):
    (tmp_path / "env").mkdir()
    for name in ("torch", "cpu-light", "megatron"):
        (tmp_path / "env" / f"{name}.txt").write_text("one==1\n")
    before = [environment_digest(tmp_path, name) for name in ("cpu", "cpu+megatron")]
    (tmp_path / "env" / "megatron.txt").write_text("one==2\n")
    after = [environment_digest(tmp_path, name) for name in ("cpu", "cpu+megatron")]
    assert before[0] == after[0] != before[1] != after[1]
    (tmp_path / "env" / "torch.txt").write_text("one==2\n")
    assert environment_digest(tmp_path, "cpu") != after[0]
    assert environment_digest(tmp_path, "cpu+megatron") != after[1]


def test_every_environment_that_users_are_sent_to_is_there():
    named = {f"env/{triple.environment}.txt" for triple in EngineRegistry.triples()}
    named |= {name for names in ENVIRONMENTS.values() for name in names}
    assert [name for name in sorted(named) if not (source_root() / name).is_file()] == []
