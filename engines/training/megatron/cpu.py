"""Megatron on a CPU: inside the scope of :func:`on_cpu`, what Megatron asks of CUDA is answered by the host.

Megatron names its device in three ways: through functions of ``torch.cuda``, as the word "cuda", and by compiling functions.
The scope answers the first with functions that mean the CPU, rewrites the second (a ``TorchFunctionMode``, which is per thread),
and runs compiled functions as they are written. The replaced functions belong to the whole process, so the scope is entered for
each call of an engine, restores everything at its end, and is refused where CUDA is in use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

from engines.training.errors import UnsupportedConfigError

_CPU = torch.device("cpu")


class _Stream:
    """A stream or an event of a device that does everything in program order."""

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def nothing(self, *args: Any) -> None:
        """Order is kept already."""

    wait_stream = wait_event = record = wait = synchronize = nothing

    def record_event(self, *args: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class _Generators:
    """torch.cuda.default_generators: every index is the host's."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


def _nothing(*args: Any, **named: Any) -> None:
    """What needs no doing on a CPU."""


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes of an all-to-all, which Megatron converts only when they lie on a device."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_STREAM = _Stream()
_ANSWERS: list[tuple[Any, str, Any]] = [
    (torch.cuda, "current_device", lambda: _CPU),
    (torch.cuda, "current_stream", lambda *args: _STREAM),
    (torch.cuda, "default_stream", lambda *args: _STREAM),
    (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
    (torch.cuda, "Stream", _Stream),
    (torch.cuda, "Event", _Stream),
    (torch.cuda, "synchronize", _nothing),
    (torch.cuda, "empty_cache", _nothing),
    (torch.cuda, "is_current_stream_capturing", lambda: False),
    (torch.cuda, "default_generators", _Generators()),
    (torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed)),
    (torch.cuda, "get_rng_state", lambda *args, **named: torch.get_rng_state()),
    (torch.cuda, "set_rng_state", lambda state, *args, **named: torch.set_rng_state(state)),
    (torch.cuda.random, "get_rng_state", lambda *args, **named: torch.get_rng_state()),
    (torch.cuda.nvtx, "range_push", _nothing),
    (torch.cuda.nvtx, "range_pop", _nothing),
    (megatron_random, "_lazy_init", _nothing),
    (megatron_random, "_lazy_call", lambda callback, **named: callback()),
    (token_dispatcher, "maybe_move_tensor_to_cpu", _to_host),
]
"""(where, name, what it is inside the scope)."""


class _CudaMeansCpu(TorchFunctionMode):
    """Every device that is called "cuda" in a call of torch is the CPU."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda or function is torch.Tensor.pin_memory:
            return args[0]
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if function is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)  # compared with torch.cuda.FloatTensor
        return function(*args, **kwargs)


_depth = 0


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Scope in which Megatron computes on the CPU; scopes nest.

    Raises:
        UnsupportedConfigError: this process has used CUDA, whose functions would be replaced under it.
    """
    global _depth
    if _depth:
        yield
        return
    if torch.cuda.is_initialized():
        raise UnsupportedConfigError(
            "engine.backend=megatron, engine.device=cpu: this process uses CUDA already; "
            "run it in a process of its own, with CUDA_VISIBLE_DEVICES=''"
        )
    with contextlib.ExitStack() as stack:
        for owner, name, answer in _ANSWERS:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, answer)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_CudaMeansCpu())
        stack.callback(_leave)
        _depth = 1
        yield


def _leave() -> None:
    global _depth
    _depth = 0


def _is_cuda(device: Any) -> bool:
    return getattr(device, "type", device) == "cuda" or (
        isinstance(device, str) and device.startswith("cuda:")
    )
