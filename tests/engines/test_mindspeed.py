"""MindSpeed's key without an NPU: what is imported in which order, with stand-ins that write it down, and what is said when a
part is missing. The numbers of an NPU are not shown by any of this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from engines.ascend import AscendError, cann_problem, load_torch_npu
from engines.catalog import CATALOGUE, MINDSPEED, what_is_missing
from engines.config import EngineConfig
from workflow.campaign.code import environment_digest

ROOT = Path(__file__).parents[2]
(ENTRY,) = (entry for entry in CATALOGUE if "mindspeed" in entry.module)
VERSIONS = {
    "torch": "2.7.1+cpu",
    "torch_npu": "2.7.1.post4",
    "mindspeed": "0.16.0",
    "megatron_core": "0.16.1",
    "transformers": "5.18.0",
    "safetensors": "0.8.0",
}
TORCH_NPU = """
    import sys
    import torch
    megatron_was_there = any(name.startswith("megatron") for name in sys.modules)
"""
ADAPTOR = """
    import sys
    import types
    seen = {
        "arguments": sys.argv[1:],
        "torch_npu": "torch_npu" in sys.modules,
        "megatron": sorted(name for name in sys.modules if name.startswith("megatron")),
    }
    class FusedAdam:
        pass
    apex, optimizers = types.ModuleType("apex"), types.ModuleType("apex.optimizers")
    optimizers.FusedAdam, optimizers.FusedSGD = FusedAdam, FusedAdam
    apex.optimizers = optimizers
    sys.modules |= {"apex": apex, "apex.optimizers": optimizers}
"""
LOOK_UP = """
    import json, sys
    from engines.registry import EngineRegistry, EngineRegistryError
    try:
        print(EngineRegistry.get_engine_cls("value_model", "megatron", "npu").__name__)
    except EngineRegistryError as error:
        print(error)
"""


def distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def stand_ins(folder: Path, **changed: str | None) -> dict[str, str]:
    """An environment with distributions of the versions that belong together, but for those ``changed``; None leaves one out."""
    modules = folder / "modules"
    for name, version in (VERSIONS | changed).items():
        if version is not None:
            distribution(modules, name, version)
    (modules / "mindspeed").mkdir()
    (modules / "mindspeed" / "__init__.py").touch()
    (modules / "mindspeed" / "megatron_adaptor.py").write_text(textwrap.dedent(ADAPTOR))
    (modules / "torch_npu.py").write_text(textwrap.dedent(TORCH_NPU))
    cann = install_cann(folder / "cann")
    return {
        **os.environ,
        "PYTHONPATH": f"{modules}:{ROOT}",
        "LD_LIBRARY_PATH": str(cann / "lib64"),
        "ASCEND_HOME_PATH": str(cann),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def install_cann(folder: Path, version: str = "9.0.0") -> Path:
    (folder / "lib64").mkdir(parents=True)
    (folder / "lib64" / "libhccl.so").touch()
    (folder / "aarch64-linux").mkdir()
    record = folder / "aarch64-linux" / "ascend_toolkit_install.info"
    record.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\nos=linux\n")
    return folder


def said(script: str, environment: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script), *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_mindspeed_comes_before_megatron_and_reads_its_own_settings(tmp_path: Path) -> None:
    script = f"""{LOOK_UP}
    import mindspeed.megatron_adaptor, megatron.core.optimizer, torch, torch_npu
    from megatron.core.optimizer import distrib_optimizer
    print(json.dumps({{
        **mindspeed.megatron_adaptor.seen,
        "before torch_npu": torch_npu.megatron_was_there,
        "torch's": megatron.core.optimizer.USING_PYTORCH_OPTIMIZER and not distrib_optimizer.HAVE_APEX_OR_TE,
        "words": sys.argv[1:],
        "keys": sorted(EngineRegistry._classes),
    }}))
    """
    name, seen = said(script, stand_ins(tmp_path), "--num-layers", "7").splitlines()
    assert name == "MindSpeedValueModel"
    assert json.loads(seen) == {
        "arguments": ["--optimization-level", "0"],
        "torch_npu": True,
        "megatron": [],
        "before torch_npu": False,
        "torch's": True,
        "words": ["--num-layers", "7"],
        "keys": [
            [m, "megatron", d] for m in ("language_model", "value_model") for d in ("cpu", "cuda", "npu")
        ],
    }


def test_megatron_that_came_first_is_refused(tmp_path: Path) -> None:
    early = "    import sys, types\n    sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
    told = said(early + LOOK_UP, stand_ins(tmp_path))
    assert "this process imported megatron.core before mindspeed.megatron_adaptor" in told


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"torch_npu": "2.6.0"}, "torch_npu==2.7.1.* (here is 2.6.0)"),
        ({"mindspeed": "0.0.1"}, "mindspeed==0.16.* (here is 0.0.1)"),
        ({"megatron_core": "0.19.2"}, "megatron-core==0.16.* (here is 0.19.2)"),
        ({"torch": "2.7.10"}, "torch==2.7.1.* (here is 2.7.10)"),
    ],
)
def test_another_version_is_named_with_the_one_that_is_needed(
    tmp_path: Path, changed: dict[str, str], told: str
) -> None:
    text = said(LOOK_UP, stand_ins(tmp_path, **changed))
    assert told in text
    assert "install env/ascend.txt" in text
    for other in {"torch_npu", "mindspeed", "megatron-core"} - {told.partition("==")[0]}:
        assert f"{other}==" not in text


def test_an_absent_distribution_is_named_with_the_version_that_is_needed(tmp_path: Path) -> None:
    environment = stand_ins(tmp_path, mindspeed=None, torch_npu=None)
    text = said(LOOK_UP, environment)
    assert "torch_npu==2.7.1.*, mindspeed==0.16.*;" in text
    assert "install env/ascend.txt" in text


def test_cann_is_needed_in_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(AscendError, match=r"CANN 9\.x, of which no libhccl\.so .* set_env\.sh"):
        load_torch_npu()
    assert "libhccl.so" in what_is_missing(ENTRY, "npu")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(install_cann(tmp_path / "old", "8.2.RC1")))
    assert "CANN 9.x, and 8.2.RC1 is installed" in cann_problem()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(install_cann(tmp_path / "new")))
    assert cann_problem() == ""
    with pytest.raises(AscendError, match=r"needs torch_npu; install env/ascend\.txt"):
        load_torch_npu()


def test_an_extension_that_does_not_load_is_reported_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(install_cann(tmp_path)))
    broken = tmp_path / "torch_npu.py"
    broken.write_text("raise OSError('libascendcl.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AscendError, match=r"OSError: libascendcl\.so.*env/ascend\.txt"):
        load_torch_npu()


def test_without_hccl_the_process_group_says_what_is_wrong(tmp_path: Path) -> None:
    script = """
        import types, torch
        from engines.ascend import AscendError
        from engines.training.process_group import init_process_group
        torch.npu = types.SimpleNamespace(device_count=lambda: 1, set_device=lambda device: None)
        torch.utils.rename_privateuse1_backend("npu")
        try:
            init_process_group("npu")
        except AscendError as error:
            print(error)
    """
    text = said(script, stand_ins(tmp_path))
    assert "did not bring the hccl backend" in text


def test_the_lock_has_the_versions_that_the_engine_asks_for() -> None:
    pinned = {}
    for line in (ROOT / "env" / "ascend.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.replace(" @ ", "==").partition("==")
            pinned[name.replace("-", "_")] = version
    assert pinned.pop("mindspeed").startswith("git+https://gitcode.com/Ascend/MindSpeed.git@")
    wanted = {name.replace("-", "_"): version for name, version in ENTRY.versions.items()}
    assert {name for name in wanted if name != "mindspeed"} < pinned.keys()
    for name, version in pinned.items():
        assert f"{version}.".startswith(f"{wanted.get(name, '')}"), name


def test_the_environment_of_npus_is_part_of_a_results_identity(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    digests = set()
    for name in ("ascend.txt", "cpu-light.txt"):
        digests.add(environment_digest(tmp_path, "npu"))
        (tmp_path / "env" / name).write_text("numpy==1\n")
    assert len({*digests, environment_digest(tmp_path, "npu")}) == 3


def test_mixtures_are_refused_on_npus() -> None:
    assert "model_type='qwen3_moe' is not served" in MINDSPEED.refuse_model({"model_type": "qwen3_moe"})
    assert MINDSPEED.refuse_model({"model_type": "qwen3"}) == ""
    config = EngineConfig(layout={"expert_parallel_size": 2, "data_parallel_size": 2})
    assert "layout.expert_parallel_size=2: it divides work by" in MINDSPEED.refuse_settings(config)
