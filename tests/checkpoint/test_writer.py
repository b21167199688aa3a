"""Writing in the background: the bytes of the moment at which it was asked for, whatever happens to the tensors then."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path

import pytest
import torch

from engines.checkpoint import StateDiskFull, StateStore, verify_state
from engines.checkpoint.shards import Shard, load_shards, write_shards
from engines.checkpoint.writer import ShardWriter
from tests.support.processes import fork

SHARD = "actor/rank00000.safetensors"


def tensors(number: float) -> dict[str, torch.Tensor | Shard]:
    """One of each kind that is written, and one block that another rank writes."""
    block = torch.full((2, 50_000), number)
    return {
        "plain": torch.full((100_000,), number),
        "strided": torch.full((300, 200), number).t(),
        "block": Shard(block[:, ::2], (0, 0), (2, 25_000)),
        "another's": Shard(block[:, 1::2], (0, 0), (2, 25_000), owned=False),
        "number": torch.tensor(number, dtype=torch.float64),
    }


def local(tensor: torch.Tensor | Shard) -> torch.Tensor:
    return tensor.local if isinstance(tensor, Shard) else tensor


def test_the_bytes_are_those_of_the_moment_and_of_a_write_that_is_waited_for(tmp_path: Path) -> None:
    writer = ShardWriter()
    for number in (1.0, 2.0, 3.0):
        state = tensors(number)
        expected = write_shards(tmp_path / f"waited{number}", 0, state, {"step": 1})
        index = writer.write(tmp_path / f"behind{number}", 0, state, {"step": 1})
        for tensor in state.values():
            local(tensor).fill_(-1)  # as the next step does, at once
        assert index == expected
        writer.check(wait=True)
        files = [tmp_path / f"{kind}{number}" / "rank00000.safetensors" for kind in ("waited", "behind")]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert [entry.name for entry in files[1].parent.iterdir()] == [files[1].name]


def test_the_memory_of_the_copies_is_kept_while_shapes_stay(tmp_path: Path) -> None:
    writer = ShardWriter()

    def places(number: float) -> list[int]:
        writer.write(tmp_path / str(number), 0, tensors(number), {})
        return sorted(copy.data_ptr() for copy in writer._copies.values())

    assert places(1.0) == places(2.0)
    writer.write(tmp_path / "other", 0, {"plain": torch.ones(7)}, {})
    writer.check(wait=True)
    target = torch.zeros(7)
    assert (tmp_path / "other" / "rank00000.safetensors").exists()
    assert writer._copies["plain"].shape == target.shape


def test_a_state_is_known_to_be_written_when_all_files_are_there(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    folder = store.begin(1)
    halves = [
        {"w": Shard(torch.full((2,), float(rank)), (2 * rank,), (4,)), "none": torch.zeros(3)}
        for rank in (0, 1)
    ]
    indexes = [write_shards(folder / "actor", 0, halves[0], {})]
    writer = ShardWriter()
    indexes.append(writer.write(folder / "actor", 1, halves[1], {}))
    writer.check(wait=True)
    assert store.is_written(1, {"actor": indexes})
    whole = folder / "actor" / "rank00001.safetensors"
    part = whole.rename(whole.with_name(f"{whole.name}.part"))
    assert not store.is_written(1, {"actor": indexes})
    part.rename(whole)
    path = store.commit(1, {}, {"actor": indexes})
    target = {"w": torch.zeros(4), "none": torch.ones(3)}
    load_shards(path, "actor", target)
    assert target["w"].tolist() == [0, 0, 1, 1]


class Late(ShardWriter):
    """Its thread begins to write when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self._thread.submit(self.let.wait, 60)


def test_a_rank_that_writes_nothing_touches_nothing_however_late_it_is(tmp_path: Path) -> None:
    store, writer, late = StateStore(tmp_path), ShardWriter(), Late()
    folder = store.begin(1)
    indexes = [
        writer.write(folder / "actor", 0, {"w": torch.ones(3)}, {}),
        late.write(folder / "actor", 1, {"w": torch.ones(3)}, {}),  # rank 0 writes it
    ]
    writer.check(wait=True)
    assert store.is_written(1, {"actor": indexes})
    store.commit(1, {}, {"actor": indexes})
    late.let.set()
    late.check(wait=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step000001"]


def test_a_state_can_be_published_as_soon_as_its_files_are_there(tmp_path: Path, monkeypatch) -> None:
    """Whatever the ranks have still to do then is done in a folder that is gone."""
    store, writer, rename = StateStore(tmp_path), ShardWriter(), Path.rename
    committed = threading.Event()

    def slow(part: Path, file: Path) -> None:
        rename(part, file)
        if threading.current_thread() is not threading.main_thread():
            committed.wait(60)

    monkeypatch.setattr(Path, "rename", slow)
    index = writer.write(store.begin(1) / "actor", 0, {"w": torch.ones(3)}, {})
    while not store.is_written(1, {"actor": [index]}):
        time.sleep(0.001)
    store.commit(1, {}, {"actor": [index]})
    committed.set()
    writer.check(wait=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step000001"]


def _fill_the_disk_behind(folder: Path, end: str) -> None:
    store, writer = StateStore(folder), ShardWriter()
    begun = store.begin(40)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    writer.write(begun / "actor", 0, tensors(1.0), {})
    try:
        if end == "check":
            writer.check(wait=True)
        else:
            writer.write(begun / "actor", 0, tensors(2.0), {})
    except StateDiskFull:
        writer.check(wait=True)  # said once
        os._exit(7)


@pytest.mark.parametrize("end", ["check", "next write"])
def test_a_full_disk_is_said_and_leaves_the_state_before_and_no_file(end: str, tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    index = write_shards(store.begin(20) / "actor", 0, {"w": torch.ones(3)}, {})
    store.commit(20, {}, {"actor": [index]})
    process = fork(_fill_the_disk_behind, tmp_path, end)
    process.join()
    assert process.exitcode == 7
    assert verify_state(StateStore(tmp_path).newest())["step"] == 20
    assert not list(tmp_path.glob(".step*/actor/*"))
