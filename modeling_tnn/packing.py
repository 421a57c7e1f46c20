"""Packed rows, which hold several documents one after the other. No document may see another.

B rows of L tokens, T = B L tokens in all, D channels, K taps. A padded batch has N documents of at most M tokens, all
padded batches together have S places.

Only mixers see several tokens; everything else in a block acts on each token alone. So a model has the rows as they
are, and a mixer has the documents as entries of padded batches (`Batches`). Padding is exact, so packing is exact too.
Documents whose lengths share the next power of two form one batch, so that less than half of the places are padding.

The shapes of a graph cannot depend on where documents begin. There a product is a custom operator, which makes the
batches when the graph runs: one graph serves all documents, and rows of one document too.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .extensions import extensions
from .inputs import IDS, can_be_read, check_attention_mask, require_tensor, token_positions
from .numerics import compute_dtype, must_be_eager


class Batches(NamedTuple):
    """Padded batches of documents of similar lengths."""

    token: torch.Tensor  # (S,), the number of each place's token among all T; behind the end, of a document's last one
    place: torch.Tensor  # (T,), the place of each token
    inside: torch.Tensor | None  # (S,), False behind the end of a document; None if there are no such places
    real: list[torch.Tensor | None]  # (N, M) for each batch, False also at padding; None if there is no such place
    shapes: list[tuple[int, int]]  # N and M of each batch
    in_order: bool  # whether each token is at its own place

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The entries of `x` `(B, L, D)` for each batch, `(N, M, D)`; 0 behind the end of a document."""
        parts = move(x.flatten(0, 1), self, False).split([count * length for count, length in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def join(self, parts: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """The rows `(B, L, D)` for `shape` `(B, L)` from parts `(N, M, D)`, in the memory layout of the parts."""
        places, *others = (part.flatten(0, 1) for part in parts)
        if others and places.stride(1) == 1:
            places = torch.cat([places, *others])  # (S, D)
        elif others:
            places = torch.cat([part.t() for part in (places, *others)], dim=1).t()
        return move(places, self, True).unflatten(0, shape)

    def map_documents(self, function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """`function(part, real)` of the documents of `x` `(B, L, D)` as batch entries, put together as rows."""
        pairs = zip(self.split(x), self.real, strict=True)
        return self.join([function(part, real) for part, real in pairs], x.shape[:2])


class Move(torch.autograd.Function):
    """From tokens `(T, D)` to places `(S, D)`, or back. Each is the derivative of the other."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, batches: Batches, back: bool) -> torch.Tensor:
        ctx.batches, ctx.back = batches, back
        return gathered(x, batches, back)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return move(gradient, ctx.batches, not ctx.back), None, None


def move(x: torch.Tensor, batches: Batches, back: bool) -> torch.Tensor:
    """`gathered` with a fast derivative, a gather as well."""
    if batches.in_order:
        return x
    return gathered(x, batches, back) if must_be_eager() else Move.apply(x, batches, back)


def gathered(x: torch.Tensor, batches: Batches, back: bool) -> torch.Tensor:
    """The entries of tokens `(T, D)` at places `(S, D)`, 0 behind the end of a document, or back.

    The result has the memory layout of `x`, channel by channel or token by token.
    """
    index = (batches.place if back else batches.token).to(x.device)
    y = x.index_select(0, index) if x.stride(1) == 1 else x.t().gather(1, index.expand(x.shape[1], -1)).t()
    if back or batches.inside is None:
        return y
    return y.mul_(batches.inside.to(x.device, x.dtype)[:, None])


def padded_batches(starts: torch.Tensor, mask: torch.Tensor | None, device: torch.device) -> Batches:
    """The padded batches on `device` of documents that begin at `starts` `(B, L)`; the mask is False at padding."""
    first = starts.flatten().nonzero()[:, 0]  # of each document
    lengths = torch.diff(first, append=first.new_tensor([starts.numel()]))
    octaves = lengths.double().log2().ceil()
    tokens, insides, reals = [], [], []
    for octave in octaves.unique():
        begin, length = (one[octaves == octave, None] for one in (first, lengths))  # (N, 1)
        offset = torch.arange(int(length.max()))
        tokens.append(begin + offset.minimum(length - 1))  # (N, M)
        insides.append(offset < length)
        reals.append(insides[-1] if mask is None else insides[-1] & mask.flatten()[tokens[-1]])
    token, inside = (torch.cat([part.flatten() for part in parts]) for parts in (tokens, insides))
    place = torch.empty(starts.numel(), dtype=torch.long)
    place[token[inside]] = inside.nonzero()[:, 0]
    in_order = torch.equal(token, torch.arange(len(place)))
    token, place = (one.to(device, non_blocking=True) for one in (token, place))
    inside, *reals = (None if one.all() else one.to(device, non_blocking=True) for one in (inside, *reals))
    return Batches(token, place, inside, reals, [tuple(one.shape) for one in tokens], in_order)


class Documents(NamedTuple):
    """The documents of packed rows. Padding before the first real token of a document belongs to the one before."""

    starts: torch.Tensor  # (B, L), on the CPU, True at the first token of a row and the first real one of a document
    mask: torch.Tensor | None  # (B, L), False at padding; None if there is none
    device: torch.device  # that of the tokens
    batches: Batches | None = None  # None in a graph

    @property
    def longest(self) -> int:
        """The length of the longest document, or of a row in a graph."""
        return self.starts.shape[1] if self.batches is None else max(length for _, length in self.batches.shapes)

    def numbers(self, device: torch.device) -> torch.Tensor:
        """The number of the document of each token in its row, `(B, L)`."""
        return self.starts.to(device).cumsum(dim=1)

    def positions(self) -> torch.Tensor:
        """The position of each token from the first real one of its document, `(B, L)`."""
        starts = self.starts.to(self.device)
        real = torch.ones_like(starts) if self.mask is None else self.mask
        return (count_real(starts, real) - 1).clamp(min=0)

    def convolve(self, v: torch.Tensor, kernel: torch.Tensor, causal: bool, implementation: str) -> torch.Tensor:
        """In a graph, the product of each document of `v` `(B, L, D)` with causal taps `(D, K)` or 2R - 1 lags.

        A kernel with fewer rows has one for each group of neighbouring channels.
        """
        if len(kernel) < v.shape[2]:
            kernel = kernel.repeat_interleave(v.shape[2] // len(kernel), dim=0)
        kernel = kernel.to(compute_dtype(torch.promote_types(v.dtype, kernel.dtype)))
        first = 0 if causal else (kernel.shape[1] - 1) // 2
        return extensions.convolve_documents(v, kernel, first, self.starts, implementation)


def count_real(starts: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The number of real tokens of the document up to each token, itself included, `(B, L)`."""
    total = real.cumsum(dim=1)
    return total - torch.where(starts, total - real.long(), 0).cummax(dim=1).values


def documents_of(tokens, attention_mask, position_ids, in_graph: bool = False) -> Documents | None:
    """The documents of packed rows `(B, L)` or `(B, L, d)`, or None if each row is one document.

    A document begins at the start of a row, and where the position of a real token is 0 again. Other positions have no
    effect: those of an ordinary text with any offset and padding, and those of a row without any position above 0.
    `in_graph`: a graph finds the documents when it runs, in rows of one document too.
    """
    if position_ids is None:
        return None
    require_tensor("position_ids", position_ids, "(B, L)", dtypes=IDS)
    if tokens.shape[1] <= 1:
        return None
    if in_graph:
        mask = check_attention_mask(attention_mask, tokens, past_length=0)
        return Documents(extensions.document_starts(tokens, attention_mask, position_ids), mask, tokens.device)
    if len(tokens) == 0 or position_ids.is_meta or getattr(attention_mask, "is_meta", False):  # there are no values
        return None
    mask, device = mask_of_tokens(attention_mask, tokens), tokens.device
    starts, real = find_starts(tokens, mask, position_ids)
    if (starts & real).sum(dim=1).max() <= 1:
        return None
    return Documents(starts, mask, device, padded_batches(starts, None if mask is None else real, device))


def read_bounds(tokens, attention_mask, seq_idx, cu_seq_lens_q) -> torch.Tensor:
    """Bounds of documents, as collators give them, as the positions `(B, L)` from which `documents_of` reads the same.

    The first real token of each document has position 0, all others and the first of a row have 1, so that a row of
    documents of one token has a position above 0.

    Args:
        seq_idx: `(B, L)` or `(1, L)`, the number of the document of each token.
        cu_seq_lens_q: `(N + 1,)`, the first token of each document among all B L, and B L; not read with `seq_idx`.
    """
    shape, count = tokens.shape[:2], tokens.shape[:2].numel()
    if seq_idx is None:
        require_tensor("cu_seq_lens_q", cu_seq_lens_q, "(N + 1,)", 1, IDS)
        if can_be_read(cu_seq_lens_q) and cu_seq_lens_q[-1] != count:
            raise ValueError(f"`cu_seq_lens_q` must end with the number of tokens, {count}, got {cu_seq_lens_q}")
        places = torch.arange(count, device=cu_seq_lens_q.device)
        seq_idx = torch.searchsorted(cu_seq_lens_q.long(), places, right=True).view(shape)
    require_tensor("seq_idx", seq_idx, "(B, L) or (1, L)", dtypes=IDS, shapes=[shape, (1, shape[1])])
    numbers = seq_idx.expand(shape)
    starts = torch.cat([torch.ones_like(numbers[:, :1], dtype=torch.bool), numbers[:, 1:] != numbers[:, :-1]], dim=1)
    mask = mask_of_tokens(attention_mask, tokens)
    real = torch.ones_like(starts) if mask is None else mask.to(starts.device)
    positions = (~real | (count_real(starts, real) != 1)).long()
    positions[:, 0] = 1
    return positions


def positions_of(documents: Documents | None, attention_mask, past_length: int, tokens) -> torch.Tensor:
    """The positions of `tokens` `(B, L, ...)` from the first real one of their document, `(B, L)` or `(1, L)`."""
    return token_positions(attention_mask, past_length, tokens) if documents is None else documents.positions()


def mask_of_tokens(attention_mask: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor | None:
    """The part `(B, L)` of the mask for `tokens` `(B, L, ...)`, or None if all are real."""
    if attention_mask is None:
        return None
    require_tensor("attention_mask", attention_mask, "(B, past + L)", 2)
    return check_attention_mask(attention_mask, tokens, max(0, attention_mask.shape[1] - tokens.shape[1]))


def find_starts(tokens, mask, position_ids) -> tuple[torch.Tensor, torch.Tensor]:
    """The `starts` of `Documents` and the real tokens, `(B, L)` on the CPU. The `mask` is `(B, L)` or None."""
    shape = tokens.shape[:2]
    require_tensor("position_ids", position_ids, "(B, L) or (1, L)", shapes=[shape, (1, shape[1])])
    position_ids = position_ids.cpu().expand(shape)
    real = torch.ones(shape, dtype=torch.bool) if mask is None else mask.cpu()
    # Documents start where the position of a real token is 0 again; padding may have any position.
    rises = (real & (position_ids > 0)).any(dim=1, keepdim=True)  # (B, 1)
    starts = real & rises & (position_ids == 0)
    starts[:, 0] = True
    starts = real & (count_real(starts, real) == 1)
    starts[:, 0] = True
    return starts, real
