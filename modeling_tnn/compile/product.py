"""The convolution as one operation of a recorded graph, for torch.compile. Inductor has no code for complex numbers.

    y = (k * x)[first .. first + L - 1]                                                                     (1)

B batch, L length, D channels, K taps, F transform length.

While torch.compile records, (1) is one node with a custom operator, and its backward pass is another one. The
activations and the mask around it stay PyTorch's own operations, which the compiler fuses with what is next to them.
When the graph runs, the operator computes as the uncompiled code does, with windows for the length at hand, so one
graph serves all lengths. The gradient of `x` is (1) with the taps in reverse and K - 1 - first.

The operators take and give `(B, L, D)`, channel by channel in memory. Where something else comes in, the graph has a
copy, which the compiler fuses with what computes it.

In a graph of torch.export a product is such an operator only if the caller asks for it (`keep_products`).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import transformers.modeling_outputs  # noqa: F401 - exported programs have the classes of outputs in them

from ..extensions import extensions
from ..kernels.choice import KERNELS, choose
from ..kernels.fallback import attempt
from ..numerics import check_implementation, is_exported, is_transformed, next_fast_len
from ..toeplitz_fused import (
    Gate,
    GatedConvolution,
    Windows,
    is_response,
    lay_windows,
    mask_out,
    single_window,
    window_gradients,
)

# Programs of torch.export name operators by it.
NAMESPACE = "modeling_tnn"


_kept = threading.local()  # torch.export with strict=True can read it, and no ContextVar


@contextmanager
def keep_products() -> Iterator[None]:
    """Let torch.export record each Toeplitz product as one operator, as torch.compile does, instead of as transforms.

    A process that loads the program must import this package, which defines the operator, and the product is then
    chosen for the device at hand. It changes nothing for torch.onnx.export and torch.jit.trace.

    Example:
        with keep_products():
            program = torch.export.export(model, (), {"input_ids": ids})
    """
    before, _kept.products = getattr(_kept, "products", False), True
    try:
        yield
    finally:
        _kept.products = before


def keeps_products() -> bool:
    """Whether a graph is recorded in which products are custom operators: by torch.compile, or in `keep_products`."""
    if not torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed():
        return False
    return not is_exported() or (getattr(_kept, "products", False) and not torch.onnx.is_in_onnx_export())


def windows_of(x: torch.Tensor, kernel: torch.Tensor, first: int) -> Windows:
    """The layout of `x` `(D, B, L)` for taps `(D, K)` or a response `(2, D, F/2 + 1)`."""
    if is_response(kernel):
        return single_window(2 * (kernel.shape[2] - 1), first)
    length, taps = x.shape[2], kernel.shape[1]
    return lay_windows(length, taps, first, next_fast_len(length + max(first, taps - 1 - first)))


def is_tiled(implementation: str, x: torch.Tensor, kernel: torch.Tensor) -> bool:
    """Whether the Triton kernels compute the product of `x` `(D, B, L)`."""
    if is_response(kernel):
        return False
    return choose(implementation, x.permute(1, 2, 0), kernel.shape[1], kernel.dtype) == "triton"


@torch.library.custom_op(
    f"{NAMESPACE}::convolution",
    mutates_args=(),
    schema="(Tensor x, Tensor kernel, SymInt first, str implementation) -> Tensor",
)
def convolution(x, kernel, first, implementation):
    """Equation (1) for `x` `(B, L, D)`."""
    if x.numel() == 0:
        return like(x)
    x = channel_major(x)
    if is_tiled(implementation, x, kernel):
        from ..kernels.triton import TiledConvolution

        return TiledConvolution.apply(x, kernel, None, None, None, first).permute(1, 2, 0)
    return GatedConvolution.apply(x, kernel, None, None, None, windows_of(x, kernel, first)).permute(1, 2, 0)


@torch.library.custom_op(
    f"{NAMESPACE}::convolution_gradients",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor kernel, SymInt first, str implementation, bool want_x, "
    "bool want_kernel) -> (Tensor, Tensor)",
)
def convolution_gradients(gradient, x, kernel, first, implementation, want_x, want_kernel):
    """The gradients of `x` and of the kernel. One that is not wanted has no entries."""
    gradient, x, wanted = channel_major(gradient), channel_major(x), (want_x, want_kernel)
    if x.numel() == 0:
        found = torch.empty_like(x), torch.zeros_like(kernel)
    elif is_tiled(implementation, x, kernel):
        found = by_tiles(gradient, x, kernel, first, wanted)
    else:
        found = by_windows(gradient, x, kernel, first, wanted)
    x_gradient = found[0].permute(1, 2, 0) if want_x else x.new_empty(0)
    return x_gradient, found[1].contiguous() if want_kernel else kernel.new_empty(0)


def by_windows(gradient, x, kernel, first: int, wanted: tuple[bool, bool]) -> tuple:
    """The gradients of `x` and of the kernel as the fused product has them, each None unless wanted."""
    inputs = (gradient, x, kernel, None, None, None, None)
    return window_gradients(*inputs, windows_of(x, kernel, first), (*wanted, False))


def by_tiles(gradient, x, kernel, first: int, wanted: tuple[bool, bool]) -> tuple:
    """The same by the Triton kernels."""
    from ..kernels.triton import KERNELS as TRITON
    from ..kernels.triton import tile_gradients

    inputs = (gradient, x, kernel, None, None, None, None)
    by_kernels = partial(tile_gradients, *inputs, first, (*wanted, False))
    return attempt(TRITON, by_kernels, partial(by_windows, gradient, x, kernel, first, wanted))


@convolution.register_fake
def _(x, kernel, first, implementation):
    return like(x)


@convolution_gradients.register_fake
def _(gradient, x, kernel, first, implementation, want_x, want_kernel):
    return like(x) if want_x else x.new_empty(0), kernel.new_empty(kernel.shape if want_kernel else 0)


def channel_major(x: torch.Tensor) -> torch.Tensor:
    """`x` `(B, L, D)` as `(D, B, L)` without gaps."""
    return x.permute(2, 0, 1).contiguous()


def by_channel(x: torch.Tensor) -> torch.Tensor:
    """`x` `(B, L, D)`, channel by channel in memory."""
    return channel_major(x).permute(1, 2, 0)


def like(x: torch.Tensor) -> torch.Tensor:
    """A new tensor of the shape of `x` `(B, L, D)`, channel by channel in memory."""
    return x.new_empty(x.shape[2], x.shape[0], x.shape[1]).permute(1, 2, 0)


def save(ctx, inputs, output):
    x, kernel, ctx.first, ctx.implementation = inputs
    ctx.save_for_backward(x, kernel)


def backward(ctx, gradient):
    wanted = ctx.needs_input_grad[:2]
    operator = getattr(torch.ops, NAMESPACE).convolution_gradients
    found = operator(by_channel(gradient), *ctx.saved_tensors, ctx.first, ctx.implementation, *wanted)
    return *(one if wanted_one else None for one, wanted_one in zip(found, wanted, strict=True)), None, None


convolution.register_autograd(backward, setup_context=save)


def recorded_convolution(x: torch.Tensor, kernel: torch.Tensor, first: int, implementation: str) -> torch.Tensor:
    """Equation (1) for `x` `(B, L, D)`, as one node of a graph.

    If a module of this name is imported again, the newest operator counts.
    """
    return getattr(torch.ops, NAMESPACE).convolution(by_channel(x), kernel, first, implementation)


def gated_recorded(v: torch.Tensor, kernel: torch.Tensor, first: int, gate: Gate, implementation: str) -> torch.Tensor:
    """The product in a graph of torch.compile, which fuses the gate with what is next to it.

    The gate is computed as `(D, B, L)`, the order of its memory. The compiler lays results out in the order of their
    dimensions, and would copy one of `(B, L, D)` for the next matrix product.
    """
    x = v.permute(2, 0, 1)
    x = mask_out(x if gate.act is None else gate.act(x), gate.mask)
    y = recorded_convolution(x.permute(1, 2, 0), kernel, first, implementation)
    if gate.u is None:
        return y
    return (gate.act(gate.u.permute(2, 0, 1)) * y.permute(2, 0, 1)).permute(1, 2, 0)


def find_product(implementation: str, v: torch.Tensor, kernel: torch.Tensor):
    """The function that computes the product of `v` `(B, L, D)` with taps `(D, K)` or a response in place of ours.

    It has the arguments of `triton_product`. None for the eager and the fused product.
    """
    if implementation != "eager" and keeps_products():
        check_implementation(implementation)
        return partial(gated_recorded, implementation=implementation)
    if is_response(kernel) or v.numel() == 0:
        return None
    return KERNELS.get(choose(implementation, v, kernel.shape[1], kernel.dtype))


extensions.register(find_product=find_product, keeps_products=keeps_products)
