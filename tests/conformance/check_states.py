"""The suite's checks: what leaves an engine and comes back. Weights out, states saved, restored and resharded."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.checkpoint import StateStore, read_state
from tests.conformance.check_numbers import LOSS, PARAMETERS, batches
from tests.conformance.data import Sequence
from tests.conformance.subject import (
    ADAMW,
    Subject,
    exported,
    load,
    local,
    merged,
    require,
    require_close,
    require_close_tensors,
    require_equal_tensors,
    require_same_names,
    save,
    share,
)

SCHEDULED = {**ADAMW, "scheduler": {"name": "cosine", "warmup_steps": 3}}
TOTAL_STEPS = 8


def check_export(subject: Subject, family: str = "qwen3", dtype: str = "float32") -> None:
    """Untrained weights leave the engine as they stand in the source's files: names once each, bits, same order everywhere.

    Whatever it computes with: a training that starts from rounded weights starts from another model.
    """
    model = subject.model(family)
    source = {name: t for file in model.glob("*.safetensors") for name, t in load_file(file).items()}
    ranks = subject.run(_export, model, dtype)
    for weights in ranks:
        names = [name for name, _ in weights]
        require_same_names("export", names, source)
        require(names == [name for name, _ in ranks[0]], "ranks export in different orders")
        require_equal_tensors("export", dict(weights), source)


def _export(subject: Subject, model: Path, dtype: str) -> list[tuple[str, Tensor]]:
    return exported(subject.engine(model, dtype=dtype))


def check_resume(subject: Subject, target: Subject | None = None, **model: Any) -> None:
    """Save, load in a fresh process whose every field was perturbed, go on: as if nothing had been in between.

    In the same layout bit for bit; in another (``target``) to rounding.
    """
    same, target = target is None, target or subject
    model, steps = subject.model(**model), batches(5)
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first", Path(folder) / "second"
        went_on = subject.run(_train_save_train, model, steps, first)
        resumed = target.run(_perturb_load_train, model, steps, first, second)
        (scalars, saved), (scalars_again, saved_again) = full_state(first), full_state(second)
    require(scalars == scalars_again, f"scalars {scalars} were restored as {scalars_again}")
    require_equal_tensors("restored state", saved_again, saved)
    for step in range(3):
        before = merged([metrics[step] for metrics, _ in went_on])
        after = merged([metrics[step] for metrics, _ in resumed])
        for name in ("loss", "grad_norm", "lr"):
            if same:
                require(
                    after[name] == before[name], f"{name} of step {step}: {after[name]}, not {before[name]}"
                )
            else:
                require_close(f"{name} of step {step}", after[name], before[name], 20 * LOSS)
    for _, parameters in resumed:
        if same:
            require_equal_tensors("parameter", parameters, went_on[0][1])
        else:
            require_close_tensors("parameter", parameters, went_on[0][1], PARAMETERS, absolute=True)


def _train_save_train(
    subject: Subject, model: Path, steps: list[list[Sequence]], folder: Path
) -> tuple[list[dict], dict[str, Tensor]]:
    engine = subject.engine(model, SCHEDULED, TOTAL_STEPS)
    _train(subject, engine, steps[:2])
    save(engine, folder, 2)
    return _train(subject, engine, steps[2:]), dict(exported(engine))


def _perturb_load_train(
    subject: Subject, model: Path, steps: list[list[Sequence]], folder: Path, second: Path
) -> tuple[list[dict], dict[str, Tensor]]:
    engine = subject.engine(model, SCHEDULED, TOTAL_STEPS)
    _train(subject, engine, steps[4:])
    state = engine.sharded_state()
    with torch.no_grad():
        for tensor in state.values():
            local(tensor).add_(1)
    engine.load_sharded_state(state)
    engine.load_scalar_state({name: value + 3 for name, value in engine.scalar_state().items()})
    load(engine, folder)
    save(engine, second, 2)
    return _train(subject, engine, steps[2:]), dict(exported(engine))


def _train(subject: Subject, engine: Any, steps: list[list[Sequence]]) -> list[dict]:
    with engine.train_mode():
        return [engine.train_batch(share(engine, step), subject.loss) for step in steps]


def check_save_is_neutral(subject: Subject) -> None:
    """Training that saves is, bit for bit, training that does not."""
    model, steps = subject.model(), batches(4)
    with tempfile.TemporaryDirectory() as folder:
        with_saves = subject.run(_train_with_saves, model, steps, Path(folder))
    without = subject.run(_train_with_saves, model, steps, None)
    for saved, plain in zip(with_saves, without, strict=True):
        require_equal_tensors("parameter", saved, plain)


def _train_with_saves(
    subject: Subject, model: Path, steps: list[list[Sequence]], folder: Path | None
) -> dict[str, Tensor]:
    engine = subject.engine(model)
    for number, step in enumerate(steps):
        _train(subject, engine, [step])
        if folder is not None:
            save(engine, folder, number)
    return dict(exported(engine))


def full_state(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Scalars and whole tensors of the newest state, put together from its files alone."""
    path = StateStore(folder).newest()
    role = read_state(path)["roles"]["actor"]
    files = {file.relative_to(path).as_posix(): load_file(file) for file in path.rglob("*.safetensors")}
    tensors = {}
    for name, record in role["tensors"].items():
        whole = torch.full(record["shape"], math.nan, dtype=getattr(torch, record["dtype"]))
        for shard in record["shards"]:
            place = tuple(slice(o, o + n) for o, n in zip(shard["offsets"], shard["shape"], strict=True))
            whole[place] = files[shard["file"]][shard["key"]]
        tensors[name] = whole
    return role["scalars"], tensors
