"""What ``engine.deterministic`` sets, when, and what it refuses. That results on an accelerator are the same bits then, no test here shows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.ascend import AscendError
from engines.config import EngineConfig, LayoutConfig
from engines.training.determinism import compute_deterministically, set_variables
from engines.training.errors import DeterminismError
from engines.workers.group import build_groups
from engines.workers.host import RankHost
from engines.workers.spec import RoleSpec
from tests.engines.test_mindspeed import install_cann
from tests.support.models import save_tiny_model
from tests.support.ranks import run_ranks
from tests.workers import scenario

NEEDED = {
    "cpu": {},
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"},
    "npu": {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1", "CLOSE_MATMUL_K_SHIFT": "1"},
}
TRANSFORMER_ENGINE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
NAMES = [name for needed in NEEDED.values() for name in needed]


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None of the variables is set, and this process is afterwards what it was."""
    for name in (*NAMES, TRANSFORMER_ENGINE):
        monkeypatch.setenv(name, "")  # so that its absence is restored
        monkeypatch.delenv(name)
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic, cudnn.benchmark = before


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@pytest.mark.parametrize("device", NEEDED)
def test_a_process_is_given_what_its_device_needs_and_nothing_else(device: str) -> None:
    torch.backends.cudnn.benchmark = True
    for _ in range(2):
        compute_deterministically(device)
        assert environment() == NEEDED[device]
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("device", "name", "value"),
    [
        ("cuda", "CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("cuda", "CUBLAS_WORKSPACE_CONFIG", ":16:8"),
        ("cuda", "NCCL_ALGO", "Tree"),
        ("cuda", "NCCL_ALGO", "^NVLS"),
        ("npu", "HCCL_DETERMINISTIC", "false"),
        ("npu", "CLOSE_MATMUL_K_SHIFT", "0"),
    ],
)
def test_an_environment_that_says_otherwise_is_refused_and_left_alone(
    device: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(DeterminismError) as caught:
        compute_deterministically(device)
    assert f"{name}={value}, and device {device} needs {name}={NEEDED[device][name]}:" in str(caught.value)
    assert environment() == {name: value}
    assert not torch.are_deterministic_algorithms_enabled()


def test_another_spelling_of_the_same_is_no_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_DETERMINISTIC", "True")
    monkeypatch.setenv("NCCL_ALGO", "RING")
    compute_deterministically("npu")
    compute_deterministically("cuda")
    assert environment() == NEEDED["cuda"] | NEEDED["npu"] | {
        "HCCL_DETERMINISTIC": "True",
        "NCCL_ALGO": "RING",
    }


def test_other_devices_variables_contradict_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    compute_deterministically("cpu")
    compute_deterministically("npu")


def test_a_rank_is_deterministic_before_its_devices_libraries_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with it the other roles of the same process."""
    variables = "{name: os.environ[name] for name in sorted(names) if name in os.environ}"
    (tmp_path / "torch_npu.py").write_text(f"import os\nnames = {NAMES}\nraise OSError({variables})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(install_cann(tmp_path / "cann")))
    engine = EngineConfig(backend="fsdp2", device="npu", forward_only=True)
    roles = [
        RoleSpec(name, "language_model", engine.model_copy(update={"deterministic": asks}), tmp_path)
        for name, asks in (("actor", False), ("reference", True))
    ]
    for specs, found in ((roles[:1], {}), (roles, NEEDED["npu"])):
        with pytest.raises(AscendError) as caught:
            RankHost(specs).initialize()
        assert f"torch_npu does not load: OSError: {dict(sorted(found.items()))}" in str(caught.value)


def iterated(model: Path, backend: str, asking: tuple[str, ...]) -> tuple[bool, str | None, list[Any]]:
    """Of two iterations of actor, critic and rollout in one process, in which the roles ``asking`` are deterministic."""
    roles = [
        dataclasses.replace(
            spec, engine=spec.engine.model_copy(update={"deterministic": spec.name in asking})
        )
        for spec in scenario.specs(model, backend=backend)
    ]
    with build_groups(roles)["actor"] as group:
        scenario.add_rollout(group, model)
        history = scenario.iterate(group)
    numbers = [
        {
            "tokens": step["batch"].tokens,
            "outputs": step["outputs"],
            "metrics": {role: dict(step[role], tokens_per_second=None) for role in ("actor", "critic")},
        }
        for step in history
    ]
    return torch.are_deterministic_algorithms_enabled(), os.environ.get(TRANSFORMER_ENGINE), numbers


@pytest.mark.parametrize(("backend", "variable"), [("fsdp2", None), ("megatron", "0")])
def test_on_a_cpu_the_bits_are_those_without_it(backend: str, variable: str | None, tmp_path: Path) -> None:
    """Every operation of an iteration has a deterministic kernel there, and none reads memory that nobody wrote (torch fills it)."""
    model = save_tiny_model(tmp_path / "model")
    ((enabled, found, numbers),) = run_ranks(1, iterated, model, backend, ("critic",))
    ((without, _, expected),) = run_ranks(1, iterated, model, backend, ())
    assert (enabled, found) == (True, variable)
    assert not without
    torch.testing.assert_close(numbers, expected, rtol=0, atol=0)


def test_megatron_indexes_its_embedding_then(tmp_path: Path) -> None:
    from engines.training.megatron.model import read_config, transformer_config

    model = read_config(save_tiny_model(tmp_path / "model"))
    for asked in (False, True):
        config = transformer_config(model, LayoutConfig(), EngineConfig(deterministic=asked))
        assert config.deterministic_mode is asked


def test_what_a_backend_needs_is_refused_like_what_a_device_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSFORMER_ENGINE, "1")
    with pytest.raises(DeterminismError, match=f"{TRANSFORMER_ENGINE}=1, and backend megatron needs"):
        set_variables({TRANSFORMER_ENGINE: "0"}, "backend megatron")


def gradients_of_rows_read_often(model: Path, threads: int) -> tuple[bool, int]:
    """After an engine was built: whether torch's switch is on, and how many different gradients the same indexing has."""
    torch.set_num_threads(threads)
    host = RankHost(scenario.specs(model)[:1])
    host.initialize()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 64, (20_000,), generator=generator)
    weight = torch.randn(20_000, 64, generator=generator)
    found = set()
    for _ in range(20):
        table = torch.zeros(64, 64, requires_grad=True)
        (table[rows] * weight).sum().backward()
        found.add(table.grad.numpy().tobytes())
    return torch.are_deterministic_algorithms_enabled(), len(found)


@pytest.mark.parametrize(("threads", "switched"), [(1, False), (2, True)])
def test_a_cpu_is_deterministic_with_several_threads_too(
    threads: int, switched: bool, tmp_path: Path
) -> None:
    """As in a mixture, whose experts read a token several times: two threads added its gradients as they came."""
    model = save_tiny_model(tmp_path / "model")
    assert run_ranks(1, gradients_of_rows_read_often, model, threads) == [(switched, 1)]
