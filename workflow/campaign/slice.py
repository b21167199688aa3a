"""The part of a run's configuration that one stage declared it reads; reading anything else raises."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter

from engines.config import ConfigError
from workflow.campaign.schema import RunConfig
from workflow.campaign.stages import STAGES, Stage


class UndeclaredConfigRead(ConfigError, AttributeError):
    """A stage read a config path that its entry in the table of stages does not declare."""


class Slice:
    """Attribute access to declared sections, each as its typed configuration: ``config.algorithm.lr``.

    A section of which only some keys are declared is a Slice itself (``config.rollout.max_new_tokens``).

    Args:
        stage: a stage of the table; its ``reads`` and ``settings`` are what may be read.
        values: the declared part of a run as plain nested values, as in a plan.
    """

    def __init__(self, stage: str, values: dict[str, Any], path: str = "") -> None:
        self._stage = stage
        self._values = values
        self._path = path
        self._typed: dict[str, Any] = {}

    def to_json(self) -> dict[str, Any]:
        """Plain nested values, from which an equal slice can be made."""
        return self._values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slice) and vars(self) | {"_typed": 0} == vars(other) | {"_typed": 0}

    def __hash__(self) -> int:
        return hash((self._stage, self._path))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while unpickling, before there is anything to look into
            raise AttributeError(name)
        path = f"{self._path}.{name}" if self._path else name
        declared = declared_paths(STAGES[self._stage])
        if name not in self._values:
            reason = "this run does not use" if path in declared else "it does not declare"
            raise UndeclaredConfigRead(
                f"stage {self._stage} read {path!r}, which {reason}; it reads: {', '.join(declared)}"
            )
        if path not in declared:
            return Slice(self._stage, self._values[name], path)
        if name not in self._typed:
            self._typed[name] = _adapter(path).validate_python(self._values[name])
        return self._typed[name]


def declared_paths(stage: Stage) -> tuple[str, ...]:
    """Every config path that a stage may read."""
    return (*stage.reads, *stage.settings)


@cache
def _adapter(path: str) -> TypeAdapter:
    """What validates the value at a dotted path of a run."""
    config: Any = RunConfig
    *parents, last = path.split(".")
    for name in parents:
        config = config.model_fields[name].annotation
    field = config.model_fields[last]
    return TypeAdapter(field.annotation)
