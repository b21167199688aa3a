"""Weight files whose tensors are written in any order."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engines.hf_files import WeightFiles
from engines.model_folder import INDEX, check_weight_files

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3),
    "a": torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
    "c": torch.tensor([[7]]),
    "scale": torch.tensor(3.0),
}
KINDS = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize(("max_shard_size", "files"), [(10**9, 1), (16, 2)])
def test_the_order_of_writing_leaves_no_trace(tmp_path: Path, max_shard_size: int, files: int) -> None:
    written = []
    for order in (list(TENSORS), list(reversed(TENSORS))):
        folder = tmp_path / "-".join(order)
        folder.mkdir()
        weights = WeightFiles(folder, KINDS, max_shard_size)
        weights.create()
        for name in order:
            weights.write(name, TENSORS[name])
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1]
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == files
    assert (folder / INDEX).exists() == (files > 1)
    assert set(check_weight_files(folder)) == set(TENSORS)
    read = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_another_type_or_shape_is_refused(tmp_path: Path) -> None:
    weights = WeightFiles(tmp_path, KINDS, 10**9)
    weights.create()
    with pytest.raises(ValueError, match=r"a: torch.float32 \(2,\) where torch.bfloat16"):
        weights.write("a", torch.ones(2))
