"""Tensor parallelism: the two styles of `TnnConfig.base_model_tp_plan` that transformers does not have.

    tnn_operator   a Toeplitz operator: each process has the parameters and the products of its channels
    tnn_norm       a norm over channels that are divided: processes add their sums of squares

P processes, D channels of a GTU, of which each process has D / P. `u_proj` and `v_proj` compute the channels of this
process, the operator mixes each along the sequence without communication, and `o_proj` adds the parts of all
processes. What is not divided (the hidden layers of a position encoder, poles that all channels share) lies on every
process, and its gradient is the sum over processes.

A divided parameter is a `DTensor`, as transformers makes them. So loading reads only the rows of this process, saving
gathers the rows of all, and optimizers see one tensor.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from ..numerics import compute_dtype
from .channels import Part, are_whole_groups, chunk_of, filters_of_parameters, local, rows_of, with_channels


class SumOfGradients(torch.autograd.Function):
    """Several tensors unchanged. Their gradients are added over the processes of a group, in one message."""

    @staticmethod
    def forward(ctx, group, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        dtype = max((one.dtype for one in gradients), key=lambda one: one.itemsize)
        message = torch.cat([one.flatten().to(dtype) for one in gradients])
        dist.all_reduce(message, group=ctx.group)
        parts = message.split([one.numel() for one in gradients])
        return None, *[part.view_as(one).to(one.dtype) for part, one in zip(parts, gradients, strict=True)]


class Total(torch.autograd.Function):
    """The sum of a tensor over the processes of a group, each of which uses it: so their gradients are added too."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return summed(gradient, ctx.group), None


def summed(x: torch.Tensor, group) -> torch.Tensor:
    """The sum of `x` over the processes of a group."""
    message = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(message, group=group)
    return message


def divide(module: nn.Module, name: str, mesh, filters: int = 1):
    """Divide the rows of a parameter over `mesh`, those of each filter apart."""
    owner, _, leaf = name.rpartition(".")
    parameters = module.get_submodule(owner)._parameters
    if parameters.get(leaf) is not None:
        placement = Shard(0) if filters == 1 else _StridedShard(0, split_factor=filters)
        rows = distribute_tensor(parameters[leaf], mesh, [placement], src_data_rank=None)
        parameters[leaf] = nn.Parameter(rows, requires_grad=parameters[leaf].requires_grad)


def divide_operator(operator: nn.Module, mesh) -> Part:
    """Divide the parameters of an operator that belong to channels. The result is what this process computes.

    Raises:
        ValueError: the operator does not say what belongs to channels, or there are more processes than channels.
    """
    chosen = chunk_of(operator.channels, mesh.size(), mesh.get_local_rank())
    if not chunk_of(operator.channels, mesh.size(), mesh.size() - 1):
        raise ValueError(f"The GTU must have channels for each of {mesh.size()} processes, got {operator.channels}")
    known = filters_of_parameters(operator)
    for name, parameter in dict(operator.named_parameters()).items():
        if name in known and can_be_divided(len(parameter), known[name], operator.channels, mesh.size()):
            divide(operator, name, mesh, known[name])
    return Part(operator, partial(part_of, operator, chosen, mesh.get_group()))


def part_of(operator: nn.Module, chosen: range, group) -> nn.Module:
    """The operator of the `chosen` channels. Parameters that are not divided have those of all channels."""
    values, known = local_parameters(operator, group), filters_of_parameters(operator)

    def replace(name: str, value: torch.Tensor) -> torch.Tensor:
        if name in known and not isinstance(value, DTensor):
            return rows_of(values[name], known[name], operator.channels, chosen)
        return values[name]

    return with_channels(operator, len(chosen), replace)


# PyTorch 2.11 takes a `_StridedShard` for an order of mesh dimensions, and cannot gather one over a single dimension
# for a gradient or a saved folder. So with it, parameters of several filters lie on every process.
DIVIDES_FILTERS = torch.__version__ >= "2.12"


def can_be_divided(rows: int, filters: int, channels: int, parts: int) -> bool:
    """Whether a `DTensor` can hold the rows of a parameter, those of each filter apart, next to their channels."""
    apart = filters == 1 or (DIVIDES_FILTERS and channels % parts == 0)
    return apart and are_whole_groups(rows, filters, channels, parts)


def local_parameters(module: nn.Module, group) -> dict[str, torch.Tensor]:
    """What this process has of the parameters of a module. Gradients of those that are not divided will be added."""
    values = dict(module.named_parameters(remove_duplicate=False))
    shared = {name: value for name, value in values.items() if not isinstance(value, DTensor)}
    if torch.is_grad_enabled() and any(value.requires_grad for value in shared.values()):
        shared = dict(zip(shared, SumOfGradients.apply(group, *shared.values()), strict=True))
    return {name: local(value) for name, value in (values | shared).items()}


class OperatorStyle(TensorParallelLayer):
    """The style of an operator."""

    def install_forward(self, module: nn.Module, mesh) -> nn.Module:
        """Divide the parameters of an operator, and let it compute the channels of this process alone."""
        part = divide_operator(module, mesh)
        module.on_this_process = part
        module.forward = lambda *args, **kwargs: part().forward(*args, **kwargs)
        return module


def rms_norm(norm: nn.Module, x: torch.Tensor, given: dict, total: Callable) -> torch.Tensor:
    # The least number keeps the derivative of the root finite. Beside eps it is nothing.
    length = total(x.square().sum(-1, keepdim=True)).clamp(min=torch.finfo(x.dtype).tiny).sqrt()
    y = x / (length / norm.size**0.5 + norm.eps)
    y = y * given["weight"] if "weight" in given else y
    return y * torch.sigmoid(given["gate"] * x) if "gate" in given else y


def scale_norm(norm: nn.Module, x: torch.Tensor, given: dict, total: Callable) -> torch.Tensor:
    square = total(x.square().sum(-1, keepdim=True)) / norm.size
    return x * torch.rsqrt(square + norm.eps) * given["weight"]


def layer_norm(norm: nn.Module, x: torch.Tensor, given: dict, total: Callable) -> torch.Tensor:
    size = norm.normalized_shape[0]
    centred = x - total(x.sum(-1, keepdim=True)) / size
    variance = total(centred.square().sum(-1, keepdim=True)) / size
    return centred * torch.rsqrt(variance + norm.eps) * given["weight"] + given["bias"]


# The norms of `norms.py` for channels `(..., D / P)` of this process, by the names of their classes: a copy of the
# package that came with a checkpoint has classes of its own.
NORMS = {"SimpleRMSNorm": rms_norm, "RMSNorm": rms_norm, "GatedRMSNorm": rms_norm}
NORMS |= {"ScaleNorm": scale_norm, "LayerNorm": layer_norm}


class NormStyle(TensorParallelLayer):
    """The style of a norm over divided channels. Where there is no norm, it does nothing."""

    def install_forward(self, module: nn.Module, mesh) -> nn.Module:
        """Divide the parameters of a norm that belong to channels, and let processes add their statistics."""
        compute = NORMS.get(type(module).__name__)
        if compute is None:
            return module
        for name, parameter in module.named_parameters():
            if parameter.numel() > 1:
                divide(module, name, mesh)
        group = mesh.get_group()

        def forward(x: torch.Tensor) -> torch.Tensor:
            wide = compute_dtype(x.dtype)
            given = {name: value.to(wide) for name, value in local_parameters(module, group).items()}
            return compute(module, x.to(wide), given, lambda one: Total.apply(one, group)).to(x.dtype)

        module.forward = forward
        return module


# The plan of a language model's head.

# A plan names styles, and transformers looks them up in its table.
ALL_PARALLEL_STYLES.register("tnn_operator", OperatorStyle())
ALL_PARALLEL_STYLES.register("tnn_norm", NormStyle())
