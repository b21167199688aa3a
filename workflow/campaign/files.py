"""Files of ``configs/`` that are read as they are, without composition: campaigns and sites. Loads no framework."""

from __future__ import annotations

from pathlib import Path

import yaml

from engines.config import ConfigError, nearest, parse
from engines.config.base import ConfigType


def names_of(kind: str, configs: Path) -> list[str]:
    """What has a file in ``configs/<kind>/``, in order of name."""
    return sorted(file.stem for file in (configs / kind).glob("*.yaml"))


def load_named(kind: str, name: str, configs: Path, config_type: type[ConfigType]) -> ConfigType:
    """``configs/<kind>/<name>.yaml``, or the file at the path ``name`` when it ends in .yaml, as ``config_type``.

    Raises:
        ConfigError: no such file, not YAML, or a wrong key or value.
    """
    path = Path(name) if name.endswith(".yaml") else configs / kind / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"{kind}={name!r}: {path} is not there; {nearest(name, names_of(kind, configs))}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML ({error})") from None
    if not isinstance(values, dict):
        known = ", ".join(config_type.model_fields)
        raise ConfigError(f"{path}: expected keys and values; known keys: {known}")
    return parse(config_type, values, path=kind)
