"""Shards: each element once on disk, and any layout reads what any other wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Along

from engines.checkpoint import (
    StateIncomplete,
    StateKeyMismatch,
    StateShapeMismatch,
    StateStore,
    read_state,
)
from engines.checkpoint.shards import Shard, load_shards, write_shards
from tests.support.ranks import run_ranks

LAYOUTS = {"1": ((1,), [Along(0)]), "2": ((2,), [Along(0)]), "4": ((4,), [Along(0)])}
LAYOUTS["hsdp"] = ((2, 2), [Replicate(), Along(0)])
LAYOUTS["2-d"] = ((2, 2), [Along(0), Along(1)])
WORLD = {"1": 1, "2": 2, "4": 4, "hsdp": 4, "2-d": 4}


def full_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "even": torch.randn(8, 4, generator=generator),
        "uneven": torch.randn(5, 3, generator=generator),
        "fewer rows than ranks": torch.randn(1, 6, generator=generator),
        "half": torch.randn(7, 2, generator=generator).to(torch.bfloat16),
        "plain": torch.randn(3, generator=generator),
        "counter": torch.tensor(17.0),
        "empty": torch.zeros(0, 2),
    }


def laid_out(layout: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape)
    plain = {"plain", "counter", "empty"}
    return {
        name: tensor if name in plain else distribute_tensor(tensor, mesh, placements)
        for name, tensor in tensors.items()
    }


def write(folder: Path, layout: str) -> None:
    """Collective: all ranks write, rank 0 publishes."""
    store = StateStore(folder)
    temporary = [store.begin(1)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(temporary)
    index = write_shards(
        temporary[0] / "actor", dist.get_rank(), laid_out(layout, full_tensors()), {"lr": 0.1}
    )
    indexes = [None] * dist.get_world_size()
    dist.all_gather_object(indexes, index)
    if dist.get_rank() == 0:
        store.commit(1, {}, {"actor": indexes})


def read(folder: Path, layout: str) -> None:
    expected = full_tensors()
    targets = laid_out(layout, {name: torch.full_like(tensor, -1) for name, tensor in expected.items()})
    assert load_shards(folder / "step000001", "actor", targets) == {"lr": 0.1}
    for name, target in targets.items():
        whole = target.full_tensor() if isinstance(target, DTensor) else target
        assert torch.equal(whole, expected[name]), name


@pytest.mark.parametrize("source", LAYOUTS)
def test_any_layout_reads_any_other(source: str, tmp_path: Path) -> None:
    run_ranks(WORLD[source], write, tmp_path, source)
    for target in LAYOUTS:
        run_ranks(WORLD[target], read, tmp_path, target)


@pytest.mark.parametrize("layout", ["4", "hsdp"])
def test_every_element_is_written_once(layout: str, tmp_path: Path) -> None:
    run_ranks(4, write, tmp_path, layout)
    path = tmp_path / "step000001"
    elements = 0
    for name in read_state(path)["files"]:
        with safe_open(path / name, framework="pt") as file:
            elements += sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    assert elements == sum(tensor.numel() for tensor in full_tensors().values())
    files = {"4": 4, "hsdp": 2}[layout]  # of two replicas only the first writes
    assert len(list((path / "actor").iterdir())) == files


def test_explicit_shards_read_from_other_cuts(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    store = StateStore(tmp_path)
    folder = store.begin(1) / "actor"
    indexes = [
        write_shards(folder, rank, {"w": Shard(whole[low:high], (low, 0), (6, 4))}, {})
        for rank, (low, high) in enumerate([(0, 1), (1, 6), (6, 6)])
    ]
    path = store.commit(1, {}, {"actor": indexes})
    local = torch.zeros(3, 2)
    load_shards(path, "actor", {"w": Shard(local, (0, 1), (6, 4))})
    assert torch.equal(local, whole[0:3, 1:3])


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    path_index = write_shards(store.begin(1) / "actor", 0, {"w": torch.ones(2, 2)}, {})
    path = store.commit(1, {}, {"actor": [path_index]})
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    load_shards(path, "actor", {"w": parameter})
    assert parameter.requires_grad
    assert torch.equal(parameter, torch.ones(2, 2))


def test_names_shapes_types_and_roles_are_checked_before_anything_is_filled(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    index = write_shards(store.begin(1) / "actor", 0, {"a": torch.ones(2), "b": torch.ones(3)}, {})
    path = store.commit(1, {}, {"actor": [index]})
    a = torch.zeros(2)
    with pytest.raises(StateKeyMismatch, match=r"1 missing \(c\); 1 unexpected \(b\)"):
        load_shards(path, "actor", {"a": a, "c": torch.zeros(3)})
    with pytest.raises(StateShapeMismatch, match=r"b: saved as float32 \[3\], the engine has float32 \[4\]"):
        load_shards(path, "actor", {"a": a, "b": torch.zeros(4)})
    with pytest.raises(StateShapeMismatch, match="has float64"):
        load_shards(path, "actor", {"a": a, "b": torch.zeros(3, dtype=torch.float64)})
    with pytest.raises(StateKeyMismatch, match=r"no role 'critic', it has \['actor'\]"):
        load_shards(path, "critic", {"a": a})
    assert torch.equal(a, torch.zeros(2))
    with pytest.raises(StateKeyMismatch, match=r"1 missing \(c\)$"):
        load_shards(path, "actor", {"a": a, "c": torch.zeros(3)}, partial=True)
    load_shards(path, "actor", {"a": a}, partial=True)
    assert torch.equal(a, torch.ones(2))


def _indexes(folder: Path, blocks: list[tuple[int, int]], scalars: list[dict]) -> list:
    return [
        write_shards(folder, rank, {"w": Shard(torch.ones(high - low), (low,), (6,))}, scalars[rank])
        for rank, (low, high) in enumerate(blocks)
    ]


@pytest.mark.parametrize(
    ("blocks", "scalars", "message"),
    [
        ([(0, 3), (3, 5)], [{}, {}], "wrote 5 of its 6 elements"),
        ([(0, 4), (3, 6)], [{}, {}], "overlap"),
        ([(0, 3), (4, 7)], [{}, {}], "outside"),
        ([(0, 3), (3, 6)], [{"n": 1}, {"n": 2}], r"different scalars: \['n'\]"),
    ],
)
def test_ranks_that_do_not_fit_together_publish_nothing(blocks, scalars, message, tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    indexes = _indexes(store.begin(1) / "actor", blocks, scalars)
    with pytest.raises(StateIncomplete, match=message):
        store.commit(1, {}, {"actor": indexes})
    assert store.newest() is None


def _save_partial() -> str:
    mesh = init_device_mesh("cpu", (1,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(TypeError, match=r"w: placement .* cannot be saved"):
        write_shards(Path("unused"), 0, {"w": partial}, {})
    return "refused"


def test_a_partial_sum_is_refused() -> None:
    assert run_ranks(1, _save_partial) == ["refused"]
