"""Which engine on which device: what ``auto`` comes to, and why. Loads no framework."""

from __future__ import annotations

from functools import cache

from engines.config import ConfigError, EngineConfig, nearest
from engines.registry import DEVICE_ORDER, EngineRegistry, Triple
from workflow.campaign.schema import SiteConfig
from workflow.manifest import Device

BACKEND_ORDER = ("fsdp2", "fsdp", "megatron", "torchtitan", "veomni", "automodel")
"""For models that fit: the plainest engine first."""
TRAINING_BYTES = 16
"""Per parameter in training: float32 weight, gradient and two AdamW moments."""
INFERENCE_BYTES = 4
"""Per parameter without an optimizer."""


def place(
    engine: EngineConfig, model_type: str, parameters: int, site: SiteConfig, key: str
) -> tuple[EngineConfig, Device]:
    """Resolve ``auto`` in an engine and check that the result exists and fits the site.

    Args:
        parameters: of the model, for what ``auto`` backends are chosen by.
        key: config path of the engine, for messages.

    Raises:
        ConfigError: no engine of that key, not built, a dependency is missing, or too few devices.
    """
    backend, device, why = _choose(engine, model_type, parameters, site, key)
    offered = site.devices[device]
    world = engine.layout.world_size
    if world > offered.devices_per_node:
        raise ConfigError(
            f"{key}.layout: {world} ranks, but site {site.name!r} has {offered.devices_per_node} {device} devices "
            f"(site.devices.{device}.devices_per_node)"
        )
    return engine.model_copy(update={"backend": backend, "device": device}), Device(
        asked=engine.device, computed=device, why=why
    )


def _choose(
    engine: EngineConfig, model_type: str, parameters: int, site: SiteConfig, key: str
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
            triple = next((t for t in triples if (t.backend, t.device) == (backend, device)), None)
            if triple is None:
                continue
            if triple.state != "built":
                reason = f"needs {triple.reason}" if triple.reason else triple.state
                refused.append(f"{backend} on {device}: {reason}")
                continue
            return backend, device, _why(engine, backend, device, parameters, site)
    known = sorted({f"{t.backend} on {t.device}" for t in triples if t.state == "built"})
    raise ConfigError(
        f"{key}: no engine {engine.backend!r} for a {model_type} on {engine.device!r} at site {site.name!r}"
        f"{': ' + '; '.join(refused) if refused else ''}; built: {', '.join(known) or 'none'}"
    )


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


def _why(engine: EngineConfig, backend: str, device: str, parameters: int, site: SiteConfig) -> str:
    reasons = []
    if engine.device == "auto":
        reasons.append(
            f"site {site.name} offers {', '.join(sorted(site.devices))}; {device} is the first with a built engine"
        )
    else:
        reasons.append("device as asked")
    if engine.backend == "auto":
        needed = parameters * (INFERENCE_BYTES if engine.forward_only else TRAINING_BYTES) / 2**30
        shards = engine.layout.shard_size or engine.layout.world_size
        offered = site.devices[device].memory_per_device_gb
        fits = "fits" if needed / shards <= offered else "is more than"
        reasons.append(
            f"{backend}: {parameters / 1e6:.1f} M parameters, {needed / shards:.2f} GB per rank of states, "
            f"which {fits} {offered:g} GB"
        )
    return "; ".join(reasons)


@cache
def _triples() -> tuple[Triple, ...]:
    return tuple(EngineRegistry.triples())
