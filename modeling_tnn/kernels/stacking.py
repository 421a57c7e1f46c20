"""The kernels of all layers at once, from parameters stacked over the layers.

    K = f(theta_1), .., f(theta_N)  =  vmap(f)(stack(theta_1, .., theta_N))

N layers, f the kernel of an operator as a function of its parameters, theta_n those of layer n. On an accelerator a
position encoder takes a third of the launches of a layer; stacked, all encoders take those of one.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from math import isqrt

import torch
from torch import nn
from transformers.utils.generic import maybe_autocast

from ..extensions import extensions
from ..mixers import TnnS4Mixer
from ..numerics import is_fused, is_on_host, is_plain, is_traced, must_be_eager
from ..tno import LayerContext, ToeplitzOperator, kernel_arguments
from ..tno_auto import TwoAxisOperator
from ..tno_rtf import RtfOperator
from ..tno_s4d import DiagonalOperator
from .loss import projected_dtype

# Modules of PyTorch and transformers that define activations and their containers.
ACTIVATIONS = tuple(f"torch.nn.modules.{name}" for name in ("activation", "container", "linear"))
ACTIVATIONS += ("transformers.activations",)

PLAIN = (bool, int, float, str, tuple, dict)

# Attributes of an operator that differ from layer to layer, and that no kernel depends on.
OF_THE_LAYER = {"layer_idx", "refill_phase"}

# Numbers in all kernels together. Beyond, arithmetic takes longer than launches, and the kernels take memory.
LARGEST = 2**27


def kernels_of_layers(layers: Sequence[nn.Module], hidden_states: torch.Tensor, context: LayerContext) -> list:
    """The kernels of layers for `hidden_states` `(B, L, d)`; None for attention, and for each that makes its own.

    A region makes the kernels of packed rows itself, and each process those of its channels. On the CPU it takes less
    time if each layer makes its own (measured).
    """
    in_regions = context.documents is not None and any(layer.training and layer.regions for layer in layers)
    if context.past_length != 0 or in_regions or context.layout is not None or is_on_host(hidden_states):
        return [None] * len(layers)
    hidden_states = hidden_states if context.documents is None else hidden_states[:, : context.documents.longest]
    mixing = [layer for layer in layers if getattr(layer, "attention", None) is None]
    kernels = dict(zip(mixing, kernels_together(mixing, hidden_states), strict=False))
    return [kernels.get(layer) for layer in layers]


def kernels_together(layers: Sequence[nn.Module], hidden_states: torch.Tensor) -> Sequence:
    """The kernels of layers without attention in one go, none if each of them must make its own."""
    if must_be_eager() or len(layers) < 2 or not all(is_ours(layer) and is_ours(layer.mixer) for layer in layers):
        return ()
    operators = [layer.mixer.tno for layer in layers]
    # A layer whose activations are computed again computes its kernel again too.
    recomputed = any(layer.gradient_checkpointing and layer.training for layer in layers)
    if recomputed or not are_alike(operators) or not is_fused(operators[0].implementation):
        return ()
    dtype = hidden_states.dtype if isinstance(layers[0].mixer, TnnS4Mixer) else projected_dtype(hidden_states)
    like, first = hidden_states.new_empty(*hidden_states.shape[:2], 0, dtype=dtype), operators[0]
    taps = min(kernel_arguments(first, like)[0], first.kernel_length() or hidden_states.shape[1])
    if len(layers) * first.channels * taps * (1 if first.causal else 2) > LARGEST:
        return ()
    with maybe_autocast(device_type=hidden_states.device.type, enabled=False):
        return kernels_of_operators(operators, like)


def kernels_of_operators(operators: Sequence[ToeplitzOperator], v: torch.Tensor) -> list:
    """The `kernel_of` each of operators that are alike, in one go, for inputs like `v` `(B, L, ...)`."""
    first = operators[0]
    if isinstance(first, TwoAxisOperator):
        axes, line = ([one.rows for one in operators], [one.columns for one in operators]), v[:, : isqrt(v.shape[1])]
        return list(zip(*(kernels_of_operators(axis, line) for axis in axes), strict=True))
    if isinstance(first, (RtfOperator, DiagonalOperator)):
        # One operator with all filters: its fused function saves only its inputs, which `vmap` would not.
        kernels = joined(operators, first.channel_parameters).kernel_of(v.shape[1], v.device)
        return list(kernels.unflatten(0, (len(operators), -1)).unbind())
    names = [f"operator.{name}" for name, _ in named_tensors(first)]
    groups = dict(zip(names, zip(*map(own_tensors, operators), strict=True), strict=True))
    compute = partial(first.regions, stacked) if first.regions is not None and first.training else stacked
    kernels = compute(KernelOf(first), groups, *kernel_arguments(first, v))
    if isinstance(kernels, tuple):
        return list(zip(*(part.unbind() for part in kernels), strict=True))
    return list(kernels.unbind())


class KernelOf(nn.Module):
    """The method `kernel_of` of an operator as the forward pass of a module."""

    def __init__(self, operator: nn.Module):
        super().__init__()
        self.operator = operator

    def forward(self, *given) -> torch.Tensor | tuple:
        return self.operator.kernel_of(*given)


def stacked(module: KernelOf, groups: dict[str, Sequence[torch.Tensor]], *given) -> torch.Tensor | tuple:
    """The kernels of operators that are alike, stacked: `module` with each of their tensors, which are `groups`."""
    parameters = {name: torch.stack(group) for name, group in groups.items()}
    if is_traced():  # torch.compile cannot record the copy of a module
        return torch.vmap(lambda one: torch.func.functional_call(module, one, given))(parameters)
    for parameter in parameters.values():
        if parameter.requires_grad:
            # Some gradients are transposes, of which each layer would copy its part.
            parameter.register_hook(lambda gradient: gradient.contiguous().flatten().view(gradient.shape))
    return torch.vmap(lambda one: with_tensors(module.operator, iter(one.values())).kernel_of(*given))(parameters)


def joined(modules: Sequence[nn.Module], filters: dict[str, int]) -> nn.Module:
    """One module with the rows of several that are alike, by the number of `filters` of each parameter."""
    names = [name for name, one in modules[0]._parameters.items() if one is not None]
    groups = zip(names, zip(*map(own_tensors, modules), strict=True), strict=True)
    rows = (torch.cat([one.unflatten(0, (filters[name], -1)) for one in group], dim=1) for name, group in groups)
    return with_tensors(modules[0], (one.flatten(0, 1) for one in rows))


def named_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module with their names, in the order of `with_tensors`."""
    own = (*module._parameters.items(), *module._buffers.items())
    yield from ((prefix + name, one) for name, one in own if one is not None)
    for name, child in module._modules.items():
        yield from named_tensors(child, f"{prefix}{name}.")


def own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of `named_tensors`."""
    return (one for _, one in named_tensors(module))


def with_tensors(module: nn.Module, tensors: Iterator[torch.Tensor]) -> nn.Module:
    """A shallow copy with other parameters and buffers. The module stays as it is: another thread may be using it."""
    own = (module._parameters, module._buffers)
    parameters, buffers = ({name: None if x is None else next(tensors) for name, x in one.items()} for one in own)
    children = {name: with_tensors(child, tensors) for name, child in module._modules.items()}
    twin = copy.copy(module)
    vars(twin).update(_parameters=parameters, _buffers=buffers, _modules=children)
    return twin


def are_alike(modules: Sequence[nn.Module]) -> bool:
    """Whether modules differ in the values of their tensors alone, and run no foreign code."""
    first, *others = modules
    # An adapter or a quantizer puts in classes of its own.
    known = is_ours(first) or (type(first).__module__.startswith(ACTIVATIONS) and not kinds_of(first))
    if not (known and all(map(is_plain, modules))):
        return False
    kinds, children = kinds_of(first), first._modules.keys()
    settings = [(name, x) for name, x in vars(first).items() if name[0] != "_" and name not in OF_THE_LAYER]
    for one in others:
        theirs = vars(one)
        if type(one) is not type(first) or theirs.keys() != vars(first).keys() or one._modules.keys() != children:
            return False
        pairs = [(x, theirs[name]) for name, x in settings]
        same = all(x is y or (type(x) is type(y) and isinstance(x, PLAIN) and x == y) for x, y in pairs)
        if kinds_of(one) != kinds or not same:
            return False
    return all(are_alike([one._modules[name] for one in modules]) for name in children)


def kinds_of(module: nn.Module) -> dict[str, tuple | None]:
    """Return the properties of parameters that two modules must share to be stacked."""
    own = (*module._parameters.items(), *module._buffers.items())
    return {name: None if x is None else (x.shape, x.dtype, x.requires_grad, x.device) for name, x in own}


def is_ours(module: nn.Module) -> bool:
    """Whether this package defines the class."""
    return type(module).__module__.startswith("modeling_tnn.")


extensions.register(kernels_of_layers=kernels_of_layers)
