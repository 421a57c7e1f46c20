"""Operators restricted to some of their channels, for models that are spread over several processes.

A Toeplitz product acts on each channel alone: the channels a .. b of a product need the same channels of its inputs,
and the kernels of these channels. D channels. The rows of a parameter that belongs to channels are the channels of one
filter after the other: s D rows for s filters (two for a bidirectional transfer function), or s Q rows where D / Q
consecutive channels share a row. All other parameters belong to all channels.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from ..kernels.stacking import named_tensors, with_tensors
from ..numerics import is_traced

# Attributes that a divided operator has in place of those of its class. Its restriction has those of the class.
OVERRIDDEN = ("forward", "local_operator")


def total(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum of `x` over the processes. Each process differentiates its own summand."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).full_tensor()


def channels_of(operator: nn.Module) -> int:
    """Return the number of channels D. An operator with several filters, one after the other, has `filters`."""
    return operator.channels // getattr(operator, "filters", 1)


def rows_of(parameter: torch.Tensor, filters: int, channels: int, chosen: range) -> torch.Tensor:
    """Return the rows of a parameter that belong to the `chosen` ones of all `channels`."""
    rows = parameter.unflatten(0, (filters, -1))  # (s, Q, ...)
    size = channels // rows.shape[1]  # of a group
    if chosen.start % size or chosen.stop % size:  # a group is cut: its channels get a row each
        rows, size = rows.repeat_interleave(size, dim=1), 1
    return rows[:, chosen.start // size : chosen.stop // size].flatten(0, 1)


def restricted(operator: nn.Module, chosen: range, local_values: dict[str, torch.Tensor] | None = None) -> nn.Module:
    """Return a shallow copy of an operator with the `chosen` channels. Gradients reach the parameters of `operator`.

    `local_values` have the rows of the `chosen` channels in place of a `DTensor`.
    """
    local_values, values = local_values or {}, []
    for name, parameter in named_tensors(operator):
        value, filters = local_values.get(name, parameter), operator.channel_parameters.get(name)
        divides = filters is not None and not isinstance(parameter, DTensor)
        values.append(rows_of(value, filters, channels_of(operator), chosen) if divides else value)
    copied = with_tensors(operator, iter(values))
    for module in copied.modules():
        if hasattr(module, "channel_parameters"):
            module.channels = len(chosen) * getattr(module, "filters", 1)
    for name in OVERRIDDEN:
        vars(copied).pop(name, None)
    return copied


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor that this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LocalOperator:
    """The channels of an operator that this process computes, as an operator; `channels` are those of each process.

    Without gradients it is the same object until a parameter changes, so that caches can keep what it computes.
    """

    def __init__(self, operator: nn.Module, channels: list[range], index: int, values: Callable[[], dict] = dict):
        if operator.channel_parameters is None:
            name = type(operator).__name__
            raise ValueError(f"`channel_parameters` must be set to divide it over processes, got None from {name}")
        if not channels[-1]:
            width = channels_of(operator)
            raise ValueError(f"The GTU must have channels for each of {len(channels)} processes, got {width}")
        self.operator, self.make = operator, lambda: restricted(operator, channels[index], values())
        self.made: tuple[list, nn.Module] | None = None

    def __call__(self) -> nn.Module:
        if torch.is_grad_enabled() or is_traced():
            return self.make()
        tensors = map(local, self.operator.parameters())
        # PyTorch counts the changes of a tensor.
        marks = [(one.data_ptr(), one.dtype, None if one.is_inference() else one._version) for one in tensors]
        if self.made is None or self.made[0] != marks:
            self.made = marks, self.make()
        return self.made[1]
