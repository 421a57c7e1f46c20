"""Packed rows in a graph of torch.compile: where documents begin, and their product, as custom operators.

The shapes of a graph cannot depend on where documents begin. The operators make the padded batches of `packing.py`
when the graph runs, so one graph serves all documents, and rows of one document too.
"""

import torch

from ..extensions import extensions
from ..packing import find_starts, mask_of_tokens, padded_batches
from .product import NAMESPACE, by_channel, convolution, convolution_gradients, like


@torch.library.custom_op(
    f"{NAMESPACE}::document_starts",
    mutates_args=(),
    schema="(Tensor tokens, Tensor? attention_mask, Tensor? position_ids, Tensor? seq_idx, Tensor? cu_seq_lens_q) "
    "-> Tensor",
)
def document_starts(tokens, attention_mask, position_ids, seq_idx, cu_seq_lens_q):
    """The `starts` of `Documents`."""
    return find_starts(tokens, mask_of_tokens(attention_mask, tokens), position_ids, seq_idx, cu_seq_lens_q)[0]


@document_starts.register_fake
def _(tokens, attention_mask, position_ids, seq_idx, cu_seq_lens_q):
    return torch.empty(tokens.shape[:2], dtype=torch.bool, device="cpu")


@torch.library.custom_op(
    f"{NAMESPACE}::document_convolution",
    mutates_args=(),
    schema="(Tensor x, Tensor kernel, SymInt first, Tensor starts, str implementation) -> Tensor",
)
def document_convolution(x, kernel, first, starts, implementation):
    """Entries `first` and later of the convolution of each document of `x` `(B, L, D)` with `kernel` `(D, K)`."""

    def product(part, _):
        kept = lags_within(kernel, first, part.shape[1])
        return convolution(part, kernel[:, kept], first - kept.start, implementation)

    return by_channel(padded_batches(starts, None, x.device).apart(product, x)) if x.numel() else like(x)


@torch.library.custom_op(
    f"{NAMESPACE}::document_convolution_gradients",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor kernel, SymInt first, Tensor starts, str implementation, bool want_x, "
    "bool want_kernel) -> (Tensor, Tensor)",
)
def document_convolution_gradients(gradient, x, kernel, first, starts, implementation, want_x, want_kernel):
    """The gradients of `x` and of the kernel. One that is not wanted has no entries."""
    kernel_gradient = kernel.new_zeros(kernel.shape if want_kernel else 0)
    if x.numel() == 0:
        return like(x) if want_x else x.new_empty(0), kernel_gradient
    batches, parts = padded_batches(starts, None, x.device), []
    for pair in zip(batches.split(gradient), batches.split(x), strict=True):
        kept = lags_within(kernel, first, pair[0].shape[1])
        given = (*pair, kernel[:, kept], first - kept.start, implementation, want_x, want_kernel)
        part, found = convolution_gradients(*given)
        parts.append(part)
        if want_kernel:
            kernel_gradient[:, kept] += found
    return by_channel(batches.join(parts, x.shape[:2])) if want_x else x.new_empty(0), kernel_gradient


@document_convolution.register_fake
def _(x, kernel, first, starts, implementation):
    return like(x)


@document_convolution_gradients.register_fake
def _(gradient, x, kernel, first, starts, implementation, want_x, want_kernel):
    kernel_gradient = torch.empty_like(kernel, memory_format=torch.contiguous_format)
    return like(x) if want_x else x.new_empty(0), kernel_gradient if want_kernel else kernel.new_empty(0)


def lags_within(kernel: torch.Tensor, first: int, length: int) -> slice:
    """The taps of `kernel` `(D, K)` that a document of `length` tokens meets. `first` is that of lag 0."""
    return slice(max(0, first - length + 1), min(kernel.shape[1], first + length))


def save(ctx, inputs, output):
    x, kernel, ctx.first, starts, ctx.implementation = inputs
    ctx.save_for_backward(x, kernel, starts)


def backward(ctx, gradient):
    x, kernel, starts = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:2]
    operator = getattr(torch.ops, NAMESPACE).document_convolution_gradients
    found = operator(by_channel(gradient), x, kernel, ctx.first, starts, ctx.implementation, *wanted)
    found = (one if wanted_one else None for one, wanted_one in zip(found, wanted, strict=True))
    return *found, None, None, None


document_convolution.register_autograd(backward, setup_context=save)


def starts_in_graph(tokens, attention_mask, position_ids, seq_idx, cu_seq_lens_q):
    """The `starts` of `packing.Documents`, as one node of a graph."""
    operator = getattr(torch.ops, NAMESPACE).document_starts
    return operator(tokens.detach(), attention_mask, position_ids, seq_idx, cu_seq_lens_q)


def convolve_documents(v, kernel, first, starts, implementation):
    """The product of each document, as one node of a graph."""
    return getattr(torch.ops, NAMESPACE).document_convolution(by_channel(v), kernel, first, starts, implementation)


extensions.register(document_starts=starts_in_graph, convolve_documents=convolve_documents)
