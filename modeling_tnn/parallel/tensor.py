"""Tensor parallelism: the plan of `TnnConfig`, and four styles in it that transformers does not have.

    tnn_operator          a Toeplitz operator: each process has the parameters and the products of its channels
    tnn_sliced_operator   the same for S4, where every process has the inputs of all channels
    tnn_filters           Hyena's input projection: each process has its channels of each of the three filters
    tnn_norm              a norm over channels that are divided: processes add their sums of squares

P processes, D channels of a mixer, of which each process has D / P. `u_proj` and `v_proj`, or `in_proj` and the short
convolution of Hyena, compute the channels of this process, the operator mixes each along the sequence without
communication, and `o_proj`, or `low_rank`, adds the parts of all processes. What is not divided (the hidden layers of
a position encoder, poles that all channels share) lies on every process, and its gradient is the sum over processes.

A divided parameter is a `DTensor`: loading reads the rows of this process, and saving gathers those of all.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from ..configuration_tnn import GTU, HYENA, MULTIHYENA, S4, TOEPLITZ
from ..extensions import extensions
from ..norms import bound_gradient
from ..numerics import compute_dtype
from .channels import LocalOperator, channels_of, local, total

ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
MIXERS = {
    GTU: {"u_proj": "colwise", "v_proj": "colwise", "tno": "tnn_operator", "norm": "tnn_norm"},
    HYENA: {"in_proj": "tnn_filters", "short": "tnn_operator", "tno": "tnn_operator", "norm": "tnn_norm"},
    S4: {"tno": "tnn_sliced_operator"},
}
MIXERS[MULTIHYENA] = MIXERS[HYENA]
GLU = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}

# PyTorch 2.11 cannot gather a `_StridedShard` over a single dimension, for a gradient or a saved folder. So with it,
# parameters of several filters lie on every process.
DIVIDES_FILTERS = torch.__version__ >= "2.12"


def tensor_plan(config) -> dict[str, str]:
    """Return the plan of a model with this configuration."""
    mixer = MIXERS[config.toeplitz_mixer] if TOEPLITZ in config.layer_types else None
    adds = "low_rank" if config.toeplitz_mixer in (HYENA, MULTIHYENA) and config.hyena_rank else "o_proj"
    skips = any(layer.hyena_skip for layer in config.layer_configs)
    parts = {
        "attention": ATTENTION if {*config.layer_types} - {TOEPLITZ} else {},
        "mixer": mixer | {adds: "rowwise"} | ({"skip": "tnn_operator"} if skips else {}) if mixer else {},
        "glu": GLU if config.use_glu else {},
    }
    return {f"layers.*.{part}.{name}": style for part, styles in parts.items() for name, style in styles.items()}


def add_gradients(x: torch.Tensor, mesh) -> torch.Tensor:
    """Return `x`, which every process has, with a gradient that is added over the processes."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def sum_gradients(tensors: Sequence[torch.Tensor], mesh) -> list[torch.Tensor]:
    """Return the same tensors, whose gradients are added over the processes, in one message."""
    flat = add_gradients(torch.cat([one.flatten() for one in tensors]), mesh)
    parts = flat.split([one.numel() for one in tensors])
    return [part.view_as(one).to(one.dtype) for part, one in zip(parts, tensors, strict=True)]


def divide(module: nn.Module, name: str, mesh, filters: int = 1):
    """Divide the rows of a parameter over `mesh`, those of each filter apart."""
    parameter, (owner, _, leaf) = module.get_parameter(name), name.rpartition(".")
    placement = Shard(0) if filters == 1 else _StridedShard(0, split_factor=filters)
    rows = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    setattr(module.get_submodule(owner), leaf, nn.Parameter(rows, requires_grad=parameter.requires_grad))


def can_be_divided(rows: int, filters: int, channels: int, parts: int) -> bool:
    """Return whether a `DTensor` can have the rows of a parameter, those of each filter apart, by their channels."""
    groups, apart = rows // filters, filters == 1 or (DIVIDES_FILTERS and channels % parts == 0)
    return apart and (groups == channels or groups % parts == 0)


def local_parameters(module: nn.Module, mesh) -> dict[str, torch.Tensor]:
    """Return the parameters of a module in this process. Gradients of those that are not divided will be added."""
    values = dict(module.named_parameters(remove_duplicate=False))
    shared = {name: value for name, value in values.items() if not isinstance(value, DTensor)}
    if torch.is_grad_enabled() and any(value.requires_grad for value in shared.values()):
        shared = dict(zip(shared, sum_gradients(shared.values(), mesh), strict=True))
    return {name: local(value) for name, value in (values | shared).items()}


def shares_of(module: nn.Module, mesh) -> list[range]:
    """Return the channels of each process, as `Shard` divides them."""
    channels = range(channels_of(module))
    size = -(-len(channels) // mesh.size())
    return [channels[index * size :][:size] for index in range(mesh.size())]


class OperatorStyle(TensorParallelLayer):
    def install_forward(self, module: nn.Module, mesh) -> nn.Module:
        """Divide the parameters of an operator, and let it compute the channels of this process alone."""
        channels = shares_of(module, mesh)
        if getattr(module, "group_size", 1) > 1 and module.channels % mesh.size():
            raise ValueError(
                f"`num_filter_groups` must be a multiple of {mesh.size()} processes, got {module.channels}"
            )
        own = LocalOperator(module, channels, mesh.get_local_rank(), partial(local_parameters, module, mesh))
        for name, parameter in dict(module.named_parameters()).items():
            filters = module.channel_parameters.get(name)
            if filters is not None and can_be_divided(len(parameter), filters, channels_of(module), mesh.size()):
                divide(module, name, mesh, filters)
        module.local_operator = own
        module.forward = lambda *args, **kwargs: own().forward(*args, **kwargs)
        return module


class FiltersStyle(OperatorStyle):
    def install_forward(self, module: nn.Module, mesh) -> nn.Module:
        """Divide the rows of a linear layer, and let it compute the channels of this process from the whole input."""
        module.channels, module.filters, module.channel_parameters = module.out_features, 3, {"weight": 3, "bias": 3}
        project = super().install_forward(module, mesh).forward
        module.forward = lambda x: project(add_gradients(x, mesh))
        return module


class SlicedOperatorStyle(OperatorStyle):
    def install_forward(self, module: nn.Module, mesh) -> nn.Module:
        """Divide an operator, and give it its channels of the whole input."""
        mix, own = super().install_forward(module, mesh).forward, shares_of(module, mesh)[mesh.get_local_rank()]

        def forward(v: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            channels = slice(own.start * module.group_size, own.stop * module.group_size)
            return mix(add_gradients(v, mesh)[..., channels], *args, **kwargs)

        module.forward = forward
        return module


# Norms of channels `(..., D / P)` of this process; `total` adds over the channels of all.
def rms_norm(norm: nn.Module, x: torch.Tensor, given: dict, total: Callable) -> torch.Tensor:
    # The least number keeps the derivative of the root finite. Beside eps it is nothing.
    rms = total(x.square()).clamp(min=torch.finfo(x.dtype).tiny).sqrt() / norm.size**0.5
    y = bound_gradient(x / (rms + norm.eps), x, rms, norm.eps) * given.get("weight", 1)
    return y * torch.sigmoid(given["gate"] * x) if "gate" in given else y


def scale_norm(norm: nn.Module, x: torch.Tensor, given: dict, total: Callable) -> torch.Tensor:
    return x * torch.rsqrt(total(x.square()) / norm.size + norm.eps) * given["weight"]


def layer_norm(norm: nn.Module, x: torch.Tensor, given: dict, total: Callable) -> torch.Tensor:
    size = norm.normalized_shape[0]
    centred = x - total(x) / size
    return centred * torch.rsqrt(total(centred.square()) / size + norm.eps) * given["weight"] + given["bias"]


# By the names of their classes: a copy of the package that came with a checkpoint has classes of its own.
NORMS = dict.fromkeys(("SimpleRMSNorm", "RMSNorm", "GatedRMSNorm"), rms_norm)
NORMS |= {"ScaleNorm": scale_norm, "RootRMSNorm": scale_norm, "LayerNorm": layer_norm}


class NormStyle(TensorParallelLayer):
    def install_forward(self, module: nn.Module, mesh) -> nn.Module:
        """Divide the parameters of a norm, if it is one, by their channels, and let processes add their statistics."""
        if (compute := NORMS.get(type(module).__name__)) is None:
            return module
        for name, parameter in module.named_parameters():
            if parameter.numel() > 1:
                divide(module, name, mesh)

        def sum_of_channels(x: torch.Tensor) -> torch.Tensor:
            # Every process uses the sum, so the gradients of all are added.
            return total(*sum_gradients([x.sum(-1, keepdim=True)], mesh), mesh)

        def forward(x: torch.Tensor) -> torch.Tensor:
            wide = compute_dtype(x.dtype)
            given = {name: value.to(wide) for name, value in local_parameters(module, mesh).items()}
            return compute(module, x.to(wide), given, sum_of_channels).to(x.dtype)

        module.forward = forward
        return module


extensions.register(tensor_plan=tensor_plan)
ALL_PARALLEL_STYLES.register("tnn_operator", OperatorStyle())
ALL_PARALLEL_STYLES.register("tnn_sliced_operator", SlicedOperatorStyle())
ALL_PARALLEL_STYLES.register("tnn_filters", FiltersStyle())
ALL_PARALLEL_STYLES.register("tnn_norm", NormStyle())
