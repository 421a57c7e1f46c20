"""Packed rows in a graph of torch.compile, whose shapes cannot depend on where documents begin.

B rows of L tokens, D channels, K taps.

Only Toeplitz products mix tokens, and everything else in a block sees one token at a time. So a graph has the rows as
they are, and its products are custom operators, which find the documents when they run and multiply each alone. The
graph is the same one for all documents, and for rows of one document.
"""

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache

from .layer_types import has_attention
from .numerics import compute_dtype, keeps_products
from .packing import DocumentBatch, batches_of_similar_length, find_starts, given_boundaries
from .padding import check_attention_mask
from .toeplitz_recorded import NAMESPACE, by_channel, convolution, convolution_gradients, like


class Documents(NamedTuple):
    """The documents of packed rows in a graph.

    Attributes:
        starts: `(B, L)` of booleans on the CPU, True at the first token of each document.
        mask: `(B, L)` of booleans, False at padding; None if there is none.
        device: of the tokens.
    """

    starts: torch.Tensor
    mask: torch.Tensor | None
    device: torch.device

    def count(self) -> torch.Tensor:
        """The number of real tokens of the document up to each token, itself included, `(B, L)`."""
        starts = self.starts.to(self.device)
        real = torch.ones_like(starts) if self.mask is None else self.mask
        total = real.cumsum(dim=1)
        before = torch.where(starts, total - real.long(), 0).cummax(dim=1).values
        return total - before

    def positions(self) -> torch.Tensor:
        """The position of each token from the first real one of its document, `(B, L)`."""
        return (self.count() - 1).clamp(min=0)

    def origins(self) -> torch.Tensor:
        """The place among all B L of the first real token of the document, `(B, L)`; of padding before it, its own."""
        count, place = self.count(), torch.arange(self.starts.numel(), device=self.device).view(self.starts.shape)
        first = (count == 1) if self.mask is None else (count == 1) & self.mask
        return torch.where(count == 0, place, torch.where(first, place, 0).cummax(dim=1).values)

    def spread(self, places: int) -> "Documents":
        """The documents of rows in which each token has so many places. None of them is padding."""
        starts = torch.nn.functional.pad(self.starts[..., None], (0, places - 1)).flatten(1)  # (B, places L)
        return Documents(starts, None, self.device)

    def convolve(self, v: torch.Tensor, kernel: torch.Tensor, causal: bool, implementation: str) -> torch.Tensor:
        """The product of each document of `v` `(B, L, D)` with a causal kernel `(D, K)` or one of 2R - 1 lags."""
        kernel = kernel.to(compute_dtype(torch.promote_types(v.dtype, kernel.dtype)))
        first = 0 if causal else (kernel.shape[1] - 1) // 2
        operator = getattr(torch.ops, NAMESPACE).document_convolution
        return operator(by_channel(v), kernel, first, self.starts, implementation)


def documents_of_graph(
    model,
    past_key_values: Cache | None,
    use_cache: bool | None,
    tokens: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    *boundaries: torch.Tensor | None,
) -> Documents | None:
    """The documents of packed rows while torch.compile records `model`, a `TnnModel`; None where rows must be split.

    They must be if a cache is used, which rows of one document may have, and if batch norm sees the tokens of a batch.

    Args:
        use_cache: as in `TnnModel.forward`; training returns no cache unless it is True.
        boundaries: `position_ids`, `seq_idx` and `cu_seq_lens_q`, as for `packing.split_packed`.

    Raises:
        TypeError, ValueError: as `packing.split_packed`.
    """
    if not keeps_products() or all(one is None for one in boundaries) or tokens.shape[1] <= 1:
        return None
    config = model.config
    cached = (config.use_cache and not model.training) if use_cache is None else use_cache
    if config.causal and (cached or past_key_values is not None):
        return None
    if model.training and config.norm_type == "batchnorm":
        return None
    if not all(layer.gtu.tno.records_documents() for layer in model.layers if layer.gtu is not None):
        return None
    if has_attention(config) and "flash" in config._attn_implementation:
        return None  # it takes no mask that separates documents
    given_boundaries(tokens, *boundaries)
    mask = check_attention_mask(attention_mask, tokens, past_length=0)
    starts = getattr(torch.ops, NAMESPACE).document_starts(tokens.detach(), attention_mask, *boundaries)
    return Documents(starts, mask, tokens.device)


@torch.library.custom_op(
    f"{NAMESPACE}::document_starts",
    mutates_args=(),
    schema="(Tensor tokens, Tensor? attention_mask, Tensor? position_ids, Tensor? seq_idx, Tensor? cu_seq_lens_q) "
    "-> Tensor",
)
def document_starts(tokens, attention_mask, position_ids, seq_idx, cu_seq_lens_q):
    """The first tokens of documents."""
    return find_starts(tokens, attention_mask, position_ids, seq_idx, cu_seq_lens_q)


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
    result, rows = like(x), channel_rows(x)
    for batch in batches_of_similar_length(starts, x.device) if x.numel() else ():
        kept = lags_within(kernel, first, batch.index.shape[1])
        y = convolution(take(rows, batch), kernel[:, kept], first - kept.start, implementation)
        put(y, batch, result)
    return result


@torch.library.custom_op(
    f"{NAMESPACE}::document_convolution_gradients",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor kernel, SymInt first, Tensor starts, str implementation, bool want_x, "
    "bool want_kernel) -> (Tensor, Tensor)",
)
def document_convolution_gradients(gradient, x, kernel, first, starts, implementation, want_x, want_kernel):
    """The gradients of `x` and of the kernel. One that is not wanted has no entries."""
    x_gradient = like(x) if want_x else x.new_empty(0)
    kernel_gradient = kernel.new_zeros(kernel.shape if want_kernel else 0)
    g_rows, x_rows = channel_rows(gradient), channel_rows(x)
    for batch in batches_of_similar_length(starts, x.device) if x.numel() else ():
        kept = lags_within(kernel, first, batch.index.shape[1])
        given = (take(g_rows, batch), take(x_rows, batch), kernel[:, kept], first - kept.start, implementation)
        found = convolution_gradients(*given, want_x, want_kernel)
        if want_x:
            put(found[0], batch, x_gradient)
        if want_kernel:
            kernel_gradient[:, kept] += found[1]
    return x_gradient, kernel_gradient


@document_convolution.register_fake
def _(x, kernel, first, starts, implementation):
    return like(x)


@document_convolution_gradients.register_fake
def _(gradient, x, kernel, first, starts, implementation, want_x, want_kernel):
    kernel_gradient = torch.empty_like(kernel, memory_format=torch.contiguous_format)
    return like(x) if want_x else x.new_empty(0), kernel_gradient if want_kernel else kernel.new_empty(0)


def channel_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` `(B, L, D)` as `(D, B L)`."""
    return x.permute(2, 0, 1).flatten(1)


def take(rows: torch.Tensor, batch: DocumentBatch) -> torch.Tensor:
    """The entries of `rows` `(D, B L)` for a batch of documents, `(N, M, D)`; 0 after the end of a document."""
    return rows[:, batch.index].masked_fill_(~batch.real, 0).permute(1, 2, 0)


def put(y: torch.Tensor, batch: DocumentBatch, result: torch.Tensor):
    """Write the real entries of `y` `(N, M, D)` to their places in `result` `(B, L, D)`, which lies as `like` says."""
    places = batch.index.flatten()[batch.slots]
    channel_rows(result).index_copy_(1, places, channel_rows(y).index_select(1, batch.slots))


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
