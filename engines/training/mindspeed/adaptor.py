"""Entering MindSpeed. This module imports nothing of Megatron."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator

from engines.ascend import AscendError, load_torch_npu
from engines.catalog import CATALOGUE, unmet_distributions

ADAPTOR = "mindspeed.megatron_adaptor"
ARGUMENTS = ("--optimization-level", "0")
"""What MindSpeed is told: to adapt Megatron to NPUs and to change no arithmetic, which its fused operators (levels 1 and 2) do."""


def adapt() -> None:
    """Let MindSpeed adapt Megatron in this process; nothing happens when that was done before.

    Raises:
        AscendError: CANN, torch_npu, MindSpeed or another distribution is missing or of another version, or this process imported
            Megatron before.
    """
    if ADAPTOR in sys.modules:
        return
    if early := [name for name in sorted(sys.modules) if name.partition(".")[0] == "megatron"]:
        raise AscendError(
            f"engine.backend=megatron, engine.device=npu: this process imported {early[-1]} before {ADAPTOR}, which can no longer "
            "adapt it; an NPU's engine needs a process without any other Megatron engine or conversion"
        )
    (entry,) = (entry for entry in CATALOGUE if entry.module == f"{__package__}.engine")
    if unmet := unmet_distributions(entry.requires, entry.versions):
        raise AscendError(
            f"engine.backend=megatron, engine.device=npu needs {', '.join(unmet)}; "
            f"install env/{entry.environment}.txt on top of env/cpu-light.txt"
        )
    load_torch_npu()
    with _command_line(ARGUMENTS):
        importlib.import_module(ADAPTOR)
    _use_torchs_optimizer()


@contextlib.contextmanager
def _command_line(arguments: tuple[str, ...]) -> Iterator[None]:
    """MindSpeed reads its settings from the command line, and takes every word of it for a setting of a model."""
    words = sys.argv
    sys.argv = [words[0], *arguments]
    try:
        yield
    finally:
        sys.argv = words


def _use_torchs_optimizer() -> None:
    """MindSpeed puts a fused AdamW where Megatron looks for Apex's. The engine saves the state of torch's own, as on every device."""
    importlib.import_module("engines.training.megatron")
    importlib.import_module("megatron.core.optimizer").USING_PYTORCH_OPTIMIZER = True
    importlib.import_module("megatron.core.optimizer.distrib_optimizer").HAVE_APEX_OR_TE = False
