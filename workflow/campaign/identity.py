"""What a result is: digests over a stage's slice, version and inputs, with paths replaced by what they hold. No torch."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engines.checkpoint.verify import sha256
from engines.config import ConfigError, nearest
from workflow.campaign.hub import is_hub
from workflow.campaign.objectives import NONE, TABLES, find
from workflow.campaign.paths import ABSENT, lookup, replaced, without
from workflow.campaign.schema import RunConfig, default_of
from workflow.campaign.stages import Stage
from workflow.manifest import canonical_json

LEARNING_ENGINE_KEYS = ("seed", "moe_aux_loss_coefficient")
"""The keys of an engine that belong to what is learnt; all others only say how it is computed."""
ADDED_ENGINE_KEYS = {"moe_aux_loss_coefficient": 0}
"""Those that came after results had been published: with this value they are left out."""
ADDED = (
    *(
        f"algorithm.{key}"
        for key in ("advantage", "policy_loss", "dual_clip", "sapo", "covariance", "pass_k")
    ),
    *(f"algorithm.{key}" for key in ("correction", "filter", "options")),
    "reward.overlong",
    *(f"{role}.relay" for role in ("actor", "critic", "reference")),
)
"""Keys that came after results had been published: at their default, results and so identities are those from before."""
EXECUTION_PATHS = ("rollout.batch_size", "rollout.compact_every", "evaluate.batch_size")
"""Further settings of the computation: they can change a bit, not what is learnt."""


@dataclass(frozen=True)
class Identity:
    """Both digests of one stage, or of a training state (``step``)."""

    numeric: str
    """Everything that can change a bit of the result."""
    learning: str
    """The same without backend, device, layout, dtype, threads: equal for runs that learn the same."""
    step: int | None = None

    def at(self, step: int | None) -> Identity:
        """The state of this stage after ``step``."""
        return Identity(self.numeric, self.learning, step)


@dataclass(frozen=True)
class Content:
    """A slice as its identities see it: canonical JSON, so that stages which share a slice share the work."""

    numeric: str
    learning: str

    @staticmethod
    def of(stage: Stage, values: Mapping[str, Any]) -> Content:
        """Of a slice in plain nested values, without ``stage.settings``; engines resolved."""
        content = by_content(values)
        return Content(canonical_json(content), canonical_json(without_execution(content, stage)))


def identify(stage: Stage, content: Content, inputs: Mapping[str, Identity], threads: int) -> Identity:
    """The identity of ``stage`` over its slice.

    Args:
        inputs: what it starts from.
        threads: CPU threads per rank; counts only for stages that run engines.
    """
    rest = {"stage": stage.name, "version": stage.version}
    numeric = {"inputs": {name: [source.numeric, source.step] for name, source in inputs.items()}, **rest}
    learning = {"inputs": {name: [source.learning, source.step] for name, source in inputs.items()}, **rest}
    if stage.roles:
        numeric["threads"] = threads
    return Identity(_digest_with(content.numeric, numeric), _digest_with(content.learning, learning))


def _digest_with(config: str, rest: dict[str, Any]) -> str:
    """Digest of the canonical JSON of ``rest`` and "config", which sorts before all of its keys."""
    return hashlib.sha256(f'{{"config":{config},{canonical_json(rest)[1:]}'.encode()).hexdigest()


def by_content(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a slice in which whatever names something on this machine is replaced by a digest of its content.

    Raises:
        ConfigError: what a key names is not there.
    """
    result = dict(values)
    for path, digest in contents(values).items():
        result = replaced(result, path, digest)
    return without(result, [path for path in ADDED if lookup(result, path) == default_of(RunConfig, path)])


def contents(values: Mapping[str, Any]) -> dict[str, str]:
    """For each config path of a slice that names something on this machine: a digest of what is there now.

    Raises:
        ConfigError: what a key names is not there.
    """
    found = {path: lookup(values, path) for path in _CONTENT_PATHS}
    return {
        path: _CONTENT_PATHS[path](path, value)
        for path, value in found.items()
        if value not in (ABSENT, None)
    }


def digest_path(path: Path) -> str:
    """SHA-256 of a file, or of the names and digests of all files below a folder (hidden ones left out)."""
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        return _digest({file.relative_to(path).as_posix(): _file_digest(file) for file in files})
    return _file_digest(path)


def _file_digest(path: Path) -> str:
    status = path.stat()
    return _cached_digest(path, status.st_size, status.st_mtime_ns)


@cache
def _cached_digest(path: Path, size: int, mtime: int) -> str:
    # Size and time are in the key, so that a file which changes between two plans of one process is read again.
    return sha256(path)


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def _model_content(key: str, value: str) -> str:
    return value if is_hub(value) else _path_content(key, value)  # a commit says what is in it


def _path_content(key: str, value: str) -> str:
    path = Path(value)
    if not path.exists():
        raise ConfigError(f"{key}={value!r}: no such file or folder")
    return f"sha256:{digest_path(path)}"


def _package_content(key: str, value: str) -> str:
    """The digests that the package's installer recorded for its data files: an installed model is not read to know it."""
    names = importlib.metadata.packages_distributions().get(value)
    if not names:
        raise ConfigError(
            f"{key}={value!r}: no such package is installed; run: pip install --no-deps {value.replace('_', '-')}"
        )
    distribution = importlib.metadata.distribution(names[0])
    records = sorted(
        f"{file}={file.hash.value}"
        for file in distribution.files or []
        if file.hash is not None and file.suffix not in (".py", ".pyc") and ".dist-info" not in str(file)
    )
    return f"{names[0]}=={distribution.version} sha256:{_digest(records)}"


def _function_content(key: str, value: str) -> str:
    module, _, function = value.partition(":")
    try:
        spec = importlib.util.find_spec(module) if module and function else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(f"{key}={value!r}: expected module:function of an importable module")
    _check_function(key, value, function, Path(spec.origin))
    return f"{value} sha256:{_file_digest(Path(spec.origin))}"


def _objective_content(key: str, value: str) -> str:
    """A row of Baton's own is known by its name, a third party's by its source too."""
    if value == NONE:
        return value
    row = find(key.removeprefix("algorithm."), value)
    if row.reads is not None:
        return value
    usage = value.removeprefix(row.name)  # a KL estimator's +
    return _function_content(key, row.function) + usage


def _check_function(key: str, value: str, function: str, file: Path) -> None:
    """Look for a name in a module's source; the module itself is not imported, that may take a framework."""
    if file.suffix != ".py":
        return  # compiled
    try:
        names = _module_names(file, file.stat().st_mtime_ns)
    except SyntaxError as error:
        raise ConfigError(f"{key}={value!r}: {file} is no Python ({error})") from None
    if names.isdisjoint((function, "*", "__getattr__")):
        raise ConfigError(f"{key}={value!r}: {file} has no {function!r}; {nearest(function, sorted(names))}")


@cache
def _module_names(file: Path, mtime: int) -> frozenset[str]:
    """What a module's own statements define, assign or import; "*" when it imports names that are not written out."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(file.read_bytes())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # what is inside is not the module's
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        if not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            nodes += ast.iter_child_nodes(node)
    return frozenset(names)


_CONTENT_PATHS = {
    "model.path": _model_content,
    "model.package": _package_content,
    "data.train_file": _path_content,
    "data.heldout_file": _path_content,
    "reward.function": _function_content,
    "data.wrong_answer": _function_content,
    **{f"algorithm.{key}": _objective_content for key in TABLES},
}


def without_execution(values: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """A copy of a slice without what only says how it is computed: what the learning identity sees."""
    result = without(values, [path.replace(".engine", ".relay") for path in stage.roles if "." in path])
    for path in stage.roles:
        engine = lookup(result, path)
        if engine is not ABSENT:
            learnt = {key: engine[key] for key in LEARNING_ENGINE_KEYS if key in engine}
            old = {key for key, value in ADDED_ENGINE_KEYS.items() if learnt.get(key) == value}
            result = replaced(result, path, {key: learnt[key] for key in learnt if key not in old})
    for path in EXECUTION_PATHS:
        if lookup(result, path) is not ABSENT:
            result = replaced(result, path, None)
    return result
