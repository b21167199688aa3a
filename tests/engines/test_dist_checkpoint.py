"""Megatron's distributed checkpoints: regions of chunked tensors, and indexes that are not to be trusted."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from engines.dist_checkpoint import (
    COMMON,
    FORMAT_FILE,
    INDEX,
    ChunkFile,
    DistCheckpoint,
    DistCheckpointError,
    write_index,
)

WHOLE = torch.arange(4.0 * 6).reshape(4, 6)
VECTOR = torch.tensor([1, 2, 3], dtype=torch.bfloat16)
BALLAST = torch.zeros(1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A matrix in four chunks over two files, and a vector."""
    chunks = []
    for half in (0, 1):
        with ChunkFile(tmp_path, f"__{half}_0.distcp") as file:
            for column in (0, 3):
                piece = WHOLE[2 * half : 2 * half + 2, column : column + 3]
                file.append("matrix", piece, (2 * half, column), WHOLE.shape)
        chunks += file.chunks
    with ChunkFile(tmp_path, "__2_0.distcp") as file:
        file.append("vector", VECTOR, (0,), VECTOR.shape)
        file.append_object("layer._extra_state/shard_0_1", None)
    write_index(tmp_path, [*chunks, *file.chunks], {"iteration": 0})
    return tmp_path


def test_any_region_is_read(folder: Path) -> None:
    checkpoint = DistCheckpoint(folder)
    assert checkpoint.common == {"iteration": 0}
    assert set(checkpoint.tensors) == {"matrix", "vector"}
    assert torch.equal(checkpoint.read("matrix"), WHOLE)
    assert torch.equal(checkpoint.read("matrix", (2, 0), (2, 3)), WHOLE[2:, :3])
    assert torch.equal(checkpoint.read("matrix", (1, 2), (2, 3)), WHOLE[1:3, 2:5])
    assert torch.equal(checkpoint.read("vector"), VECTOR)


def test_torch_reads_it(folder: Path) -> None:
    state = {"matrix": torch.zeros(4, 6), "vector": torch.zeros(3, dtype=torch.bfloat16)}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(state["matrix"], WHOLE)
    assert torch.equal(state["vector"], VECTOR)


def test_a_view_does_not_take_its_storage_along(tmp_path: Path) -> None:
    with ChunkFile(tmp_path, "__0_0.distcp") as file:
        file.append("part", BALLAST[:2], (0,), (2,))
    assert (tmp_path / "__0_0.distcp").stat().st_size < 4 * len(BALLAST)


@pytest.mark.parametrize(
    ("key", "region", "message"),
    [
        ("other", (), "no tensor 'other'"),
        ("matrix", ((3, 0), (2, 6)), r"matrix is \[4, 6\].*not in it"),
        ("matrix", ((0,), (2,)), "not in it"),
    ],
)
def test_what_is_not_there_is_refused(folder: Path, key: str, region: tuple, message: str) -> None:
    with pytest.raises(DistCheckpointError, match=message):
        DistCheckpoint(folder).read(key, *region)


def test_a_hole_is_found(folder: Path) -> None:
    checkpoint = DistCheckpoint(folder)
    del checkpoint.tensors["matrix"][0]
    with pytest.raises(DistCheckpointError, match="matrix hold 18 of 24 entries"):
        checkpoint.read("matrix")


class Hostile:
    """Unpickling it makes a file named ``proof``."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.proof),)


def hostile_index(folder: Path, proof: Path) -> None:
    (folder / INDEX).write_bytes(pickle.dumps(Hostile(proof)))


def hostile_common(folder: Path, proof: Path) -> None:
    torch.save({"iteration": Hostile(proof)}, folder / COMMON)


def hostile_chunk(folder: Path, proof: Path) -> None:
    path = folder / "__0_0.distcp"
    torch.save(Hostile(proof), path)
    path.write_bytes(path.read_bytes() + bytes(10_000))


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (hostile_index, r"\.metadata: refused: it names posix.mkdir, which is no part of the format"),
        (hostile_common, r"common.pt: it holds more than plain values"),
        (hostile_chunk, r"__0_0.distcp: the chunk of matrix cannot be read"),
    ],
)
def test_nothing_that_a_file_names_is_run(folder: Path, tmp_path: Path, poison, message: str) -> None:
    proof = tmp_path / "proof"
    poison(folder, proof)
    with pytest.raises(DistCheckpointError, match=message):
        DistCheckpoint(folder).read("matrix")
    assert not proof.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../__0_0.distcp"}, r"'\.\./__0_0.distcp', which is no file of this folder"),
        ({"file": "__9_0.distcp"}, r"__9_0.distcp: missing"),
        ({"start": 10**9}, r"__0_0.distcp: truncated"),
        ({"offsets": (3, 0)}, "outside of its tensor"),
        ({"start": -5}, "outside of its tensor"),
    ],
)
def test_an_index_that_points_outside_is_refused(folder: Path, change: dict, message: str) -> None:
    chunks = [chunk for chunks in DistCheckpoint(folder).tensors.values() for chunk in chunks]
    write_index(folder, [replace(chunks[0], **change), *chunks[1:]], {})
    with pytest.raises(DistCheckpointError, match=message):
        DistCheckpoint(folder)


@pytest.mark.parametrize("name", [INDEX, COMMON, FORMAT_FILE])
def test_a_file_that_is_missing_or_damaged_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"\x80\x04damaged")
    with pytest.raises(DistCheckpointError, match=name):
        DistCheckpoint(folder)
    (folder / name).unlink()
    if name == COMMON:  # newer versions of Megatron write none
        assert DistCheckpoint(folder).common == {}
        return
    with pytest.raises(DistCheckpointError, match=f"{name}: missing"):
        DistCheckpoint(folder)
