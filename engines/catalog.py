"""Which module serves which engine, what it needs and where it runs: data only, so that planning loads no framework.

Third parties declare engines by entry points in the group ``baton.engines``: the name is ``model_type.backend.device``, the
value a module that registers its class when it is imported.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from engines.ascend import cann_problem
from engines.limits import FSDPLimits, Limits, MegatronLimits

logger = logging.getLogger(__name__)

ENTRY_POINTS = "baton.engines"
BOTH = ("language_model", "value_model")


@dataclass(frozen=True)
class Entry:
    """One module and the keys it registers: the product of its model types, backends and devices."""

    module: str
    model_types: tuple[str, ...]
    backends: tuple[str, ...]
    devices: tuple[str, ...]
    requires: tuple[str, ...]
    """Distributions that must be installed."""
    environment: str
    """File in env/ that installs them; "" stands for env/<device>.txt."""
    built: bool
    """False: declared, but there is no code yet."""
    limits: Limits | None = None
    """None: planning does not know them, and the engine refuses by itself."""
    on_top: str = ""
    """File in env/ with what it needs on top of the environment."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of distributions that it needs in one version: how that begins, up to a dot or the end."""

    def served(self) -> list[tuple[str, str, str]]:
        """(model_type, backend, device) of every engine in the module."""
        return [(m, b, d) for m in self.model_types for b in self.backends for d in self.devices]


_HF = ("torch", "transformers", "safetensors")

FSDP = FSDPLimits(
    architectures=("llama", "qwen2", "qwen3", "qwen3_moe"),
    layout=("data_parallel_size", "context_parallel_size", "shard_size"),
    fused_kernels=False,
)
"""Of both FSDP engines. The architectures are those whose logits are hidden states times the output embedding, with nothing in
between."""

MEGATRON = MegatronLimits(
    architectures=("llama", "qwen2", "qwen3", "qwen3_moe"),
    layout=(
        "data_parallel_size",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "virtual_pipeline_parallel_size",
        "context_parallel_size",
        "expert_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "distributed_optimizer",
    ),
    fused_kernels=False,
    auxiliary_losses=True,
)

MINDSPEED = replace(
    MEGATRON,
    architectures=("llama", "qwen2", "qwen3"),
    layout=tuple(key for key in MEGATRON.layout if not key.startswith("expert")),
    auxiliary_losses=False,
)
"""No mixtures: what MindSpeed puts in the place of Megatron's experts and their routing was never seen."""

CATALOGUE: tuple[Entry, ...] = (
    Entry("engines.training.fsdp.fsdp2", BOTH, ("fsdp2",), ("cpu", "cuda", "npu"), _HF, "", True, FSDP),
    Entry("engines.training.fsdp.fsdp1", BOTH, ("fsdp",), ("cpu", "cuda", "npu"), _HF, "", True, FSDP),
    Entry(
        "engines.training.megatron.engine",
        BOTH,
        ("megatron",),
        ("cpu", "cuda"),
        ("torch", "transformers", "safetensors", "megatron-core"),
        "",
        True,
        MEGATRON,
        "megatron",
    ),
    # MindSpeed's adaptor must be imported before Megatron: a module of its own makes that order structure.
    Entry(
        "engines.training.mindspeed.engine",
        BOTH,
        ("megatron",),
        ("npu",),
        ("torch", "torch_npu", "mindspeed", "megatron-core", "transformers", "safetensors"),
        "ascend",
        True,
        MINDSPEED,
        versions={"torch": "2.7.1", "torch_npu": "2.7.1", "mindspeed": "0.16", "megatron-core": "0.16"},
    ),
    Entry(
        "engines.training.torchtitan.engine",
        ("language_model",),
        ("torchtitan",),
        ("cpu", "cuda"),
        ("torch", "torchtitan"),
        "",
        False,
    ),
    Entry(
        "engines.training.veomni.engine",
        BOTH,
        ("veomni",),
        ("cpu", "cuda", "npu"),
        ("torch", "veomni"),
        "",
        False,
    ),
    Entry(
        "engines.training.automodel.engine",
        ("language_model",),
        ("automodel",),
        ("cpu", "cuda"),
        ("torch", "nemo-automodel"),
        "",
        False,
    ),
)


def declared_entries() -> list[Entry]:
    """The catalogue, and what installed packages add to it."""
    return [*CATALOGUE, *_third_party()]


def environment_of(entry: Entry, device: str) -> str:
    """The environment in which ``entry`` runs on ``device``."""
    return entry.environment or {"npu": "ascend"}.get(device, device)


def installed_on_top(backends: Iterable[str], device: str) -> list[str]:
    """Files in env/ with what these engines need on top of the device's environment."""
    wanted = set(backends)
    entries = [entry for entry in CATALOGUE if device in entry.devices and wanted & set(entry.backends)]
    return sorted({entry.on_top for entry in entries} - {""})


def what_is_missing(entry: Entry, device: str) -> str:
    """Why ``entry`` cannot run on ``device`` here; empty when it can. Imports nothing that it asks about."""
    required = [
        *entry.requires,
        *(["torch_npu"] if device == "npu" and "torch_npu" not in entry.requires else []),
    ]
    unmet = unmet_distributions(required, entry.versions)
    reasons = [f"the distributions {', '.join(unmet)}"] if unmet else []
    if device == "npu" and (problem := cann_problem()):
        reasons.append(problem)
    if not device_present(device):
        reasons.append(f"a device of key {device} on this machine")
    return " and ".join(reasons)


def unmet_distributions(required: Iterable[str], versions: Mapping[str, str]) -> list[str]:
    """Which of the distributions are not installed in the version that is wanted, with the one that is."""
    unmet = []
    for name in required:
        wanted, installed = versions.get(name, ""), _version(name)
        if installed is None:
            unmet.append(f"{name}=={wanted}.*" if wanted else name)
        elif wanted and not f"{installed.partition('+')[0]}.".startswith(f"{wanted}."):
            unmet.append(f"{name}=={wanted}.* (here is {installed})")
    return unmet


def device_present(device: str) -> bool:
    """Whether this machine has a device of that key, by its device files."""
    pattern = {"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}.get(device)
    return pattern is None or any(Path("/dev").glob(pattern))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _third_party() -> list[Entry]:
    entries = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        parts = point.name.split(".")
        if len(parts) != 3:
            logger.warning(
                "entry point %r in %s: must be named model_type.backend.device", point.name, ENTRY_POINTS
            )
            continue
        model_type, backend, device = parts
        requires = (point.dist.name,) if point.dist else ()
        entries.append(Entry(point.module, (model_type,), (backend,), (device,), requires, "", True))
    return entries
