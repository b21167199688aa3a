"""MindSpeed's part on the device of tests/support/fake_npu.py: what Megatron asks of CUDA is answered by the NPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from engines.training.megatron.cpu import _ANSWERS
from tests.support.fake_npu import NAME, NpuTensor

_NPU = torch.device(NAME, 0)


class _CudaMeansNpu(TorchFunctionMode):
    """A call of torch that says cuda means the device."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_to_npu, (args, kwargs or {}))
        if function is torch.Tensor.cuda:
            return args[0].to(_NPU)
        if (
            function is torch.tensor
        ):  # of numbers on the device, which a wrapped tensor cannot be read for in there
            args = tree_map(lambda item: item.tolist() if isinstance(item, NpuTensor) else item, args)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace(f".{NAME}.", ".cuda.")
        return function(*args, **kwargs)


def _to_npu(item: Any) -> Any:
    is_cuda = isinstance(item, str | torch.device) and str(item).partition(":")[0] == "cuda"
    return _NPU if is_cuda else item


def adapt_megatron() -> None:
    """Enter it for the rest of this process."""
    for owner, name, answer in _ANSWERS:  # a device without streams is one to them
        setattr(owner, name, answer)
    torch.cuda.current_device = lambda: _NPU
    _CudaMeansNpu().__enter__()
