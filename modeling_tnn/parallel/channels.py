"""Operators restricted to some of their channels, for models that are spread over several processes.

A Toeplitz product acts on each channel alone: the channels a .. b of a product need the same channels of its inputs,
and the kernels of these channels. D channels. The rows of a parameter that belongs to channels are the channels of one
filter after the other: s D rows for s filters (two for a bidirectional transfer function), or s Q rows where D / Q
consecutive channels share a row. All other parameters belong to all channels.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..configuration_tnn import GTU, TOEPLITZ
from ..extensions import extensions
from ..kernels.stacking import with_parameters
from ..numerics import is_traced

# The plan of `TnnConfig`: how transformers divides the modules of a `TnnModel` over processes (`parallel/tensor.py`).
PLAN_OF_ATTENTION = {
    "layers.*.attention.q_proj": "colwise",
    "layers.*.attention.k_proj": "colwise",
    "layers.*.attention.v_proj": "colwise",
    "layers.*.attention.o_proj": "rowwise",
}
PLAN_OF_TOEPLITZ = {
    "layers.*.mixer.u_proj": "colwise",
    "layers.*.mixer.v_proj": "colwise",
    "layers.*.mixer.tno": "tnn_operator",
    "layers.*.mixer.norm": "tnn_norm",
    "layers.*.mixer.o_proj": "rowwise",
}
PLAN_OF_CHANNELS = {
    "layers.*.glu.gate_proj": "colwise",
    "layers.*.glu.up_proj": "colwise",
    "layers.*.glu.down_proj": "rowwise",
}


def tensor_plan(layer_types: Sequence[str], mixer: str, use_glu: bool) -> dict[str, str]:
    """The plan of a model with these kinds of layer. Mixers other than the GTU lie on every process as a whole."""
    plan = PLAN_OF_TOEPLITZ if TOEPLITZ in layer_types and mixer == GTU else {}
    return plan | (PLAN_OF_ATTENTION if {*layer_types} - {TOEPLITZ} else {}) | (PLAN_OF_CHANNELS if use_glu else {})


extensions.register(tensor_plan=tensor_plan)


# What a divided operator has in place of the methods and attributes of its class. Its part has those of the class.
OF_THE_WHOLE = ("forward", "on_this_process", "shift_invariant")


def chunk_of(count: int, parts: int, index: int) -> range:
    """The part `index` of `count` things in `parts` consecutive parts, as `torch.chunk` makes them."""
    size = -(-count // parts)
    return range(min(index * size, count), min((index + 1) * size, count))


def filters_of_parameters(operator: nn.Module) -> dict[str, int]:
    """The parameters that belong to channels, each with its number of filters s.

    Raises:
        ValueError: the operator does not say it.
    """
    if operator.channel_parameters is None:
        raise ValueError(
            "`channel_parameters` must name the parameters that belong to channels, to divide an operator over "
            f"processes, got None from {type(operator).__name__}"
        )
    return operator.channel_parameters


def are_whole_groups(rows: int, filters: int, channels: int, parts: int) -> bool:
    """Whether equal parts of the `rows` of a parameter belong to equal parts of the channels."""
    groups = rows // filters
    return groups == channels or groups % parts == 0


def rows_of(parameter: torch.Tensor, filters: int, channels: int, chosen: range) -> torch.Tensor:
    """The rows of a parameter that belong to the `chosen` ones of so many `channels`."""
    rows = parameter.unflatten(0, (filters, -1))  # (s, Q, ...)
    size = channels // rows.shape[1]  # of a group
    if chosen.start % size or chosen.stop % size:  # a group is cut: its channels get a row each
        rows, size = rows.repeat_interleave(size, dim=1), 1
    return rows[:, chosen.start // size : chosen.stop // size].flatten(0, 1)


def with_channels(operator: nn.Module, count: int, replace: Callable[[str, torch.Tensor], torch.Tensor]) -> nn.Module:
    """A shallow copy of an operator that has `count` channels and other parameters.

    Args:
        replace: from the name and the value of a parameter to the value in the copy.
    """
    parameters = (replace(name, value) for name, value in operator.named_parameters(remove_duplicate=False))
    twin = with_parameters(operator, parameters)
    for module in twin.modules():
        if hasattr(module, "channel_parameters"):
            module.channels = count
    for name in OF_THE_WHOLE:
        vars(twin).pop(name, None)
    return twin


def restricted(operator: nn.Module, chosen: range) -> nn.Module:
    """The operator of the `chosen` channels. Its parameters are rows of those of `operator`, with gradients."""
    filters = filters_of_parameters(operator)

    def replace(name: str, value: torch.Tensor) -> torch.Tensor:
        return rows_of(value, filters[name], operator.channels, chosen) if name in filters else value

    return with_channels(operator, len(chosen), replace)


class Part:
    """The channels of an operator that this process computes, as an operator.

    Without gradients it is the same object until a parameter changes, so that caches can keep what it computes.

    Args:
        operator: the operator with all channels.
        make: makes its part.
    """

    def __init__(self, operator: nn.Module, make: Callable[[], nn.Module]):
        self.operator, self.make = operator, make
        self.kept: tuple[list, nn.Module] | None = None

    def __call__(self) -> nn.Module:
        if torch.is_grad_enabled() or is_traced():
            return self.make()
        marks = [state_of(local(parameter)) for parameter in self.operator.parameters()]
        if self.kept is None or self.kept[0] != marks:
            self.kept = marks, self.make()
        return self.kept[1]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(parameter: torch.Tensor) -> tuple:
    """What differs when a parameter has other values: their place, and the changes that PyTorch has counted."""
    return parameter.data_ptr(), parameter.dtype, None if parameter.is_inference() else parameter._version
