"""No device is hard-coded: the engines' own code on a device that torch did not know, and by reading the source."""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from engines.config import RolloutConfig
from engines.registry import EngineRegistry
from engines.rollout.base import Request, Response, SamplingParams
from engines.rollout.transformers import TransformersRollout
from engines.streams import stream_key
from engines.training.base import BaseEngine
from engines.training.batch import MicroBatch
from engines.training.determinism import compute_deterministically
from engines.training.fsdp.engine import ShardedDataParallelEngine
from engines.training.process_group import local_device
from engines.training.schedule import ModelOutputs
from tests.conformance.check_contract import check_residency
from tests.conformance.check_numbers import check_inference, check_training
from tests.conformance.check_states import check_export, check_resume
from tests.conformance.subject import Subject
from tests.engines.test_mindspeed import install_cann
from tests.support.models import save_tiny_model
from tests.support.ranks import RankFailed, run_ranks

ROOT = Path(__file__).parents[2]
NAMED = {
    "engines/catalog.py": "device keys",
    "engines/config/engine.py": "device keys",
    "engines/registry.py": "device keys",
    "engines/training/fsdp/fsdp1.py": "device keys",
    "engines/training/fsdp/fsdp2.py": "device keys",
    "engines/training/megatron/engine.py": "device keys",
    "engines/training/determinism.py": "device keys",
    "engines/training/process_group.py": "device keys and their collectives",
    "engines/workers/private_folder.py": "where a driver's compiler keeps its results",
    "engines/workers/ray_settings.py": "what Ray calls a device",
    "engines/training/fsdp/engine.py": "torch's fused AdamW",
    "engines/training/packed_attention.py": "a kernel of torch",
    "engines/training/flops.py": "peaks of devices by their names",
    "engines/training/megatron/cpu.py": "stands in for it",
}
"""Where the engines may say cuda, and for what."""


def says_cuda(source: str) -> bool:
    """Whether code names the device: as a text of its own, or as what torch or a tensor have by that name."""
    tree = ast.parse(source)
    return any(
        (isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_cuda(node.value))
        or (isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"))
        for node in ast.walk(tree)
    )


def _is_cuda(text: str) -> bool:
    return text == "cuda" or text.startswith("cuda:") or text == "nccl"


def test_cuda_is_named_only_where_it_is_meant() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "engines").rglob("*.py")
        if says_cuda(path.read_text())
    }
    assert found == NAMED.keys()


@pytest.mark.parametrize(
    "line", ["x.to('cuda')", "torch.cuda.synchronize()", "x.cuda()", "f('cuda:0')", "backend = 'nccl'"]
)
def test_a_line_that_names_it_is_found(line: str) -> None:
    assert says_cuda(line)
    assert not says_cuda(line.replace("cuda", "npu").replace("nccl", "hccl"))


def whole(engine: type[BaseEngine]) -> type[BaseEngine]:
    """A sharded engine's code for one rank that shards nothing: torch's sharding needs storages, which the device lacks."""

    class Whole(engine):
        def shard(self, model: nn.Module) -> nn.Module:
            return model.to(self.device)

        def no_sync(self) -> AbstractContextManager[None]:
            return nullcontext()

        run_schedule = ShardedDataParallelEngine.run_schedule

    return Whole


@pytest.fixture
def npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that ask for an NPU get one in plain Python."""
    (tmp_path / "torch_npu.py").write_text("from tests.support import fake_npu\n\nfake_npu.install()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(install_cann(tmp_path / "cann")))


SUBJECTS = [Subject(m, "fsdp2", "npu", defect=whole) for m in ("language_model", "value_model")]
CHECKS = [check_training, check_inference, check_export, check_resume, check_residency]


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_an_engine_runs_on_another_device(subject: Subject, check: Callable[[Subject], None]) -> None:
    check(subject)


class OnMegatron(Subject):
    """The engine under the key npu; the key itself needs a process that has not imported Megatron (test_mindspeed.py)."""

    @property
    def engine_class(self) -> type[BaseEngine]:
        return EngineRegistry.get_engine_cls(self.model_type, self.backend, "cuda")


@pytest.fixture
def mindspeed(npu: None, tmp_path: Path) -> None:
    """Ranks whose NPU is what Megatron takes for CUDA."""
    with (tmp_path / "torch_npu.py").open("a") as file:
        file.write("from tests.support import fake_mindspeed\n\nfake_mindspeed.adapt_megatron()\n")


@pytest.mark.usefixtures("mindspeed")
@pytest.mark.parametrize("check", [check_training, check_inference, check_export, check_resume])
@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
def test_the_megatron_engine_runs_on_another_device(
    model_type: str, check: Callable[[Subject], None]
) -> None:
    """But for parking its parts, which empties storages that the device lacks."""
    check(OnMegatron(model_type, "megatron", "npu"))


@pytest.mark.usefixtures("npu")
def test_a_device_in_use_can_no_longer_be_made_deterministic() -> None:
    with pytest.raises(RankFailed, match=r"used npu before HCCL_DETERMINISTIC, .* could be set") as caught:
        run_ranks(1, compute_deterministically, "npu", device="npu")
    assert caught.value.errors[0][0] == "DeterminismError"


def generated(folder: Path, device: str) -> list[Response]:
    rollout = TransformersRollout(folder, RolloutConfig(batch_size=3), local_device(device))
    requests = [Request(list(range(3, 5 + n)), stream_key("t", n)) for n in range(5)]
    return rollout.generate(requests, SamplingParams(temperature=0.8, max_new_tokens=12, top_k=20))


@pytest.mark.usefixtures("npu")
def test_rollouts_run_on_another_device(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", initializer_range=0.1)
    (there,) = run_ranks(1, generated, folder, "npu", device="npu")
    assert there == generated(folder, "cpu")


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize(("device", "told"), [("cuda", "CUDA|asks for cuda"), ("cpu", "mixes npu with cpu")])
def test_a_hard_coded_device_is_found(device: str, told: str) -> None:
    def planted(engine: type[BaseEngine]) -> type[BaseEngine]:
        class Planted(whole(engine)):
            def forward_micro_batch(
                self, model: nn.Module, micro_batch: MicroBatch, entropy: bool
            ) -> ModelOutputs:
                outputs = super().forward_micro_batch(model, micro_batch, entropy)
                outputs.log_probs = outputs.log_probs + torch.zeros(outputs.log_probs.shape, device=device)
                return outputs

        return Planted

    with pytest.raises(RankFailed, match=told):
        check_inference(Subject("language_model", "fsdp2", "npu", defect=planted))
