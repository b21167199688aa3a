"""States: published whole or not at all, damage is found and passed over, what is kept is decided by the folder."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.checkpoint import (
    StateDamaged,
    StateDiskFull,
    StateError,
    StateExists,
    StateFormatUnknown,
    StateIncomplete,
    StateStore,
    read_state,
    verify_state,
)
from engines.checkpoint.shards import load_shards, write_shards
from engines.checkpoint.verify import self_digest
from tests.support.processes import fork

SHARD = "actor/rank00000.safetensors"


def save(store: StateStore, step: int, size: int = 1000) -> Path:
    folder = store.begin(step)
    index = write_shards(folder / "actor", 0, {"weight": torch.full((size,), float(step))}, {"step": step})
    return store.commit(step, {"cursor": step}, {"actor": [index]})


def value(path: Path) -> float:
    target = torch.zeros(1000)
    load_shards(path, "actor", {"weight": target})
    assert target.unique().numel() == 1
    return target[0].item()


def flip_bit(file: Path, position: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(bytes(data))


def test_a_state_is_described_and_verified(tmp_path: Path) -> None:
    path = save(StateStore(tmp_path), 40)
    assert path == tmp_path / "step000040"
    state = verify_state(path)
    assert (state["step"], state["trainer"]) == (40, {"cursor": 40})
    assert state["roles"]["actor"]["scalars"] == {"step": 40}
    assert state["roles"]["actor"]["tensors"]["weight"] == {
        "dtype": "float32",
        "shape": [1000],
        "shards": [{"file": SHARD, "key": "weight", "offsets": [0], "shape": [1000]}],
    }
    assert set(state["files"]) == {SHARD}
    assert {entry.name for entry in tmp_path.iterdir()} == {"step000040"}
    assert (path / SHARD).stat().st_mode & 0o444 == 0o444


def test_newest_is_the_largest_step_and_none_without_states(tmp_path: Path) -> None:
    assert StateStore(tmp_path / "absent").newest() is None
    store = StateStore(tmp_path)
    for step in (999_999, 1_000_000, 5):
        save(store, step)
    assert store.newest() == tmp_path / "step1000000"
    assert store.newest(at_most=999_999) == tmp_path / "step999999"
    assert store.newest(at_most=4) is None


def test_an_empty_folder_of_a_step_is_no_state_and_no_obstacle(tmp_path: Path, caplog) -> None:
    (tmp_path / "step000002").mkdir()  # as a workflow engine does for an output to come
    store = StateStore(tmp_path)
    assert store.newest() is None
    assert value(save(store, 2)) == 2
    assert not caplog.records


def _remove_state_file(path: Path) -> None:
    (path / "state.json").unlink()


def _remove_shard(path: Path) -> None:
    (path / SHARD).unlink()


def _flip_shard(path: Path) -> None:
    flip_bit(path / SHARD)


def _truncate_shard(path: Path) -> None:
    os.truncate(path / SHARD, (path / SHARD).stat().st_size - 1)


def _truncate_state_file(path: Path) -> None:
    os.truncate(path / "state.json", 100)


def _alter_trainer(path: Path) -> None:
    file = path / "state.json"
    file.write_text(file.read_text().replace('"cursor": 40', '"cursor": 41'))


def _binary_state_file(path: Path) -> None:
    flip_bit(path / "state.json", 0)


def _unreadable_shard(path: Path) -> None:
    (path / SHARD).unlink()
    (path / SHARD).symlink_to(SHARD.rpartition("/")[2])


def _unreadable_state_file(path: Path) -> None:
    (path / "state.json").unlink()
    (path / "state.json").symlink_to("state.json")


def _other_format(path: Path) -> None:
    state = json.loads((path / "state.json").read_text())
    state["format"] = 99
    state["digest"] = self_digest(state)
    (path / "state.json").write_text(json.dumps(state))


def _other_step(path: Path) -> None:
    path.rename(path.with_name("step000050"))


DAMAGES = {
    _remove_state_file: (StateDamaged, "state.json: missing"),
    _remove_shard: (StateDamaged, f"{SHARD}: missing"),
    _unreadable_shard: (StateDamaged, f"{SHARD}: cannot be read: Too many levels"),
    _unreadable_state_file: (StateDamaged, "state.json: cannot be read: Too many levels"),
    _flip_shard: (StateDamaged, f"{SHARD}: its digest"),
    _truncate_shard: (StateDamaged, "bytes, .* were published"),
    _truncate_state_file: (StateDamaged, "state.json: not JSON"),
    _alter_trainer: (StateDamaged, "its own digest"),
    _binary_state_file: (StateDamaged, "state.json"),
    _other_format: (StateFormatUnknown, "format 99, this version reads format 1"),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_the_state_before_is_used(damage, tmp_path: Path, caplog) -> None:
    store = StateStore(tmp_path)
    save(store, 20)
    path = save(store, 40)
    damage(path)
    error, pattern = DAMAGES[damage]
    with pytest.raises(error, match=pattern):
        verify_state(path)
    with caplog.at_level(logging.WARNING):
        assert StateStore(tmp_path).newest() == tmp_path / "step000020"
    assert "step000040" in caplog.text
    assert "passed over" in caplog.text
    save(StateStore(tmp_path), 40)  # the same step, computed again, takes the damaged one's place
    caplog.clear()
    assert StateStore(tmp_path).newest() == path
    assert not caplog.records


def test_a_state_in_another_step_s_folder_is_passed_over(tmp_path: Path, caplog) -> None:
    store = StateStore(tmp_path)
    save(store, 20)
    _other_step(save(store, 40))
    assert store.newest() == tmp_path / "step000020"
    assert "is of step 40" in caplog.text


def test_every_single_bit_counts(tmp_path: Path) -> None:
    """Whichever byte of the description is hit, it is noticed (or the text means the same)."""
    path = save(StateStore(tmp_path), 1)
    good = read_state(path)
    text = (path / "state.json").read_bytes()
    for position in range(0, len(text), 3):
        (path / "state.json").write_bytes(
            text[:position] + bytes([text[position] ^ 2]) + text[position + 1 :]
        )
        with contextlib.suppress(StateError):
            assert read_state(path) == good
    (path / "state.json").write_bytes(text)
    assert read_state(path) == good


@pytest.mark.parametrize("damaged", [False, True])
def test_a_state_is_on_disk_before_it_can_be_seen(damaged, tmp_path: Path, monkeypatch) -> None:
    """Every file and folder of it, and then its name: no power cut leaves a name without bytes, or takes the name away again."""
    final = tmp_path / "step000040"
    if damaged:
        (save(StateStore(tmp_path), 40) / "state.json").unlink()
    durable, fsync = set(), os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        durable.add((os.fstat(descriptor).st_ino, (final / "state.json").exists()))

    monkeypatch.setattr(os, "fsync", noted)
    save(StateStore(tmp_path), 40)
    inside = [final, *final.rglob("*")]
    assert {path.name for path in inside} == {final.name, "actor", Path(SHARD).name, "state.json"}
    assert [path for path in inside if (path.stat().st_ino, False) not in durable] == []
    assert ((final if damaged else tmp_path).stat().st_ino, True) in durable


def test_an_intact_state_is_not_replaced(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    path = save(store, 40)
    with pytest.raises(StateExists, match="step 40 is already published"):
        save(store, 40)
    assert value(path) == 40
    assert {entry.name for entry in tmp_path.iterdir()} == {"step000040"}


def test_commit_needs_begin_and_every_file(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    with pytest.raises(StateError, match="without begin"):
        store.commit(1, {}, {})
    folder = store.begin(1)
    index = write_shards(folder / "actor", 0, {"weight": torch.ones(3)}, {})
    (folder / SHARD).unlink()
    with pytest.raises(StateDamaged, match="not written"):
        store.commit(1, {}, {"actor": [index]})
    folder = store.begin(1)
    with pytest.raises(StateIncomplete, match="no rank"):
        store.commit(1, {}, {"actor": []})
    assert store.newest() is None


def _die_between_files(folder: Path) -> None:
    store = StateStore(folder)
    temporary = store.begin(40)
    write_shards(temporary / "actor", 0, {"weight": torch.ones(10)}, {})
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_between_files(tmp_path: Path, caplog) -> None:
    save(StateStore(tmp_path), 20)
    process = fork(_die_between_files, tmp_path)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert any(entry.name.startswith(".step000040.") for entry in tmp_path.iterdir())
    store = StateStore(tmp_path)
    assert store.newest() == tmp_path / "step000020"
    assert not caplog.records  # what was never published is no damage
    save(store, 40)
    assert {entry.name for entry in tmp_path.iterdir()} == {"step000020", "step000040"}


def _save_for_ever(folder: Path) -> None:
    store = StateStore(folder)
    newest = store.newest()
    step = int(newest.name.removeprefix("step")) if newest else 0
    while True:
        step += 1
        save(store, step)
        store.retain("last")


def test_killed_at_any_moment(tmp_path: Path, caplog) -> None:
    seen = 0
    for attempt in range(8):
        process = fork(_save_for_ever, tmp_path)
        time.sleep(0.05 + 0.013 * attempt)
        process.kill()
        process.join()
        newest = StateStore(tmp_path).newest()
        if newest is not None:
            step = verify_state(newest)["step"]
            assert value(newest) == step >= seen
            seen = step
    assert seen > 0
    assert not caplog.records


def test_disk_full_is_said_before_anything_is_written(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    path = save(store, 20)
    with pytest.raises(StateDiskFull, match=r"step 40 needs .* bytes and .* are free"):
        store.begin(40, expected_bytes=1 << 60)
    assert {entry.name for entry in tmp_path.iterdir()} == {"step000020"}
    assert value(store.newest()) == 20
    assert path == store.newest()


def _save_with_a_small_file_limit(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        save(StateStore(folder), 40, size=100_000)
    except StateDiskFull:
        os._exit(7)


def test_disk_full_while_writing(tmp_path: Path) -> None:
    save(StateStore(tmp_path), 20)
    process = fork(_save_with_a_small_file_limit, tmp_path)
    process.join()
    assert process.exitcode == 7
    store = StateStore(tmp_path)
    assert value(store.newest()) == 20
    assert not list(tmp_path.glob(".step*/actor/*"))


def test_retention_reads_the_folder(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):  # a new store each time, as after a restart
        save(StateStore(tmp_path), step)
    (tmp_path / "step000020" / "manifest.json").write_text("{}")
    assert StateStore(tmp_path).retain("all") == []
    assert StateStore(tmp_path).retain("every:30") == [10, 20]
    assert {entry.name for entry in tmp_path.iterdir()} == {"step000020", "step000030", "step000040"}
    assert {entry.name for entry in (tmp_path / "step000020").iterdir()} == {"manifest.json", "released.json"}
    assert StateStore(tmp_path).retain("last", keep={30}) == []  # somebody has still to read it
    assert StateStore(tmp_path).retain("last") == [30]
    assert StateStore(tmp_path).retain("last") == []
    assert StateStore(tmp_path).newest() == tmp_path / "step000040"
    with pytest.raises(ValueError, match="every:N"):
        StateStore(tmp_path).retain("every:0")


def test_a_state_that_was_saved_behind_a_later_one_is_kept(tmp_path: Path) -> None:
    for step in (10, 40, 12, 13):
        save(StateStore(tmp_path), step)
    behind = {"keep": {40}, "of": lambda step: step <= 13}
    assert StateStore(tmp_path).retain("last", **behind) == [10, 12]
    assert StateStore(tmp_path).newest(at_most=20) == tmp_path / "step000013"


def test_of_several_policies_each_keeps_what_it_names(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(StateStore(tmp_path), step)
    assert StateStore(tmp_path).retain("last", "all") == []
    assert StateStore(tmp_path).retain("every:2", "every:3", of=lambda step: step != 1) == [5]


def test_states_that_are_not_meant_are_not_looked_at(tmp_path: Path, caplog) -> None:
    for step in (1, 2, 3, 4):
        save(StateStore(tmp_path), step)
    flip_bit(tmp_path / "step000004" / SHARD)
    (tmp_path / "step000001" / "state.json").rename(tmp_path / "step000001" / "released.json")
    assert StateStore(tmp_path).retain("last", of={2, 3}.__contains__) == [2]
    assert not caplog.records
    assert (tmp_path / "step000001" / SHARD).exists()


def test_retention_never_trusts_a_damaged_state(tmp_path: Path, caplog) -> None:
    for step in (10, 20, 30):
        save(StateStore(tmp_path), step)
    flip_bit(tmp_path / "step000030" / SHARD)
    assert StateStore(tmp_path).retain("last") == [10]
    assert StateStore(tmp_path).newest() == tmp_path / "step000020"
    assert "step000030" in caplog.text


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.just("save") | st.sampled_from(["last", "every:2", "every:3"]) | st.integers(1, 5), max_size=14
    )
)
def test_retention_never_takes_the_last_state_that_can_be_verified(actions) -> None:
    """Saves, damage to the state so many steps ago, and retention, in any order, with a restart after each."""
    with tempfile.TemporaryDirectory() as folder:
        step = 0
        for action in actions:
            store = StateStore(Path(folder))
            if action == "save":
                step += 1
                save(store, step)
            elif isinstance(action, int):
                if (file := Path(folder) / f"step{step + 1 - action:06d}" / SHARD).exists():
                    flip_bit(file)
            else:
                newest = store.newest()
                released = store.retain(action)
                assert StateStore(Path(folder)).newest() == newest
                assert newest is not None or not released
                assert all(newest > newest.with_name(f"step{gone:06d}") for gone in released)


@pytest.mark.parametrize("lost", ["released", *DAMAGES], ids=lambda lost: getattr(lost, "__name__", lost))
def test_a_state_that_is_saved_again_keeps_what_was_published_beside_it(lost, tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    path = save(store, 40)
    published = {"manifest.json": "{}", ".published.json": "{}"}
    for name, text in published.items():
        (path / name).write_text(text)
    if lost == "released":
        save(store, 50)
        assert store.retain("last") == [40]
    else:
        lost(path)
    again = save(StateStore(tmp_path), 40)
    assert (again, verify_state(again)["step"], value(again)) == (path, 40, 40)
    assert {name: (path / name).read_text() for name in published} == published
    assert {entry.name for entry in path.iterdir()} == {"actor", "state.json", *published}
    assert not list(tmp_path.glob(".*"))
    assert (StateStore(tmp_path).retain("last") == [40]) == (lost == "released")


def _replace_for_ever(folder: Path) -> None:
    while True:
        save(StateStore(folder), 10)
        StateStore(folder).retain("last")


def test_a_kill_while_a_released_state_is_saved_again_loses_no_manifest(tmp_path: Path) -> None:
    save(StateStore(tmp_path), 10)
    save(StateStore(tmp_path), 20)
    (tmp_path / "step000010" / "manifest.json").write_text("{}")
    assert StateStore(tmp_path).retain("last") == [10]
    for attempt in range(6):
        process = fork(_replace_for_ever, tmp_path)
        time.sleep(0.05 + 0.013 * attempt)
        process.kill()
        process.join()
        assert (tmp_path / "step000010" / "manifest.json").read_text() == "{}"
        assert StateStore(tmp_path).newest() == tmp_path / "step000020"
        if (state := StateStore(tmp_path).newest(at_most=10)) is not None:
            assert value(state) == 10


def test_a_release_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    for step in (10, 20):
        save(StateStore(tmp_path), step)
    (tmp_path / "step000010" / "state.json").rename(tmp_path / "step000010" / "released.json")
    assert StateStore(tmp_path).retain("last") == []
    assert {entry.name for entry in tmp_path.iterdir()} == {"step000020"}


def test_verification_loads_no_framework(tmp_path: Path) -> None:
    path = save(StateStore(tmp_path), 40)
    code = (
        "import sys; from pathlib import Path; from engines.checkpoint import StateStore, verify_state; "
        f"verify_state(Path({str(path)!r})); assert StateStore(Path({str(tmp_path)!r})).newest(); "
        "assert not {'torch', 'safetensors', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
