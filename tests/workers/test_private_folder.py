"""Folders that do not outlive their owner, and whose sockets' paths are short enough."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.workers.private_folder import LONGEST_SOCKET_PATH, NoShortFolder, PrivateFolder
from engines.workers.ray_settings import DEEPEST, PREFIX

ROOM = LONGEST_SOCKET_PATH - len(DEEPEST) - len(PREFIX) - 9
"""For the folder in which it is made."""


def test_leftovers_of_dead_owners_go_and_live_ones_stay(tmp_path):
    dead = PrivateFolder(PREFIX, parent=str(tmp_path))
    os.close(dead._lock)
    live, again = PrivateFolder(PREFIX, parent=str(tmp_path)), PrivateFolder(PREFIX, parent=str(tmp_path))
    assert not dead.path.exists()
    assert live.path.stat().st_mode & 0o777 == 0o700
    assert set(tmp_path.iterdir()) == {live.path, again.path}
    for folder in (live, again):
        folder.remove()
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_node_is_left_alone(tmp_path):
    elsewhere = PrivateFolder(PREFIX, parent=str(tmp_path))
    (elsewhere.path / "lock").write_text("another-node")
    os.close(elsewhere._lock)
    PrivateFolder(PREFIX, parent=str(tmp_path)).remove()
    assert elsewhere.path.exists()


def test_what_is_kept_goes_with_the_next_owner(tmp_path):
    folder = PrivateFolder(PREFIX, parent=str(tmp_path))
    for name in ("logs", "ray"):
        (folder.path / name).mkdir()
    folder.remove(keep="logs")
    assert {entry.name for entry in folder.path.iterdir()} == {"logs", "lock"}
    PrivateFolder(PREFIX, parent=str(tmp_path)).remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("length", "fits"), [(ROOM, True), (ROOM + 1, False)])
def test_the_longest_socket_path_is_computed_before_anything_starts(length, fits):
    parent = Path("/tmp/" + "x" * (length - len("/tmp/")))
    parent.mkdir(exist_ok=True)
    try:
        if fits:
            folder = PrivateFolder(PREFIX, DEEPEST, parent=str(parent))
            assert len(f"{folder.path}{DEEPEST}") == LONGEST_SOCKET_PATH
            folder.remove()
        else:
            with pytest.raises(NoShortFolder, match=rf"at most {ROOM} bytes"):
                PrivateFolder(PREFIX, DEEPEST, parent=str(parent))
    finally:
        parent.rmdir()


def test_a_temporary_folder_with_a_long_path_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    folder = PrivateFolder(PREFIX, DEEPEST)
    assert folder.path.parent == Path("/tmp")
    folder.remove()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(NoShortFolder, match=f"{tmp_path}/none: no folder"):
        PrivateFolder(PREFIX, parent=str(tmp_path / "none"))


def test_caches_lie_in_it(tmp_path):
    folder = PrivateFolder(PREFIX, parent=str(tmp_path))
    caches = folder.caches()
    assert {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} < caches.keys()
    assert all(Path(path).is_relative_to(folder.path) for path in caches.values())
    folder.remove()
