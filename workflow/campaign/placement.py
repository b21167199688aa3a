"""Which engine on which device: what ``auto`` comes to, and why. Loads no framework."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from engines.config import ConfigError, EngineConfig, nearest
from engines.registry import DEVICE_ORDER, EngineRegistry, Triple
from engines.workers.spec import process_groups, total_ranks
from workflow.campaign.forecast import ModelFacts
from workflow.campaign.site import UNKNOWN, SiteConfig
from workflow.manifest import Device

BACKEND_ORDER = ("fsdp2", "fsdp", "megatron", "torchtitan", "veomni", "automodel")
"""For models that fit: the plainest engine first."""
TRAINING_BYTES = 16
"""Per parameter in training: float32 weight, gradient and two AdamW moments."""
INFERENCE_BYTES = 4
"""Per parameter without an optimizer."""


def place(
    engine: EngineConfig, model_type: str, model: ModelFacts, site: SiteConfig, key: str
) -> tuple[EngineConfig, Device]:
    """Resolve ``auto`` in an engine and check that the result exists, computes what is asked and fits the site.

    Args:
        model_type: language_model or value_model.
        model: what the engine has to compute, and how large it is.
        key: config path of the engine, for messages.

    Raises:
        ConfigError: no engine of that key, not built, a dependency is missing, a model or a setting that it does not serve, or too
            few devices.
    """
    backend, device, why = _choose(engine, model_type, model, site, key)
    offered = site.devices[device]
    _check_fit(engine.layout.world_size, device, site, f"{key}.layout")
    computed = _computed(site, device)
    return engine.model_copy(update={"backend": backend, "device": computed}), Device(
        asked=device if offered.stand_in else engine.device, computed=computed, why=why
    )


def check_roles(engines: Mapping[str, EngineConfig], device: Device, site: SiteConfig) -> None:
    """Check that all process groups of a job fit the site together.

    Args:
        engines: config path -> resolved engine.
        device: of the job.

    Raises:
        ConfigError: they have more ranks than the site has devices, or a number that does not fill its nodes.
    """
    groups = process_groups(engines)
    if len(groups) > 1:
        told = " and ".join(" with ".join(roles) for roles in groups)
        key = f"{told} differ in backend, device or layout, so they share no devices"
        _check_fit(total_ranks(engines), site.key_of(device), site, key)


def _check_fit(ranks: int, device: str, site: SiteConfig, key: str) -> None:
    offered = site.devices[device]
    if site.scheduler == "none" and ranks > offered.devices_per_node:
        raise ConfigError(
            f"{key}: {ranks} ranks, but site {site.name!r} has {offered.devices_per_node} {device} devices "
            f"(site.devices.{device}.devices_per_node)"
        )
    try:
        offered.spread(ranks, f"site.devices.{device}")
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _computed(site: SiteConfig, device: str) -> str:
    """What jobs of a device key compute on."""
    return "cpu" if site.devices[device].stand_in else device


def _choose(
    engine: EngineConfig, model_type: str, model: ModelFacts, site: SiteConfig, key: str
) -> tuple[str, str, str]:
    triples = [triple for triple in _triples() if triple.model_type == model_type]
    _check_names(engine, triples, site, key)
    devices = DEVICE_ORDER if engine.device == "auto" else (engine.device,)
    backends = BACKEND_ORDER if engine.backend == "auto" else (engine.backend,)
    refused: list[str] = []
    for device in devices:
        if device not in site.devices:
            continue
        for backend in backends:
            computed = _computed(site, device)
            triple = next((t for t in triples if (t.backend, t.device) == (backend, computed)), None)
            if triple is None:
                continue
            reason = _missing(triple, device, site) or _refuse(triple, engine, model)
            if reason := reason or _too_large(engine, device, model, site):
                refused.append(f"{backend} on {device}: {reason}")
                continue
            return backend, device, "; ".join([*_why(engine, backend, device, model, site), *refused])
    known = sorted({f"{t.backend} on {t.device}" for t in triples if t.state == "built"})
    raise ConfigError(
        f"{key}: no engine {engine.backend!r} for a {model_type} on {engine.device!r} at site {site.name!r}"
        f"{': ' + '; '.join(refused) if refused else ''}; built: {', '.join(known) or 'none'}"
    )


def _missing(triple: Triple, device: str, site: SiteConfig) -> str:
    """What an engine lacks; empty when it can run. What an environment of the site's own has is not to be seen from here:
    `baton stage-in` enters it and looks, and so does the job."""
    if triple.state == "needs":
        here = site.devices[device].environment.kind == "none"
        return f"needs {triple.reason}" if here else ""
    return "" if triple.state == "built" else triple.state


def _refuse(triple: Triple, engine: EngineConfig, model: ModelFacts) -> str:
    """What an engine does not compute of what is asked; empty when it does."""
    if triple.limits is None:
        return ""
    if reason := triple.limits.refuse_model(model.config):
        return f"{model.source}: {reason}"
    return triple.limits.refuse_settings(engine) or triple.limits.refuse_layout(engine, model.config)


def _too_large(engine: EngineConfig, device: str, model: ModelFacts, site: SiteConfig) -> str:
    """Why the states do not fit a device; empty when they do, when nothing is known, or when backend and device were asked for."""
    offered = site.devices[device].memory_per_device_gb
    if "auto" not in (engine.backend, engine.device) or offered == UNKNOWN:
        return ""
    needed = _rank_gb(engine, model)
    if needed <= offered:
        return ""
    return (
        f"{needed:.3g} GB of states per rank are more than site.devices.{device}.memory_per_device_gb={offered:g}; "
        "shard over more ranks, or name backend and device to try it all the same"
    )


def _rank_gb(engine: EngineConfig, model: ModelFacts) -> float:
    """States of one rank, in units of 2**30 bytes."""
    shards = engine.layout.shard_size or engine.layout.world_size
    per_parameter = INFERENCE_BYTES if engine.forward_only else TRAINING_BYTES
    return model.parameters * per_parameter / shards / 2**30


def _check_names(engine: EngineConfig, triples: list[Triple], site: SiteConfig, key: str) -> None:
    backends = sorted({triple.backend for triple in triples})
    if engine.backend != "auto" and engine.backend not in backends:
        raise ConfigError(
            f"{key}.backend={engine.backend!r}: unknown backend; {nearest(engine.backend, backends)}"
        )
    if engine.device != "auto" and engine.device not in site.devices:
        raise ConfigError(
            f"{key}.device={engine.device!r}: site {site.name!r} offers {', '.join(sorted(site.devices))}"
        )


def _why(engine: EngineConfig, backend: str, device: str, model: ModelFacts, site: SiteConfig) -> list[str]:
    reasons = []
    if engine.device == "auto":
        offers = ", ".join(sorted(site.devices))
        reasons.append(f"site {site.name} offers {offers}; {device} is the first with an engine that does it")
    else:
        reasons.append("device as asked")
    if site.devices[device].stand_in:
        reasons.append(f"{device} of site {site.name} is a stand-in, computed on cpu")
    if "auto" in (engine.backend, engine.device):
        offered = site.devices[device].memory_per_device_gb
        fits = "a device of unknown memory holds or not" if offered == UNKNOWN else f"fits {offered:g} GB"
        reasons.append(
            f"{backend}: {model.parameters / 1e6:.1f} M parameters, {_rank_gb(engine, model):.2f} GB per rank of states, "
            f"which {fits}"
        )
    return reasons


@cache
def _triples() -> tuple[Triple, ...]:
    return tuple(EngineRegistry.triples())
