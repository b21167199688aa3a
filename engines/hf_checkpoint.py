"""Where a model's parameters stand in its on-disk Hugging Face checkpoint.

In memory, transformers fuses what its files keep apart: the experts of a mixture are one tensor per layer, on disk
three matrices per expert. Weights travel under their on-disk names (exports, weight sync), so both ends need the
same map; it is made of views, so reading and writing use one function.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


class UnknownCheckpointLayout(NotImplementedError):
    """transformers stores this model in a layout that Baton cannot address in place."""


def on_disk_views(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The on-disk tensors that the parameter ``name`` consists of, as views of ``tensor``.

    Fused experts, (experts, 2 * intermediate, hidden) and (experts, hidden, intermediate), become ``gate_proj``,
    ``up_proj`` and ``down_proj`` of each expert; every other parameter is itself.
    """
    prefix, _, last = name.rpartition(".")
    if last not in ("gate_up_proj", "down_proj") or not prefix.endswith(".experts"):
        yield name, tensor
        return
    for index, expert in enumerate(tensor):
        if last == "down_proj":
            yield f"{prefix}.{index}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2, dim=0)
            yield f"{prefix}.{index}.gate_proj.weight", gate
            yield f"{prefix}.{index}.up_proj.weight", up


def on_disk_parameters(model: nn.Module) -> dict[str, Tensor]:
    """On-disk name -> view of the parameter (or saved buffer) that holds it; tied weights stand once.

    Args:
        model: an unsharded transformers model.

    Raises:
        UnknownCheckpointLayout: transformers would save other names or shapes than these views.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    views = dict(view for name, tensor in state.items() for view in on_disk_views(name, tensor))
    saved = revert_weight_conversion(model, {name: tensor.to("meta") for name, tensor in state.items()})
    wrong = {
        name
        for name in views.keys() | saved.keys()
        if name not in views or name not in saved or views[name].shape != saved[name].shape
    }
    if wrong:
        raise UnknownCheckpointLayout(
            f"{type(model).__name__}: transformers saves {sorted(wrong)[:3]} differently than Baton addresses them"
        )
    return views
