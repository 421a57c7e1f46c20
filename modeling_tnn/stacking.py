"""The kernels of all layers at once, from parameters stacked over the layers.

    K = f(theta_1), .., f(theta_N)  =  vmap(f)(stack(theta_1, .., theta_N))

N layers, f the kernel of an operator as a function of its parameters, theta_n those of layer n. A kernel depends on
the parameters alone, so all kernels can be computed before the first layer. On an accelerator a position encoder takes
a third of the launches of a layer; stacked, all encoders take those of one. The parameters stay in their layers.
"""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from transformers.utils.generic import maybe_autocast

from .numerics import is_fused, is_on_host, is_plain

PACKAGE = __name__.rpartition(".")[0]

ACTIVATIONS = ("torch.nn.modules.", "transformers.activations")

PLAIN = (bool, int, float, str, tuple)

# Attributes of an operator that differ from layer to layer, and that no kernel depends on.
OF_THE_LAYER = {"layer_idx", "refill_phase"}

# Numbers in all kernels together. Beyond, arithmetic takes longer than launches, and the kernels take memory.
LARGEST = 2**27


def kernels_of_layers(layers: Sequence[nn.Module], hidden_states: torch.Tensor) -> Sequence:
    """The kernels of the layers of a model for `hidden_states` `(B, L, d)`; None for each that must make its own.

    On the CPU each layer makes its own, which takes less time there (measured).
    """
    apart, length, device = [None] * len(layers), hidden_states.shape[1], hidden_states.device
    if is_on_host(hidden_states) or len(layers) < 2 or not all(is_ours(one) and is_ours(one.gtu) for one in layers):
        return apart
    operators = [layer.gtu.tno for layer in layers]
    # A layer whose activations are computed again computes its kernel again too.
    recomputed = any(layer.gradient_checkpointing and layer.training for layer in layers)
    if recomputed or not are_alike(operators, device) or not is_fused(operators[0].implementation):
        return apart
    if len(layers) * length * operators[0].channels > LARGEST:
        return apart
    with maybe_autocast(device_type=device.type, enabled=False):
        return operators[0].kernels_of_layers(operators, length, device)


def stacked(modules: Sequence[nn.Module], function: Callable[[nn.Module], torch.Tensor | tuple]) -> list:
    """`function(module)` of each of several modules that are alike, in one go."""
    parameters = [torch.stack(group) for group in zip(*map(own_parameters, modules), strict=True)]
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(torch.Tensor.contiguous)  # else each layer would copy its part of a transpose
    results = torch.vmap(lambda given: function(with_parameters(modules[0], iter(given))))(parameters)
    if isinstance(results, tuple):
        return list(zip(*(part.unbind() for part in results), strict=True))
    return list(results.unbind())


def own_parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters of a module in the order of `with_parameters`."""
    yield from (one for one in module._parameters.values() if one is not None)
    for child in module._modules.values():
        yield from own_parameters(child)


def with_parameters(module: nn.Module, parameters: Iterator[torch.Tensor]) -> nn.Module:
    """A shallow copy with other parameters. The module stays as it is, because another thread may be using it."""
    own = {name: None if one is None else next(parameters) for name, one in module._parameters.items()}
    children = {name: with_parameters(child, parameters) for name, child in module._modules.items()}
    twin = copy.copy(module)
    vars(twin).update(_parameters=own, _modules=children)
    return twin


def are_alike(modules: Sequence[nn.Module], device: torch.device) -> bool:
    """Whether modules on `device` differ in the values of their parameters alone, and run no foreign code."""
    first, *others = modules
    # PyTorch and transformers define the activations; an adapter or a quantizer puts in classes of its own.
    known = is_ours(first) or (type(first).__module__.startswith(ACTIVATIONS) and not first._parameters)
    if not (known and all(is_plain(one) and not one._buffers for one in modules)):
        return False
    here = all(one is None or one.device == device for one in first._parameters.values())
    if not (here and all(have_same_form(first, one) for one in others)):
        return False
    levels = zip(*(one._modules.values() for one in modules), strict=True)
    return all(are_alike(children, device) for children in levels)


def is_ours(module: nn.Module) -> bool:
    """Whether this package defines the class."""
    return type(module).__module__.startswith(f"{PACKAGE}.")


def have_same_form(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules are of one class with the same settings, children and kinds of parameters."""
    if type(a) is not type(b) or list(a._modules) != list(b._modules) or kinds(a) != kinds(b):
        return False
    ours, theirs = ({name: x for name, x in vars(one).items() if is_setting(name)} for one in (a, b))
    return ours.keys() == theirs.keys() and all(is_same(ours[name], theirs[name]) for name in ours)


def kinds(module: nn.Module) -> list[tuple]:
    """What two parameters must share to be stacked."""
    parameters = module._parameters.items()
    return [(name, *(() if p is None else (p.shape, p.dtype, p.device, p.requires_grad))) for name, p in parameters]


def is_setting(name: str) -> bool:
    """Whether a kernel may depend on the attribute called `name`."""
    return not name.startswith("_") and name not in OF_THE_LAYER


def is_same(a: object, b: object) -> bool:
    """Whether two settings are the same. Of objects without a plain value, only one is the same as itself."""
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)
