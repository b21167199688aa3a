"""What every typed configuration has in common: unknown keys are refused with the nearest spelling, values are frozen."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key's path, the value and what would be right."""


class Config(BaseModel):
    """Base of all typed configurations. The docstring under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


ConfigType = TypeVar("ConfigType", bound=Config)


def parse(config_type: type[ConfigType], values: dict[str, Any], path: str = "") -> ConfigType:
    """Validate ``values`` as ``config_type``; ``path`` is the prefix under which its keys are reported.

    Raises:
        ConfigError: with one line per wrong key: its path, the value, and what would be right.
    """
    try:
        return config_type.model_validate(values)
    except ValidationError as error:
        lines = [_explain(config_type, problem, path) for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def nearest(word: str, known: list[str]) -> str:
    """A hint that names the nearest known spelling, or all that is known when nothing is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def _explain(config_type: type[Config], problem: dict[str, Any], path: str) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join([*([path] if path else []), *location])
    if problem["type"] == "extra_forbidden":
        owner = _owner(config_type, location[:-1])
        hint = nearest(location[-1], list(owner.model_fields)) if owner else ""
        return f"{key}: unknown key; {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    if isinstance(problem["input"], dict | Config) and problem["type"] == "value_error":
        # Of a whole section: its text names the key that is wrong, or its path, so the section is not shown.
        *section, name = message.partition("=")[0].split(".")
        owner = _owner(config_type, [*location, *section])
        named = owner is not None and name in owner.model_fields
        return f"{key}{('.' if named else ': ') if key else ''}{message}"
    if problem["type"] == "missing":
        return f"{key}: missing; {message}"
    return f"{key}={problem['input']!r}: {message}" if key else message


def _owner(config_type: type[Config], location: list[str]) -> type[Config] | None:
    """The configuration class that the keys in ``location`` lead to, if it can be told."""
    owner: type[Config] | None = config_type
    names = iter(location)
    for name in names:
        if owner is None or name not in owner.model_fields:
            return None
        annotation = owner.model_fields[name].annotation
        if get_origin(annotation) is dict:
            next(names, None)  # the key of an entry
        owner = _config_class(annotation)
    return owner


def _config_class(annotation: Any) -> type[Config] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Config)), None)
