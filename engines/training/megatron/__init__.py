"""Megatron-core as an engine. Importing this package imports Megatron, with what it asks for and does not use on a CPU left out."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
import warnings

import torch


def _import_megatron() -> None:
    """One of Megatron's modules imports triton without asking whether it is there; its two kernels are never called here."""
    kernels = "megatron.core.transformer.moe.ops.paged_stash"
    if importlib.util.find_spec("triton") is None:
        module = types.ModuleType(kernels)
        module.GLOBAL_BLOCK_SIZE = 1024
        module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = None
        sys.modules.setdefault(kernels, module)
    load_from_bytes = torch.storage._load_from_bytes
    with warnings.catch_warnings():  # that Transformer Engine and Apex are not installed
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core")
    # Megatron puts its own reader of storages in torch's place, and every tensor that is pickled from then on names it: a process
    # without Megatron, such as the controller, could not read what a rank answers.
    torch.storage._load_from_bytes = load_from_bytes
    # 0.16 asks whether it has a kernel of Transformer Engine by a name that is not there without Transformer Engine.
    experts = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(experts, "te_general_gemm"):
        experts.te_general_gemm = None
    # Notices on every model: that it should be built from another class, that its buffers are laid out later.
    for name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)


_import_megatron()
