"""Command line and files -> typed runs. Hydra composes once per distinct choice of groups; plain overrides are laid over that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from engines.config import ConfigError, parse
from workflow.campaign.files import load_named
from workflow.campaign.overrides import ROLES, Overrides, split_words
from workflow.campaign.paths import ABSENT, lookup, replaced
from workflow.campaign.schema import CampaignConfig, CampaignOptions, RunConfig


def load_campaign(name: str, configs: Path) -> CampaignConfig:
    """The campaign file ``configs/campaign/<name>.yaml``, or the file at the path ``name`` when it ends in .yaml.

    Raises:
        ConfigError: there is no such file, or it is not a campaign.
    """
    campaign = load_named("campaign", name, configs, CampaignConfig)
    return campaign if campaign.base is None else _based(campaign, load_campaign(campaign.base, configs))


def _based(campaign: CampaignConfig, base: CampaignConfig) -> CampaignConfig:
    """A campaign laid over the one that it starts from."""

    def laid(over: dict[str, list[str]], under: dict[str, list[str]]) -> dict[str, list[str]]:
        return {name: [*under.get(name, []), *over.get(name, [])] for name in {**under, **over}}

    return campaign.model_copy(
        update={
            "common": [*base.common, *campaign.common],
            "runs": laid(campaign.runs, base.runs),
            "controls": laid(campaign.controls, base.controls),
            "segments": campaign.segments if "segments" in campaign.model_fields_set else base.segments,
        }
    )


@dataclass(frozen=True)
class RunOverrides:
    """The overrides of one run, in the order in which they apply."""

    common: tuple[str, ...]
    """The campaign's."""
    own: tuple[str, ...]
    """What sets the run apart."""
    command_line: tuple[str, ...]
    """The command line's, which win."""

    def all(self) -> list[str]:
        """All of them, in order."""
        return [*self.common, *self.own, *self.command_line]


def run_overrides(campaign: CampaignConfig, options: CampaignOptions) -> dict[str, RunOverrides]:
    """What makes each run of a campaign."""
    if options.controls and not campaign.controls:
        raise ConfigError(f"controls=true: campaign {campaign.name!r} has no controls")
    runs = {**campaign.runs, **(campaign.controls if options.controls else {})}
    last = [] if options.seed is None else [f"seed={options.seed}"]
    last += [] if options.site is None else [f"site={options.site}"]
    last += split_words(options.set)
    return {name: RunOverrides(tuple(campaign.common), tuple(own), tuple(last)) for name, own in runs.items()}


def compose_run(overrides: Overrides, configs: Path) -> RunConfig:
    """The typed run that ``overrides`` make of ``configs/run.yaml``; every role's engine is set.

    Raises:
        ConfigError: a key that does not exist or a value out of range, with the nearest spelling.
    """
    values = _compose(overrides.groups, configs)
    laid: dict[str, dict[str, Any]] = {role: {} for role in ROLES}
    for role, choice in overrides.role_engines:
        laid[role] = _compose((("engine", choice),), configs)["engine"]
    for key, value in overrides.values:
        role, _, rest = key.partition(".engine.")
        try:
            if role in ROLES and rest:
                laid[role] = replaced(laid[role], rest, value)
            else:
                values = replaced(values, key, value)
        except KeyError as error:
            raise ConfigError(f"{key}: {error.args[0]} has no keys below it") from None
    for role in ROLES:
        if lookup(values, f"{role}.engine") is ABSENT and isinstance(values.get(role, {}), dict):
            values = replaced(values, f"{role}.engine", _merge(values["engine"], laid[role]))
    return parse(RunConfig, values)


@cache
def _compose(groups: tuple[tuple[str, str], ...], configs: Path) -> dict[str, Any]:
    with initialize_config_dir(config_dir=str(configs.resolve()), version_base=None):
        composed = compose("run", overrides=[f"{group}={choice}" for group, choice in groups])
    return OmegaConf.to_container(composed, resolve=True)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            value = _merge(result[key], value)
        result[key] = value
    return result
