"""Linear layers on sequences, and the memory layout of their inputs and results.

B batch, L length, d and D sizes of an input and a result, N = B L.

Linear layers are of the class `torch.nn.Linear` alone, the one that quantizers replace. The kernels that they put in
may read an input as if it were contiguous (bitsandbytes on CPUs with AVX512-BF16). So the layout of inputs and results
is the work of the functions here, around the layer.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .numerics import is_exported, is_plain, is_traced


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer is a `torch.nn.Linear` and nothing else: no adapter, quantizer, shard or hook."""
    return type(layer) is nn.Linear and is_plain(layer)


def apply_linear(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`layer(x)`, `(..., d)` to `(..., D)`. A layer that is not plain gets a contiguous input."""
    # Not asked in a graph, where the answer would be a condition on its lengths. Elsewhere it is the faster question.
    ordered = not is_traced() and x.is_contiguous()
    return layer(x if ordered or is_plain_linear(layer) else x.contiguous())


def apply_channel_major(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`layer(x)`, `(..., L, d)` to `(..., L, D)`, whose result lies channel by channel in memory.

    W x^T costs the same as x W^T. A Toeplitz product on other memory would spend half of its time (measured) in
    strided copies. So the result of a layer that is not plain is copied.
    """
    if is_exported() or x.shape[-2] == 1:  # one token has no sequence
        return apply_linear(layer, x)
    if is_plain_linear(layer):
        return channel_major(x, layer.weight, layer.bias)
    y = apply_linear(layer, x)
    return y.flatten(0, -2).t().contiguous().t().view(y.shape)


def channel_major(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product x W^T + b, `(..., L, d)` to `(..., L, D)`, channel by channel in memory."""
    columns = x.reshape(-1, x.shape[-1]).t()  # (d, N)
    y = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)  # (D, N)
    return y.t().view(*x.shape[:-1], len(weight))


def apply_together(apply: Callable, layers: Sequence[nn.Module], x: torch.Tensor, joined: tuple | None = None):
    """`apply(layer, x)` for each of several layers, with biases or without; in the graph of a step, by one product.

    `joined` are weight and bias of all layers as one, if they lie in memory so, see `compile/static_cache.py`.
    """
    recorded = is_traced() and not is_exported() and (joined or (torch.is_grad_enabled() and x.shape[-2] > 1))
    if not (recorded and all(map(is_plain_linear, layers))):
        return [apply(layer, x) for layer in layers]
    if joined is None:
        # In their own dtype: autocast converts the result, in one launch, and one its gradient. Elsewhere, the copy of
        # the weights would take longer than it saves.
        biases = [layer.bias for layer in layers]
        joined = torch.cat([layer.weight for layer in layers]), None if biases[0] is None else torch.cat(biases)
    product = channel_major if apply is apply_channel_major and x.shape[-2] > 1 else nn.functional.linear
    return product(x, *joined).split([layer.out_features for layer in layers], dim=-1)
