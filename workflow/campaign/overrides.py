"""Overrides, ``key=value``: which of them choose from a group, which set a plain key, and what a later one undoes. No torch."""

from __future__ import annotations

import json
import shlex
import typing
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engines.config import Config, ConfigError, nearest
from workflow.campaign.schema import RunConfig

GROUPS = ("model", "engine", "algorithm", "rollout", "data", "reward", "site")
ROLES = ("actor", "critic", "reference")


@dataclass(frozen=True)
class Overrides:
    """What a list of overrides comes to."""

    groups: tuple[tuple[str, str], ...]
    """Choices of the run: (group, choice)."""
    role_engines: tuple[tuple[str, str], ...]
    """Choices of single roles: (role, engine choice)."""
    values: tuple[tuple[str, Any], ...]
    """Plain keys, dotted, in the order given."""


def split_words(text: str) -> list[str]:
    """The overrides in one string, separated by blanks; quotes keep blanks."""
    try:
        return shlex.split(text)
    except ValueError as error:
        hint = "Snakemake takes a quote off the end of set=...: put another key=value behind it, or all into a campaign's file"
        raise ConfigError(f"set={text!r}: {error}; {hint}") from None


def read_overrides(words: Iterable[str], configs: Path) -> Overrides:
    """Sort overrides, later ones beating earlier ones; ``engine=X`` sets all roles, so it undoes an earlier ``actor.engine=Y``.

    Raises:
        ConfigError: no ``key=value``, or a choice that its group does not have.
    """
    groups: dict[str, str] = {}
    roles: dict[str, str] = {}
    values: list[tuple[str, Any]] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or "" in key.split("."):
            raise ConfigError(f"{word!r}: an override is key=value, for instance algorithm.lr=1e-5")
        role, _, rest = key.partition(".")
        if key in GROUPS:
            _check_choice(configs, key, key, value)
            groups[key] = value
            if key == "engine":
                roles.clear()
        elif role in ROLES and rest == "engine":
            _check_choice(configs, key, "engine", value)
            roles[role] = value
        else:
            values.append((key, _value(word)))
    return Overrides(tuple(sorted(groups.items())), tuple(sorted(roles.items())), tuple(values))


@cache
def choices(configs: Path, group: str) -> tuple[str, ...]:
    """What a group offers."""
    return tuple(sorted(path.stem for path in (configs / group).glob("*.yaml")))


def override_keys(words: Iterable[str]) -> list[str]:
    """The keys that ``words`` set, choices of whole groups left out."""
    keys = [word.partition("=")[0] for word in words]
    return [key for key in keys if key not in GROUPS]


def _check_choice(configs: Path, key: str, group: str, value: str) -> None:
    known = choices(configs, group)
    if value not in known:
        raise ConfigError(
            f"{key}={value!r}: configs/{group} has no such file; {nearest(value, list(known))}"
            f"; a single setting of it is {key}.<name>=value"
        )


@cache
def _value(word: str) -> Any:
    """The typed value of ``key=value``: text as it stands where the schema wants text, anything else read as YAML."""
    key, _, text = word.partition("=")
    if _wants_text(key) and text != "null":
        return text
    with suppress(ValueError):
        return json.loads(text)  # most values, and many times faster than YAML
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{key}={text!r}: not a value in YAML ({type(error).__name__})") from None


def _wants_text(key: str) -> bool:
    owner: Any = RunConfig
    *parents, last = key.split(".")
    for name in parents:
        field = owner.model_fields.get(name)
        candidates = [field.annotation, *typing.get_args(field.annotation)] if field else []
        owner = next((c for c in candidates if isinstance(c, type) and issubclass(c, Config)), None)
        if owner is None:
            return False
    field = owner.model_fields.get(last)
    return field is not None and field.annotation in (str, str | None)
