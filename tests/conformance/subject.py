"""What is checked: an engine of the registry in one layout, and the tools to run it on real ranks and to compare it."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.checkpoint import StateStore
from engines.config import EngineConfig, LayoutConfig, OptimizerConfig
from engines.registry import EngineRegistry
from engines.training.base import BaseEngine
from engines.training.batch import PackedBatch
from tests.conformance.data import Sequence
from tests.conformance.losses import PolicyLoss, ValueLoss
from tests.conformance.reference import Reference
from tests.support.models import save_tiny_model
from tests.support.ranks import run_ranks

FSDP_LAYOUTS = {
    "world 1": LayoutConfig(),
    "world 2": LayoutConfig(data_parallel_size=2),
    "world 4": LayoutConfig(data_parallel_size=4),
    "HSDP 2x2": LayoutConfig(data_parallel_size=4, shard_size=2),
    "CP 2": LayoutConfig(context_parallel_size=2),
    "CP 4": LayoutConfig(context_parallel_size=4),
    "DP 2 x CP 2": LayoutConfig(data_parallel_size=2, context_parallel_size=2),
}


def _megatron(name: str) -> LayoutConfig:
    """The layout that a name spells: TP2xPP2, sequence parallel with a plus; DO is the distributed optimizer."""
    letters = {"TP": "tensor", "PP": "pipeline", "VPP": "virtual_pipeline", "CP": "context", "DP": "data"}
    letters |= {"EP": "expert", "ETP": "expert_tensor"}
    words = name.split("+")
    sizes = {f"{letters[word[:-1]]}_parallel_size": int(word[-1]) for word in words[0].split("x")}
    return LayoutConfig(**sizes, sequence_parallel="SP" in words, distributed_optimizer="DO" in words)


MEGATRON_LAYOUTS = {"world 1": LayoutConfig()} | {
    name: _megatron(name)
    for name in (
        "TP2",
        "TP2+SP",
        "PP2",
        "PP2xVPP2",
        "CP2",
        "DP2+DO",
        "EP2xDP2",
        "TP2xETP2+SP",
        "TP2xPP2",
        "TP2xCP2+SP",
        "PP2xVPP2xDP2",
        "TP2xPP2xDP2+SP+DO",
        "TP2xEP2xDP2+SP",
        "PP2xEP2xDP2+DO",
    )
}
LAYOUTS = FSDP_LAYOUTS | MEGATRON_LAYOUTS

# eps well above the rounding of gradients (1e-8 here): near it AdamW turns the noise of tiny elements into steps, on some CPUs into larger ones.
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-5, "weight_decay": 0.01, "clip_grad_norm": 0.5}


class Mismatch(AssertionError):
    """The engine is not what the contract or the reference says."""


@dataclass(frozen=True)
class Subject:
    """One triple in one layout; ``defect`` makes a broken engine class of a good one, to test the suite itself."""

    model_type: str
    backend: str
    device: str = "cpu"
    layout: str = "world 1"
    defect: Callable[[type[BaseEngine]], type[BaseEngine]] | None = None

    def __str__(self) -> str:
        return f"{self.model_type}-{self.backend}-{self.device}-{self.layout}"

    @property
    def loss(self) -> Any:
        """A loss that reads all that this type of model gives."""
        return ValueLoss() if self.model_type == "value_model" else PolicyLoss()

    @property
    def engine_class(self) -> type[BaseEngine]:
        """The class under test."""
        found = EngineRegistry.get_engine_cls(self.model_type, self.backend, self.device)
        return self.defect(found) if self.defect else found

    def model(self, family: str = "qwen3", **overrides: Any) -> Path:
        """A folder with a tiny model of this subject's type; the same folder for the same arguments."""
        layout = LAYOUTS[self.layout]
        stages = layout.pipeline_parallel_size * layout.virtual_pipeline_parallel_size
        if stages > 2:
            overrides = {"num_hidden_layers": stages, **overrides}
        return _model_folder(family, self.model_type == "value_model", tuple(sorted(overrides.items())))

    def engine(
        self,
        model: Path,
        optimizer: dict[str, Any] | None = None,
        total_steps: int = 100,
        temperature: float = 1.0,
        **config: Any,
    ) -> BaseEngine:
        """An initialised engine; called on a rank."""
        settings = EngineConfig(
            backend=self.backend,
            device=self.device,
            layout=LAYOUTS[self.layout],
            **{"token_budget": 40, **config},
        )
        forward_only = settings.forward_only
        engine = self.engine_class(
            settings,
            model,
            optimizer=None if forward_only else OptimizerConfig(**(optimizer or ADAMW)),
            total_steps=total_steps,
            temperature=temperature,
        )
        engine.initialize()
        return engine

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """``function(self, *args)`` on every rank of the layout, in fresh processes; the results by rank."""
        self.engine_class  # noqa: B018 - its module is imported once, here, and not on every rank
        return run_ranks(
            LAYOUTS[self.layout].world_size, function, self, *args, timeout=timeout, device=self.device
        )

    def reference(self, model: Path, temperature: float = 1.0) -> Reference:
        """The plain model to compare with."""
        return Reference(model, self.model_type, temperature)

    def but(self, **changes: Any) -> Subject:
        """Another subject that differs in ``changes``."""
        return replace(self, **changes)


_FOLDERS = tempfile.TemporaryDirectory()


@functools.cache
def _model_folder(family: str, value_head: bool, overrides: tuple[tuple[str, Any], ...]) -> Path:
    folder = Path(tempfile.mkdtemp(dir=_FOLDERS.name))
    return save_tiny_model(folder, family, value_head=value_head, **dict(overrides))


# ---- on a rank -------------------------------------------------------------------------------------------------------


def share(engine: BaseEngine, sequences: list[Sequence]) -> PackedBatch:
    """This rank's part of a mini-batch: every n-th sequence."""
    return pack(sequences[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()], sequences[0])


def pack(sequences: list[Sequence], like: Sequence | None = None) -> PackedBatch:
    """One batch of ``sequences``; when there are none, an empty one with the fields of ``like``."""
    if not sequences:
        return PackedBatch({name: t[:0] for name, t in like.items()}, {}, torch.zeros(1, dtype=torch.int64))
    return PackedBatch.from_sequences({name: [s[name] for s in sequences] for name in sequences[0]})


def exported(engine: BaseEngine) -> list[tuple[str, Tensor]]:
    """All weights by their names on disk, in the order in which the engine gives them."""
    with engine.eval_mode():
        return [(name, tensor.detach().clone().cpu()) for name, tensor in engine.get_per_tensor_param()]


def first_gradient(engine: BaseEngine, batch: PackedBatch, loss: Any, **how: Any) -> dict[str, Tensor]:
    """The gradient of a mini-batch by names on disk, read through the contract alone. Uses the engine up.

    After one unclipped AdamW step the first moment is (1 - beta1) times the gradient; put in the weights' place it
    leaves the engine as weights do.
    """
    with engine.train_mode():
        engine.train_batch(batch, loss, **how)
        state = engine.sharded_state()
        for name, tensor in state.items():
            if name.startswith("model."):
                moment = state[f"optimizer.{name.removeprefix('model.')}.exp_avg"]
                local(tensor).copy_(local(moment))
        engine.load_sharded_state(state)
    scale = 1 / (1 - engine.optimizer_config.betas[0])
    return {name: tensor * scale for name, tensor in exported(engine)}


def save(engine: BaseEngine, folder: Path, step: int) -> None:
    """Publish a state of the engine; collective."""
    store = StateStore(folder)
    temporary = [store.begin(step) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(temporary)
    index = engine.save_checkpoint(temporary[0] / "actor")
    indexes = [None] * dist.get_world_size()
    dist.all_gather_object(indexes, index)
    if dist.get_rank() == 0:
        store.commit(step, {}, {"actor": indexes})
    dist.barrier()


def load(engine: BaseEngine, folder: Path) -> None:
    """Restore the newest state in ``folder``; collective."""
    engine.load_checkpoint(StateStore(folder).newest() / "actor")


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor of ``sharded_state``, to read and write."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return getattr(tensor, "local", tensor)


# ---- in the parent ---------------------------------------------------------------------------------------------------


def merged(metrics: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """The ranks' (sum, count) metrics of one step as numbers."""
    names = {name for rank in metrics for name in rank}
    totals = {name: [rank[name] for rank in metrics if name in rank] for name in names}
    return {
        name: sum(s for s, _ in pairs) / max(1e-9, sum(c for _, c in pairs)) for name, pairs in totals.items()
    }


def require(condition: bool, what: str) -> None:
    """Fail with ``what`` unless ``condition``."""
    if not condition:
        raise Mismatch(what)


def require_close(what: str, found: float, expected: float, relative: float) -> None:
    """Fail unless two numbers agree to ``relative``."""
    error = abs(found - expected) / max(abs(expected), 1e-12)
    require(
        error <= relative, f"{what}: {found!r}, the reference has {expected!r} (relative error {error:.2e})"
    )


def require_same_names(what: str, found: list[str], expected: Any) -> None:
    """Fail unless ``found`` has every expected name once and no other."""
    twice = sorted({name for name in found if found.count(name) > 1})
    require(not twice, f"{what}: given more than once: {twice}")
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    require(not missing and not unexpected, f"{what}: missing {missing}, unexpected {unexpected}")


def require_close_tensors(
    what: str, found: dict[str, Tensor], expected: dict[str, Tensor], relative: float, absolute: bool = False
) -> None:
    """Fail unless every tensor agrees: by its norm, against the global norm where its own is tiny; or by element."""
    require_same_names(what, list(found), expected)
    whole = torch.stack([t.double().norm() for t in expected.values()]).norm()
    for name, right in expected.items():
        require(
            found[name].shape == right.shape, f"{what} {name}: shape {found[name].shape}, not {right.shape}"
        )
        difference = found[name].double() - right.double()
        if absolute:
            error = difference.abs().max().item()
        else:
            own = right.double().norm()
            error = (difference.norm() / (own if own > 1e-3 * whole else whole)).item()
        require(error <= relative, f"{what} {name}: error {error:.2e}, allowed {relative:.0e}")


def require_equal_tensors(what: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fail unless every tensor is the same, bit for bit."""
    require_same_names(what, list(found), expected)
    different = [
        n for n in expected if found[n].dtype != expected[n].dtype or not torch.equal(found[n], expected[n])
    ]
    require(not different, f"{what}: not bit for bit equal: {different}")
