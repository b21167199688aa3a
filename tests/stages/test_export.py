"""export: from the shards of any layout to a folder that AutoModelForCausalLM opens with the same logits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.checkpoint import ShardIndex, StateDamaged, StateKeyMismatch, StateStore
from engines.checkpoint.shards import Shard, write_shards
from engines.config import EngineConfig, LayoutConfig, OptimizerConfig
from engines.hf_checkpoint import on_disk_parameters
from engines.training.batch import PackedBatch
from engines.training.hf_export import parse_size, write_weights
from engines.training.worker import TrainingWorker
from engines.workers.spec import RoleSpec
from tests.support.ranks import run_ranks
from tests.support.tiny_model import ARCHITECTURE, DATA, TINY
from workflow.rl.losses import SftLoss
from workflow.stages.convert import convert
from workflow.stages.export import export, model_of_state
from workflow.stages.model_check import ModelMismatch, load_model, probe_ids, probe_logits


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that training started from."""
    folder = tmp_path_factory.mktemp("base") / "model"
    convert(TINY, folder, seed=0, data=DATA)
    return folder


def trained(base: Path) -> dict[str, torch.Tensor]:
    """Weights as an engine would have them after training."""
    model = load_model(base)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return {f"model.{name}": tensor.detach() for name, tensor in on_disk_parameters(model).items()}


def train_and_save(
    base: Path, folder: Path, backend: str, ranks: int
) -> tuple[Path, list[torch.Tensor], list[float]]:
    """Train a real engine for two steps on ``ranks`` ranks and publish its state.

    Returns the state, some sequences, and the engine's own log-probs of their tokens.
    """
    draw = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, 40, (length,), generator=draw) for length in (9, 5, 12, 7)]
    store = StateStore(folder)
    path = store.begin(2)
    results = run_ranks(ranks, _engine_rank, base, path / "actor", backend, sequences)
    return store.commit(2, {}, {"actor": [index for index, _ in results]}), sequences, results[0][1]


def _engine_rank(
    base: Path, folder: Path, backend: str, sequences: list[torch.Tensor]
) -> tuple[ShardIndex, list[float]]:
    layout = LayoutConfig(data_parallel_size=dist.get_world_size())
    engine = EngineConfig(backend=backend, device="cpu", layout=layout)
    worker = TrainingWorker(
        RoleSpec("actor", "language_model", engine, base, OptimizerConfig(lr=1e-2), total_steps=2)
    )
    worker.initialize()
    masks = [torch.cat([torch.zeros(1), torch.ones(len(sequence) - 1)]) for sequence in sequences]
    everything = PackedBatch.from_sequences({"input_ids": sequences, "loss_mask": masks}, {})
    share = everything.select(list(range(dist.get_rank(), len(sequences), dist.get_world_size())))
    worker.update([share, share], SftLoss())
    return worker.save(folder), worker.infer(everything)["log_probs"].tolist()


def save_state(folder: Path, tensors: dict[str, torch.Tensor], ranks: int, role: str = "actor") -> Path:
    """A published training state, its tensors divided over ``ranks`` along their first axis."""
    store = StateStore(folder)
    path = store.begin(3)
    everything = tensors | {"optimizer." + name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    indexes = []
    for rank in range(ranks):
        blocks = {}
        for name, tensor in everything.items():
            rows = -(-len(tensor) // ranks)
            offsets = (min(rank * rows, len(tensor)), *[0] * (tensor.dim() - 1))
            blocks[name] = Shard(tensor[rank * rows : (rank + 1) * rows], offsets, tuple(tensor.shape))
        indexes.append(write_shards(path / role, rank, blocks, {"scheduler_step": 3}))
    return store.commit(3, {}, {role: indexes})


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_opens_with_the_states_logits(base: Path, tmp_path: Path, ranks: int) -> None:
    tensors = trained(base)
    state = save_state(tmp_path / "train", tensors, ranks)
    record = export(state, base, tmp_path / "export", "5GB")
    assert record["max_logit_difference"] <= 1e-5
    assert record["weight_files"] == 1
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert set(written) == {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    assert all(torch.equal(tensor, tensors[f"model.{name}"]) for name, tensor in written.items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert not torch.allclose(probe_logits(model), probe_logits(load_model(base)), atol=0.1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template == (base / "chat_template.jinja").read_text()
    assert model.generate(probe_ids(model.config.vocab_size), max_new_tokens=3).shape[1] > 32


@pytest.mark.parametrize(("backend", "ranks"), [("fsdp2", 1), ("fsdp2", 2), ("fsdp", 2)])
def test_logits_are_the_engines(base: Path, tmp_path: Path, backend: str, ranks: int) -> None:
    state, sequences, expected = train_and_save(base, tmp_path / "train", backend, ranks)
    export(state, base, tmp_path / "export", "5GB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    got, before = [], []
    for one, into in ((model, got), (load_model(base), before)):
        for ids in sequences:
            log_probs = one(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            into += [0.0, *log_probs.gather(-1, ids[1:, None]).squeeze(-1).tolist()]
    assert got == pytest.approx(expected, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(got, before, strict=True)) > 0.1


def test_index_above_the_shard_size(base: Path, tmp_path: Path) -> None:
    state = save_state(tmp_path / "train", trained(base), 2)
    whole = export(state, base, tmp_path / "one", "5GB")
    record = export(state, base, tmp_path / "many", "20KB")
    assert whole["weight_files"] == 1 < record["weight_files"]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        path.name for path in (tmp_path / "many").glob("*.safetensors")
    }
    one, many = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "many"))
    assert torch.equal(probe_logits(one), probe_logits(many))


def test_untied_model_keeps_its_head(tmp_path: Path) -> None:
    untied = TINY.model_copy(update={"architecture": ARCHITECTURE | {"tie_word_embeddings": False}})
    convert(untied, tmp_path / "model", seed=0, data=DATA)
    tensors = trained(tmp_path / "model")
    assert "model.lm_head.weight" in tensors
    export(save_state(tmp_path / "train", tensors, 2), tmp_path / "model", tmp_path / "export", "5GB")
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], tensors["model.lm_head.weight"])


def test_wrong_states_are_refused(base: Path, tmp_path: Path) -> None:
    tensors = trained(base)
    name = "model.model.norm.weight"
    for folder, change, message in (
        (
            "missing",
            {k: v for k, v in tensors.items() if k != name},
            "1 weights of the model are missing.*norm",
        ),
        (
            "shape",
            tensors | {name: torch.ones(31)},
            r"norm.weight has shape \(31,\), Qwen3ForCausalLM has \(32,\)",
        ),
        ("surplus", tensors | {"model.extra": torch.ones(2)}, "extra has shape.*no such tensor"),
    ):
        with pytest.raises(ModelMismatch, match=message):
            model_of_state(save_state(tmp_path / folder, change, 1), base)
    with pytest.raises(StateKeyMismatch, match="no role 'actor'"):
        export(save_state(tmp_path / "critic", tensors, 1, role="critic"), base, tmp_path / "export", "5GB")


def test_damaged_state_is_refused(base: Path, tmp_path: Path) -> None:
    state = save_state(tmp_path / "train", trained(base), 1)
    shutil.copytree(state, tmp_path / "copy")
    (tmp_path / "copy" / "actor" / "rank00000.safetensors").write_bytes(b"short")
    with pytest.raises(StateDamaged, match="rank00000"):
        export(tmp_path / "copy", base, tmp_path / "export", "5GB")


def test_writer_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="twice"):
        write_weights(tmp_path, [("a", torch.ones(1)), ("a", torch.ones(1))])
    with pytest.raises(ValueError, match="no tensor"):
        write_weights(tmp_path, [])
    with pytest.raises(ValueError, match="max_shard_size='5 TB'"):
        parse_size("5 TB")
