"""The convolution as one operation of a recorded graph, for torch.compile. Inductor has no code for complex numbers.

    y = (k * x)[first .. first + L - 1]                                                                     (1)

B batch, L length, D channels, K taps, F transform length.

While torch.compile records, (1) is one node with a custom operator, and its backward pass is another one. The
activations and the mask around it stay PyTorch's own operations, which the compiler fuses with what is next to them.
When the graph runs, the operator computes as the uncompiled code does, with windows for the length at hand, so one
graph serves all lengths. The gradient of `x` is (1) with the taps in reverse and K - 1 - first.

Remote code is a copy of this package under another name. A copy registers operators under a name of its own.
"""

import re

import torch

from .gating import NO_GATE
from .numerics import next_fast_len
from .toeplitz_choice import KERNELS, choose
from .toeplitz_fused import Windows, fused_convolution, is_response, lay_windows, single_window, window_gradients

NAMESPACE = re.sub(r"\W", "_", __name__.rpartition(".")[0])


def windows_of(x: torch.Tensor, kernel: torch.Tensor, first: int) -> Windows:
    """The layout of `x` `(B, L, D)` for taps `(D, K)` or a response `(2, D, F/2 + 1)`."""
    if is_response(kernel):
        return single_window(2 * (kernel.shape[2] - 1), first)
    length, taps = x.shape[1], kernel.shape[1]
    return lay_windows(length, taps, first, next_fast_len(length + max(first, taps - 1 - first)))


def computing(implementation: str, x: torch.Tensor, kernel: torch.Tensor):
    """The product for GPUs that computes, or None for the fused one."""
    chosen = "fused" if is_response(kernel) else choose(implementation, x, kernel.shape[1], kernel.dtype)
    return KERNELS.get(chosen)


def channel_major(x: torch.Tensor) -> torch.Tensor:
    """`x` `(B, L, D)`, channel by channel in memory. A graph needs to know the layout of each result."""
    return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def like(x: torch.Tensor) -> torch.Tensor:
    """A new tensor of the shape of `x` `(B, L, D)`, channel by channel in memory."""
    return x.new_empty(x.shape[2], x.shape[0], x.shape[1]).permute(1, 2, 0)


@torch.library.custom_op(
    f"{NAMESPACE}::convolution",
    mutates_args=(),
    schema="(Tensor x, Tensor kernel, SymInt first, str implementation) -> Tensor",
)
def convolution(x, kernel, first, implementation):
    """Equation (1) for `x` `(B, L, D)`."""
    if x.numel() == 0:
        return like(x)
    product = computing(implementation, x, kernel)
    if product is not None:
        return channel_major(product(x, kernel, first, NO_GATE))
    return channel_major(fused_convolution(x, kernel, windows_of(x, kernel, first)))


@torch.library.custom_op(
    f"{NAMESPACE}::convolution_gradients",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor kernel, SymInt first, str implementation, bool want_x, "
    "bool want_kernel) -> (Tensor, Tensor)",
)
def convolution_gradients(gradient, x, kernel, first, implementation, want_x, want_kernel):
    """The gradients of `x` and of the kernel. One that is not wanted has no entries."""
    x_gradient, kernel_gradient = (
        like(x) if want_x else x.new_empty(0),
        kernel.new_zeros(kernel.shape if want_kernel else 0),
    )
    if x.numel() == 0:
        return x_gradient, kernel_gradient
    product = computing(implementation, x, kernel)
    if product is not None and want_x:
        x_gradient = channel_major(product(gradient, kernel.flip(1), kernel.shape[1] - 1 - first, NO_GATE))
    inputs = (gradient.permute(2, 0, 1), x.permute(2, 0, 1), kernel, None, None, None, None)
    wanted = (want_x and product is None, want_kernel, False)
    found = window_gradients(*inputs, windows_of(x, kernel, first), wanted)
    x_gradient = channel_major(found[0].permute(1, 2, 0)) if wanted[0] else x_gradient
    return x_gradient, found[1] if want_kernel else kernel_gradient


@convolution.register_fake
def _(x, kernel, first, implementation):
    return like(x)


@convolution_gradients.register_fake
def _(gradient, x, kernel, first, implementation, want_x, want_kernel):
    kernel_gradient = torch.empty_like(kernel, memory_format=torch.contiguous_format)
    return like(x) if want_x else x.new_empty(0), kernel_gradient if want_kernel else kernel.new_empty(0)


def save(ctx, inputs, output):
    x, kernel, ctx.first, ctx.implementation = inputs
    ctx.save_for_backward(x, kernel)


def backward(ctx, gradient):
    wanted = ctx.needs_input_grad[:2]
    operator = getattr(torch.ops, NAMESPACE).convolution_gradients
    found = operator(gradient, *ctx.saved_tensors, ctx.first, ctx.implementation, *wanted)
    return *(one if wanted_one else None for one, wanted_one in zip(found, wanted, strict=True)), None, None


convolution.register_autograd(backward, setup_context=save)


def recorded_convolution(x: torch.Tensor, kernel: torch.Tensor, first: int, implementation: str) -> torch.Tensor:
    """Equation (1), as one node of a graph. If a module of this name is imported again, the newest operator counts."""
    return getattr(torch.ops, NAMESPACE).convolution(x, kernel, first, implementation)
