"""A device of key npu in plain Python: its tensors are on no other device, and what an NPU would refuse is refused.

Every tensor of it wraps one of the host, on which everything is computed, so numbers are those of the CPU. Tensors of different devices
do not mix, but for single numbers and indices, as everywhere in torch. CUDA is no device here: asking for it is an error.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

NAME = "npu"
_aten = torch.ops.aten
_BETWEEN_DEVICES = {
    _aten.copy_,
    _aten._to_copy,
    _aten.index,
    _aten.index_put,
    _aten.index_put_,
    _aten._index_put_impl_,
}


class WrongDevice(RuntimeError):
    """What was asked for is on another device."""


class NpuTensor(torch.Tensor):
    """A tensor of the device; ``host`` holds its numbers."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> NpuTensor:
        with torch.inference_mode(False):  # wrappers of inference tensors cannot be indexed
            tensor = torch.Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=torch.device(NAME, 0),
            )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return _compute(function, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: NpuTensor) -> None:
        torch.Tensor.data.__set__(self, other)
        self.host = other.host

    def tolist(self) -> Any:
        return self.host.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"NpuTensor({self.host!r})"


class _Npu(TorchDispatchMode):
    """Tensors that are made on the device, or go there."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return _compute(function, args, kwargs or {})


def _compute(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    packet = getattr(function, "overloadpacket", None)
    if packet is _aten.to:  # in inference mode it comes whole, and may answer with what it was given
        with _Npu():
            return function.decompose(*args, **kwargs)
    flat, form = tree_flatten((args, kwargs))
    tensors = [item for item in flat if isinstance(item, torch.Tensor)]
    here = [tensor for tensor in tensors if isinstance(tensor, NpuTensor)]
    asked = next((torch.device(item) for item in flat if isinstance(item, torch.device)), None)
    if asked is not None and asked.type not in ("cpu", "meta", NAME):
        raise WrongDevice(f"{function} asks for {asked}")
    if here and packet not in _BETWEEN_DEVICES:
        away = [tensor for tensor in tensors if not isinstance(tensor, NpuTensor) and tensor.dim()]
        if away:
            raise WrongDevice(f"{function} mixes {NAME} with {away[0].device}: {away[0].shape}")
    on_host = [_to_host(item) for item in flat]
    args, kwargs = tree_unflatten(on_host, form)
    result = function(*args, **kwargs)
    stays = asked.type == NAME if asked is not None else bool(here) and not _is_copy_to_host(packet, flat)
    known = {id(tensor.host): tensor for tensor in here} | {
        id(tensor): tensor for tensor in tensors if not isinstance(tensor, NpuTensor)
    }

    def back(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return known.get(id(item)) if id(item) in known else NpuTensor(item) if stays else item

    return tree_map(back, result)


def _to_host(item: Any) -> Any:
    if isinstance(item, NpuTensor):
        return item.host
    return torch.device("cpu") if isinstance(item, torch.device) and item.type == NAME else item


def _is_copy_to_host(packet: Any, flat: list[Any]) -> bool:
    return packet is _aten.copy_ and not isinstance(flat[0], NpuTensor)


def install() -> None:
    """Make the device known to torch, for the rest of this process. What ``import torch_npu`` does on a real one."""
    module = types.ModuleType(f"torch.{NAME}")
    nothing = {"set_device", "synchronize", "empty_cache", "manual_seed_all", "manual_seed"}
    for name in nothing:
        setattr(module, name, lambda *args: None)
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    backend_registration._setup_privateuseone_for_python_backend(NAME, module)
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # a module keeps its parameters, as it does between real devices
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # torch.tensor(list, device=...) goes by way of the host, where it can be seen
    torch.autograd.set_multithreading_enabled(False)  # no threads of a device that has none
    dist.Backend.register_backend("hccl", _gloo, devices=[NAME])
    _Npu().__enter__()


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)
