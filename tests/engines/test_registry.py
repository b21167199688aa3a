"""The registry: look-up, refusals, states and errors; nothing here needs torch until an engine is imported."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap

import pytest

from engines import catalog
from engines.catalog import CATALOGUE, Entry
from engines.registry import (
    DuplicateEngineError,
    EngineImportError,
    EngineNotBuiltError,
    EngineRegistry,
    NotAnEngineError,
    UnknownEngineError,
)


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> dict:
    """An empty registry for the time of a test."""
    monkeypatch.setattr(EngineRegistry, "_classes", {})
    return EngineRegistry._classes


def declare(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> None:
    monkeypatch.setattr("engines.registry.declared_entries", lambda: [*CATALOGUE, *entries])


def entry(module: str, backend: str, requires: tuple[str, ...] = ()) -> Entry:
    return Entry(module, ("language_model",), (backend,), ("cpu",), requires, "", True)


def test_every_backend_is_declared_whether_built_or_not() -> None:
    triples = {(t.model_type, t.backend, t.device): t for t in EngineRegistry.triples()}
    backends = {backend for _, backend, _ in triples}
    assert backends == {"fsdp", "fsdp2", "megatron", "torchtitan", "veomni", "automodel"}
    built = {key for key, t in triples.items() if t.state == "built"}
    types, backends = ("language_model", "value_model"), ("fsdp", "fsdp2", "megatron")
    assert {key for key in built if key[2] == "cpu"} == {(m, b, "cpu") for m in types for b in backends}
    mindspeed = triples["language_model", "megatron", "npu"]
    assert "mindspeed" in mindspeed.module
    assert mindspeed.environment == "ascend"
    assert mindspeed.state == "built" or "CANN" in mindspeed.reason or "device of key npu" in mindspeed.reason


def test_a_built_engine_without_its_device_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "device_present", lambda device: device == "cpu")
    triple = next(t for t in EngineRegistry.triples() if (t.backend, t.device) == ("fsdp2", "npu"))
    assert triple.state == "needs"
    assert "torch_npu" in triple.reason
    assert "CANN" in triple.reason
    assert "npu" in triple.reason


def test_listing_and_failing_to_look_up_load_no_framework() -> None:
    script = """
        import sys
        from engines.registry import EngineRegistry, EngineRegistryError
        EngineRegistry.triples()
        try:
            EngineRegistry.get_engine_cls("language_model", "fsdp3")
        except EngineRegistryError:
            pass
        print(sorted({"torch", "transformers", "ray"} & set(sys.modules)))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        (("language_model", "fsdp22", "cpu"), "'fsdp2'"),
        (("languag_model", "fsdp2", "cpu"), "'language_model'"),
        (("language_model", "fsdp2", "cdua"), "'cuda'"),
        (("value_model", "torchtitan", "auto"), "backend='torchtitan'"),
    ],
)
def test_unknown_keys_name_the_nearest_spelling_and_all_triples(key: tuple[str, ...], hint: str) -> None:
    with pytest.raises(UnknownEngineError) as raised:
        EngineRegistry.get_engine_cls(*key)
    assert hint in str(raised.value)
    assert "language_model/megatron/npu" in str(raised.value)


def test_a_declared_engine_without_code_is_not_unknown() -> None:
    with pytest.raises(EngineNotBuiltError, match="not built yet"):
        EngineRegistry.get_engine_cls("language_model", "torchtitan", "cpu")


def test_lookup_returns_the_class_and_auto_takes_a_device_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engines.registry.device_present", lambda device: device == "cpu")
    engine = EngineRegistry.get_engine_cls("value_model", "fsdp2")
    assert engine is EngineRegistry.get_engine_cls("value_model", "fsdp2", "cpu")
    assert engine.model_type == "value_model"


def test_a_broken_dependency_is_reported_as_itself(
    classes: dict, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    (tmp_path / "broken_engine_module.py").write_text("import a_distribution_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    declare(monkeypatch, entry("broken_engine_module", "broken", ("a-distribution-nobody-has",)))
    with pytest.raises(EngineImportError) as raised:
        EngineRegistry.get_engine_cls("language_model", "broken", "cpu")
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)
    assert "a-distribution-nobody-has" in str(raised.value)
    assert "env/cpu.txt" in str(raised.value)


def test_registering_expands_sequences_and_refuses_others_under_the_same_key(classes: dict) -> None:
    from engines.training.base import BaseEngine

    register = EngineRegistry.register
    first = register(model_type=["language_model", "value_model"], backend="mine", device=("cpu", "cuda"))(
        type("First", (BaseEngine,), {})
    )
    assert len(classes) == 4
    assert EngineRegistry.get_engine_cls("value_model", "mine", "cuda") is first
    with pytest.raises(DuplicateEngineError, match="First"):
        register(model_type="value_model", backend="mine", device="cpu")(type("Second", (BaseEngine,), {}))
    with pytest.raises(NotAnEngineError):
        register(model_type="value_model", backend="other", device="cpu")(object)
    with pytest.raises(NotAnEngineError):
        register(model_type="value_model", backend="other", device="cpu")(lambda: None)
    assert ("value_model", "other", "cpu") not in classes


def test_errors_survive_python_o() -> None:
    script = """
        from engines.registry import EngineNotBuiltError, EngineRegistry, UnknownEngineError
        for backend, expected in (("fsdp3", UnknownEngineError), ("torchtitan", EngineNotBuiltError)):
            try:
                EngineRegistry.get_engine_cls("language_model", backend, "cpu")
            except expected:
                print(backend)
    """
    command = [sys.executable, "-O", "-c", textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["fsdp3", "torchtitan"]


def test_third_parties_add_engines_by_entry_point(
    classes: dict, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    (tmp_path / "their_engine.py").write_text(
        textwrap.dedent("""
            from engines.registry import EngineRegistry
            from engines.training.base import BaseEngine

            @EngineRegistry.register(model_type="language_model", backend="theirs", device="cpu")
            class TheirEngine(BaseEngine):
                pass
        """)
    )
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[baton.engines]\nlanguage_model.theirs.cpu = their_engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert any(t.backend == "theirs" and t.state == "built" for t in EngineRegistry.triples())
    assert EngineRegistry.get_engine_cls("language_model", "theirs", "cpu").__name__ == "TheirEngine"


def test_an_incomplete_engine_cannot_be_made_and_finals_cannot_be_overridden() -> None:
    from engines.training.base import BaseEngine

    with pytest.raises(TypeError, match="abstract"):
        type("Incomplete", (BaseEngine,), {})(None, None)
    with pytest.raises(TypeError, match="train_batch"):
        type("Stubborn", (BaseEngine,), {"train_batch": lambda self: None})
    with pytest.raises(TypeError, match="is_param_offload_enabled"):
        type("Stubborn", (BaseEngine,), {"is_param_offload_enabled": property(lambda self: True)})
