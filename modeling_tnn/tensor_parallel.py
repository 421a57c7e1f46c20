"""Tensor parallelism: the two styles of `TnnConfig.base_model_tp_plan` that transformers does not have.

    tnn_operator   a Toeplitz operator: each process has the parameters and the products of its channels
    tnn_norm       a norm over channels that are divided: processes add their sums of squares

P processes, D channels of a GTU, of which each process has D / P. `u_proj` and `v_proj` compute the channels of this
process, the operator mixes each along the sequence without communication, and `o_proj` adds the parts of all processes.
What is not divided (the hidden layers of a position encoder, poles that all channels share) lies on every process, and
its gradient is the sum over processes.

A divided parameter is a `DTensor`, as transformers makes them. So loading reads only the rows of this process, saving
gathers the rows of all, and optimizers see one tensor.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from .channels import are_whole_groups, chunk_of, filters_of_parameters, rows_of, with_channels
from .numerics import compute_dtype, is_traced


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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Part:
    """The channels of an operator that this process has, as an operator.

    Args:
        operator: an operator with all channels. Its parameters are divided here.
        mesh: the processes.

    Raises:
        ValueError: the operator does not say what belongs to channels, or there are more processes than channels.
    """

    def __init__(self, operator: nn.Module, mesh):
        self.operator, self.group = operator, mesh.get_group()
        self.chosen = chunk_of(operator.channels, mesh.size(), mesh.get_local_rank())
        if not chunk_of(operator.channels, mesh.size(), mesh.size() - 1):
            raise ValueError(f"The GTU must have channels for each of {mesh.size()} processes, got {operator.channels}")
        self.filters = filters_of_parameters(operator)
        self.kept: tuple[list, nn.Module] | None = None
        for name, filters in self.filters.items():
            parameter = dict(operator.named_parameters()).get(name)
            if parameter is not None and can_be_divided(len(parameter), filters, operator.channels, mesh.size()):
                divide(operator, name, mesh, filters)

    def __call__(self) -> nn.Module:
        """The operator of these channels. Without gradients it is the same one until parameters change."""
        if torch.is_grad_enabled() or is_traced():
            return self._make()
        marks = [mark(local(one)) for one in self.operator.parameters()]
        if self.kept is None or self.kept[0] != marks:
            self.kept = marks, self._make()
        return self.kept[1]

    def _make(self) -> nn.Module:
        values = local_parameters(self.operator, self.group)

        def replace(name: str, value: torch.Tensor) -> torch.Tensor:
            if name in self.filters and not isinstance(value, DTensor):
                return rows_of(values[name], self.filters[name], self.operator.channels, self.chosen)
            return values[name]

        part = with_channels(self.operator, len(self.chosen), replace)
        for name in ("forward", "on_this_process"):  # those of the whole operator, which ask for this part
            vars(part).pop(name, None)
        return part


def can_be_divided(rows: int, filters: int, channels: int, parts: int) -> bool:
    """Whether a `DTensor` can hold the rows of a parameter, those of each filter apart, next to their channels."""
    return are_whole_groups(rows, filters, channels, parts) and (filters == 1 or channels % parts == 0)


def mark(tensor: torch.Tensor) -> tuple:
    """What differs when a tensor has another value."""
    return tensor.data_ptr(), tensor.dtype, None if tensor.is_inference() else tensor._version


def local_parameters(module: nn.Module, group) -> dict[str, torch.Tensor]:
    """What this process has of the parameters of a module. Gradients of those that are not divided will be added."""
    values = dict(module.named_parameters(remove_duplicate=False))
    shared = {name: value for name, value in values.items() if not isinstance(value, DTensor)}
    if torch.is_grad_enabled() and any(value.requires_grad for value in shared.values()):
        shared = dict(zip(shared, SumOfGradients.apply(group, *shared.values()), strict=True))
    return {name: local(value) for name, value in (values | shared).items()}


class OperatorStyle(TensorParallelLayer):
    """The style of an operator, see `Part`."""

    def install_forward(self, module: nn.Module, mesh) -> nn.Module:
        """Divide the parameters of an operator, and let it compute the channels of this process alone."""
        part = Part(module, mesh)
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
HEAD_PLAN = {"lm_head": "colwise_gather_output"}

# A plan names styles, and transformers looks them up in its table.
ALL_PARALLEL_STYLES.register("tnn_operator", OperatorStyle())
ALL_PARALLEL_STYLES.register("tnn_norm", NormStyle())
