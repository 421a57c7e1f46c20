"""The convolution as one operation of a recorded graph, for torch.compile. Inductor has no code for complex numbers.

    y = (k * x)[first .. first + L - 1],    in packed rows of each document alone                           (1)

B batch, L length, D channels, K taps.

While torch.compile records, (1) is one node with a custom operator, and its backward pass is another one. Activations
and mask stay PyTorch's own operations, which the compiler fuses. When the graph runs, the operator computes as the
uncompiled code does, with windows for the length at hand and the padded batches of `packing.py`: one graph serves all
lengths and documents. The operators take and give `(D, B, L)` without gaps.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import transformers.modeling_outputs  # noqa: F401 - exported programs have the classes of outputs in them
from torch.library import custom_op

from ..extensions import extensions
from ..kernels.choice import kernel_product
from ..kernels.fallback import PRODUCTS, attempt
from ..numerics import check_implementation, is_exported, is_transformed
from ..packing import find_starts, mask_of_tokens, padded_batches
from ..toeplitz_fused import Gate, fused_convolution, mask_out, window_gradients, windows_of

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


def lags_within(kernel: torch.Tensor, first: int, length: int) -> slice:
    """The taps of `kernel` `(D, K)` that a document of `length` tokens meets. `first` is that of lag 0."""
    return slice(max(0, first - length + 1), min(kernel.shape[1], first + length))


@custom_op("modeling_tnn::convolution", mutates_args=())
def convolution(
    x: torch.Tensor, kernel: torch.Tensor, first: int, starts: torch.Tensor | None, implementation: str
) -> torch.Tensor:
    """Equation (1) for `x` `(D, B, L)`. Documents begin at `starts` `(B, L)`, see `packing.Documents`."""

    def product(part, _):
        met = lags_within(kernel, first, part.shape[1])
        return convolved(part, kernel[:, met], first - met.start, implementation)

    v = x.permute(1, 2, 0)
    if starts is None:
        y = convolved(v, kernel, first, implementation)
    else:
        y = padded_batches(starts, None, x.device).map_documents(product, v)
    return y.permute(2, 0, 1).contiguous()


def convolved(v, kernel, first: int, implementation: str) -> torch.Tensor:
    """The product of rows `(B, L, D)` without documents."""
    product = kernel_product(implementation, v, kernel)
    if product is None:
        return fused_convolution(v, kernel, windows_of(v, kernel, first))
    return product(v, kernel, first)


@custom_op(
    "modeling_tnn::convolution_gradients",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor kernel, SymInt first, Tensor? starts, str implementation, bool[] wanted)"
    " -> (Tensor, Tensor)",
)
def convolution_gradients(dy, x, kernel, first, starts, implementation, wanted):
    """The gradients of `x` `(D, B, L)` and of the kernel. One that is not `wanted` has no entries."""
    g, v = dy.permute(1, 2, 0), x.permute(1, 2, 0)
    if starts is None:
        v_gradient, kernel_gradient = gradients_of(g, v, kernel, first, implementation, wanted)
    else:
        batches, parts, kernel_gradient = padded_batches(starts, None, x.device), [], torch.zeros_like(kernel)
        for pair in zip(batches.split(g), batches.split(v), strict=True):
            met = lags_within(kernel, first, pair[0].shape[1])
            part, found = gradients_of(*pair, kernel[:, met], first - met.start, implementation, wanted)
            parts.append(part)
            if wanted[1]:
                kernel_gradient[:, met] += found
        v_gradient = batches.join(parts, v.shape[:2]) if wanted[0] else None
    x_gradient = v_gradient.permute(2, 0, 1).contiguous() if wanted[0] else x.new_empty(0)
    return x_gradient, kernel_gradient.contiguous() if wanted[1] else kernel.new_empty(0)


def gradients_of(gradient, v, kernel, first: int, implementation: str, wanted: Sequence[bool]) -> tuple:
    """The gradients of rows `v` `(B, L, D)` without documents, and of the kernel, each None unless wanted."""
    inputs = [x.permute(2, 0, 1).contiguous() for x in (gradient, v)] + [kernel, None, None, None, None]
    compute = partial(window_gradients, *inputs, windows_of(v, kernel, first), (*wanted, False))
    if kernel_product(implementation, v, kernel) is not None:
        from ..kernels.triton import tile_gradients

        by_tiles = partial(tile_gradients, *inputs, first, (*wanted, False))
        compute = partial(attempt, PRODUCTS, by_tiles, compute)
    x_gradient, kernel_gradient, _ = compute()
    return x_gradient.permute(1, 2, 0) if wanted[0] else None, kernel_gradient


@custom_op("modeling_tnn::document_starts", mutates_args=())
def document_starts(
    tokens: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor
) -> torch.Tensor:
    """The `starts` of `packing.Documents`."""
    return find_starts(tokens, mask_of_tokens(attention_mask, tokens), position_ids)[0]


@custom_op("modeling_tnn::limit_documents", mutates_args=())
def limit_documents(starts: torch.Tensor, most: int, field: str) -> torch.Tensor:
    """A copy of `starts` `(B, L)`, after a check that no document has more than `most` tokens."""
    longest = max(length for _, length in padded_batches(starts, None, starts.device).shapes)
    if longest > most:
        raise ValueError(f"`{field}` must be at least {longest}, the length of the longest document, got {most}")
    return starts.clone()


@convolution.register_fake
def _(x, kernel, first, starts, implementation):
    return x.new_empty(x.shape)


@convolution_gradients.register_fake
def _(dy, x, kernel, first, starts, implementation, wanted):
    return tuple(one.new_empty(one.shape if want else 0) for one, want in zip((x, kernel), wanted, strict=True))


@document_starts.register_fake
def _(tokens, attention_mask, position_ids):
    return torch.empty(tokens.shape[:2], dtype=torch.bool, device="cpu")


@limit_documents.register_fake
def _(starts, most, field):
    return torch.empty_like(starts)


def save(ctx, inputs, output):
    x, kernel, ctx.first, starts, ctx.implementation = inputs
    ctx.save_for_backward(x, kernel, starts)


def backward(ctx, gradient):
    (x, kernel, starts), wanted = ctx.saved_tensors, list(ctx.needs_input_grad[:2])
    operator = torch.ops.modeling_tnn.convolution_gradients
    found = operator(gradient.contiguous(), x, kernel, ctx.first, starts, ctx.implementation, wanted)
    return *(one if want else None for one, want in zip(found, wanted, strict=True)), None, None, None


convolution.register_autograd(backward, setup_context=save)


# If this module is imported again, the newest operators count: they are looked up by name.
def recorded_convolution(v, kernel, first: int, starts: torch.Tensor | None, implementation: str) -> torch.Tensor:
    """Equation (1) for `v` `(B, L, D)`, as one node of a graph."""
    x = v.permute(2, 0, 1).contiguous()
    return torch.ops.modeling_tnn.convolution(x, kernel, first, starts, implementation).permute(1, 2, 0)


def gated_recorded(v: torch.Tensor, kernel: torch.Tensor, first: int, gate: Gate, implementation: str) -> torch.Tensor:
    """The product in a graph. A compiler would copy a gate computed as `(B, L, D)` for the next matrix product."""
    x = v.permute(2, 0, 1)
    x = mask_out(x if gate.act is None else gate.act(x), gate.mask)
    y = recorded_convolution(x.permute(1, 2, 0), kernel, first, None, implementation)
    if gate.u is None:
        return y
    return (gate.act(gate.u.permute(2, 0, 1)) * y.permute(2, 0, 1)).permute(1, 2, 0)


def find_product(implementation: str, v: torch.Tensor, kernel: torch.Tensor) -> Callable | None:
    """The product of `v` `(B, L, D)` with taps `(D, K)` or a response, unless it is the eager or the fused one."""
    if implementation != "eager" and keeps_products():
        check_implementation(implementation)
        return partial(gated_recorded, implementation=implementation)
    return kernel_product(implementation, v, kernel)


extensions.register(find_product=find_product, keeps_products=keeps_products)
extensions.register(
    document_starts=lambda tokens, *given: torch.ops.modeling_tnn.document_starts(tokens.detach(), *given),
    convolve_documents=recorded_convolution,
    limit_documents=lambda *given: torch.ops.modeling_tnn.limit_documents(*given),
)
