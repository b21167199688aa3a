"""(model_type, backend, device) -> engine class. Looking one up imports only the module that registers it."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from engines.catalog import Entry, declared_entries, device_present, environment_of, what_is_missing
from engines.config import nearest
from engines.limits import Limits

Key = tuple[str, str, str]
EngineClass = TypeVar("EngineClass", bound=type)
State = Literal["built", "needs", "not built yet"]

DEVICE_ORDER = ("cuda", "npu", "cpu")
"""What ``device="auto"`` prefers."""


class EngineRegistryError(Exception):
    """Base of the registry's errors."""


class UnknownEngineError(EngineRegistryError, LookupError):
    """No engine is declared under that key."""


class EngineNotBuiltError(EngineRegistryError, NotImplementedError):
    """The key is declared, its engine does not exist yet."""


class EngineImportError(EngineRegistryError, ImportError):
    """The engine's module cannot be imported; the original error is the cause."""


class DuplicateEngineError(EngineRegistryError, ValueError):
    """Two classes under one key."""


class NotAnEngineError(EngineRegistryError, TypeError):
    """What was registered is no BaseEngine class."""


@dataclass(frozen=True)
class Triple:
    """One declared key and its state on this machine."""

    model_type: str
    backend: str
    device: str
    state: State
    reason: str
    """What it needs; empty when built, or not built yet."""
    module: str
    environment: str
    limits: Limits | None
    """What the engine computes, where the catalogue says it."""


class EngineRegistry:
    """All engines of this process."""

    _classes: dict[Key, type] = {}

    @classmethod
    def register(
        cls, *, model_type: str | Sequence[str], backend: str | Sequence[str], device: str | Sequence[str]
    ) -> Callable[[EngineClass], EngineClass]:
        """Class decorator: serve every combination of the given names.

        Raises:
            NotAnEngineError: the class is no BaseEngine.
            DuplicateEngineError: another class serves one of the keys.
        """
        keys = list(itertools.product(_names(model_type), _names(backend), _names(device)))

        def decorate(engine: EngineClass) -> EngineClass:
            base = importlib.import_module("engines.training.base").BaseEngine
            if not (isinstance(engine, type) and issubclass(engine, base)):
                raise NotAnEngineError(
                    f"{engine!r} is registered as an engine and is no subclass of BaseEngine"
                )
            for key in keys:
                other = cls._classes.get(key, engine)
                if _identity(other) != _identity(engine):
                    raise DuplicateEngineError(
                        f"{_show(key)} is {_identity(other)}; {_identity(engine)} cannot be it too"
                    )
            cls._classes.update(dict.fromkeys(keys, engine))
            return engine

        return decorate

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str, device: str = "auto") -> type:
        """The engine class under that key; ``device="auto"`` takes the best device of this machine that it runs on.

        Raises:
            UnknownEngineError: with the known triples and the nearest spelling.
            EngineNotBuiltError: declared, but there is no code yet.
            EngineImportError: a dependency is missing or broken; chained to the original error.
        """
        entries = _declared()
        if device == "auto":
            device = cls._best_device(model_type, backend, entries)
        key = (model_type, backend, device)
        entry = entries.get(key)
        if key not in cls._classes:
            if entry is None:
                raise UnknownEngineError(_unknown(key, [*entries, *cls._classes]))
            if not entry.built:
                raise EngineNotBuiltError(
                    f"{_show(key)} is declared and not built yet (module {entry.module})"
                )
            _import(entry, key)
        if key not in cls._classes:
            raise EngineImportError(f"{entry.module} was imported and did not register {_show(key)}")
        return cls._classes[key]

    @classmethod
    def new(cls, model_type: str, backend: str, device: str = "auto", **configs: Any) -> Any:
        """An engine of that key; ``configs`` are the constructor's arguments."""
        return cls.get_engine_cls(model_type, backend, device)(**configs)

    @classmethod
    def triples(cls) -> list[Triple]:
        """All declared keys with their state here, ordered by backend, model type and device. Imports no engine."""
        triples = []
        for (model_type, backend, device), entry in _declared().items():
            missing = what_is_missing(entry, device) if entry.built else ""
            state: State = "not built yet" if not entry.built else "needs" if missing else "built"
            environment = environment_of(entry, device)
            triples.append(
                Triple(model_type, backend, device, state, missing, entry.module, environment, entry.limits)
            )
        return sorted(triples, key=lambda t: (t.backend, t.model_type, t.device))

    @classmethod
    def _best_device(cls, model_type: str, backend: str, entries: dict[Key, Entry]) -> str:
        known = [key for key in [*entries, *cls._classes] if key[:2] == (model_type, backend)]
        devices = [d for d in DEVICE_ORDER if (model_type, backend, d) in known and device_present(d)]
        built = [d for d in devices if d not in entries or entries[(model_type, backend, d)].built]
        if not known:
            raise UnknownEngineError(_unknown((model_type, backend, "auto"), [*entries, *cls._classes]))
        if not devices:
            offered = ", ".join(sorted({key[2] for key in known}))
            raise UnknownEngineError(
                f"{model_type}/{backend} runs on {offered}; this machine has none of them"
            )
        return (built or devices)[0]


def _declared() -> dict[Key, Entry]:
    entries: dict[Key, Entry] = {}
    for entry in declared_entries():
        for key in entry.served():
            if key in entries:
                raise DuplicateEngineError(
                    f"{_show(key)} is declared by {entries[key].module} and by {entry.module}"
                )
            entries[key] = entry
    return entries


def _import(entry: Entry, key: Key) -> None:
    try:
        importlib.import_module(entry.module)
    except Exception as error:  # a broken dependency can raise anything
        missing = what_is_missing(entry, key[2])
        needs = f"it needs {missing}; " if missing else ""
        raise EngineImportError(
            f"{_show(key)}: importing {entry.module} failed: {type(error).__name__}: {error}; "
            f"{needs}install env/{entry.on_top or environment_of(entry, key[2])}.txt"
        ) from error


def _unknown(key: Key, known: Sequence[Key]) -> str:
    """The message names the first part of the key that is wrong, and all triples."""
    hints = []
    for position, name in enumerate(("model_type", "backend", "device")):
        names = sorted({other[position] for other in known if other[:position] == key[:position]})
        if key[position] not in names:
            hints.append(f"{name}={key[position]!r} is unknown; {nearest(key[position], names)}")
            break
    triples = ", ".join(sorted({_show(other) for other in known}))
    return f"no engine {_show(key)}: {'; '.join(hints)} (known triples: {triples})"


def _names(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _identity(engine: type) -> str:
    return f"{engine.__module__}.{engine.__qualname__}"


def _show(key: Key) -> str:
    return "/".join(key)
