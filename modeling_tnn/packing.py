"""Packed documents: rows that hold several texts one after the other. No text may see another.

A Toeplitz product mixes all positions of a row. So the documents of a packed batch are computed as rows of padded
batches, and their outputs are put back in place. Padding is exact, so packing is exact too. Documents whose lengths
share the next power of two form one padded batch, so that less than half of the computed positions are padding.

B rows of L tokens, T = B L tokens in all; a padded batch has N documents of at most M tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from .padding import check_attention_mask


@dataclass(frozen=True)
class DocumentBatch:
    """A padded batch of documents of similar lengths.

    Attributes:
        index: `(N, M)`, the positions of their tokens among all T. Entries after the end of a document are arbitrary.
        real: `(N, M)`, False after the end of a document.
        slots: the places of the real entries among all N M.
    """

    index: torch.Tensor
    real: torch.Tensor
    slots: torch.Tensor

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The entries of `x` `(B, L, ...)` for these documents, `(N, M, ...)`."""
        return x.flatten(0, 1)[self.index]


def split_packed(
    tokens: torch.Tensor | None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    together: bool = False,
) -> list[DocumentBatch] | None:
    """The documents of packed rows, or None if every row is one text.

    A document begins at the start of a row, where the position of a real token is 0 again, where `seq_idx` changes,
    and at each offset of `cu_seq_lens_q`. Other positions have no effect: those of an ordinary text with any offset
    and padding, and those of a row without any position above 0.

    Args:
        tokens: `(B, L)` ids or `(B, L, d)` embeddings.
        attention_mask: `(B, past + L)`, 0 at padding.
        position_ids: `(B, L)` or `(1, L)`.
        seq_idx: `(B, L)` or `(1, L)`, the number of the document of each token.
        cu_seq_lens_q: the offsets of the documents among all tokens, from 0 to T.
        together: whether all documents form one padded batch, for a batch norm, which sees all tokens.

    Raises:
        TypeError: an argument is not a tensor of integers.
        ValueError: a shape is wrong, or the offsets do not span the tokens.
    """
    boundaries = given_boundaries(tokens, position_ids, seq_idx, cu_seq_lens_q)
    # Without values, on the meta device, no boundary can be found.
    known = [*boundaries.values(), *([] if attention_mask is None else [attention_mask])]
    if not boundaries or tokens.shape[1] <= 1 or any(tensor.is_meta for tensor in known):
        return None
    starts = find_starts(tokens, attention_mask, position_ids, seq_idx, cu_seq_lens_q)
    return batches_of_similar_length(starts, tokens.device, together) if starts[:, 1:].any() else None


def given_boundaries(
    tokens: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Those that are given, by their names, after a check of their types."""
    boundaries = {"position_ids": position_ids, "seq_idx": seq_idx, "cu_seq_lens_q": cu_seq_lens_q}
    boundaries = {name: given for name, given in boundaries.items() if given is not None}
    for name, given in boundaries.items():
        _check_integers(name, given, tokens)
    return boundaries


def find_starts(
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
) -> torch.Tensor:
    """The first tokens of documents, `(B, L)` on the CPU. The arguments are those of `split_packed`."""
    shape = tokens.shape[:2]
    starts = torch.zeros(shape, dtype=torch.bool)  # (B, L), on the host, where the documents are found
    if position_ids is not None:
        position_ids = _as_rows("position_ids", position_ids, shape)
        real = _real_tokens(attention_mask, tokens, position_ids.device)
        starts |= _restarts(position_ids, real).cpu()
    if seq_idx is not None:
        seq_idx = _as_rows("seq_idx", seq_idx, shape)
        starts[:, 1:] |= (seq_idx[:, 1:] != seq_idx[:, :-1]).cpu()
    if cu_seq_lens_q is not None:
        starts |= _offsets_as_starts(cu_seq_lens_q.cpu(), shape)
    starts[:, 0] = True
    return starts


def check_one_document(tokens: torch.Tensor | None, attention_mask: torch.Tensor | None, **kwargs):
    """Check that each row holds one document, for heads that give one answer per row.

    Args:
        kwargs: may hold the boundaries `position_ids`, `seq_idx` and `cu_seq_lens_q`.

    Raises:
        ValueError: a row holds several documents.
    """
    boundaries = {name: kwargs.get(name) for name in ("position_ids", "seq_idx", "cu_seq_lens_q")}
    if split_packed(tokens, attention_mask, **boundaries) is not None:
        raise ValueError(
            "A row must be one document for a classification, got several (by `position_ids`, `seq_idx` or "
            "`cu_seq_lens_q`). Pad instead of packing."
        )


def forward_packed(
    forward: Callable[..., BaseModelOutputWithPast],
    documents: list[DocumentBatch],
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    **kwargs,
) -> BaseModelOutputWithPast:
    """The outputs of `forward` for each document alone, put together as rows `(B, L, d)`.

    Args:
        forward: a model, `forward(input_ids, attention_mask, inputs_embeds=...)`.
        kwargs: further arguments of `forward`.

    Raises:
        ValueError: the weights of attention are wanted, which have another shape for each batch of documents.
    """
    outputs = []
    attention_mask = check_attention_mask(attention_mask, inputs_embeds if input_ids is None else input_ids, 0)
    for batch in documents:
        real = batch.real if attention_mask is None else batch.real & batch.take(attention_mask)
        ids, embeds = (None if x is None else batch.take(x) for x in (input_ids, inputs_embeds))
        outputs.append(forward(ids, real, inputs_embeds=embeds, use_cache=False, return_dict=True, **kwargs))
        if outputs[-1].attentions:
            raise ValueError(
                "`output_attentions` must be False if a row holds several documents (by `position_ids`, `seq_idx` or "
                "`cu_seq_lens_q`), got True. Pad instead of packing."
            )
    shape = (inputs_embeds if input_ids is None else input_ids).shape[:2]
    last = pack([output.last_hidden_state for output in outputs], documents, shape)
    hidden_states = None
    if outputs[0].hidden_states is not None:
        layers = zip(*(output.hidden_states for output in outputs), strict=True)
        hidden_states = tuple(None if parts[0] is None else pack(parts, documents, shape) for parts in layers)
    return BaseModelOutputWithPast(last_hidden_state=last, hidden_states=hidden_states)


def pack(parts: Sequence[torch.Tensor], documents: list[DocumentBatch], shape: torch.Size) -> torch.Tensor:
    """The rows `(B, L, d)` from the `parts` `(N, M, d)` of `documents`, for `shape` `(B, L)`."""
    pairs = zip(parts, documents, strict=True)
    # The last layers can be on another device, if `device_map` divides the model.
    outputs = torch.cat([part.flatten(0, 1)[batch.slots.to(part.device)] for part, batch in pairs])  # (T, d)
    places = torch.cat([batch.index.flatten()[batch.slots] for batch in documents])  # (T,)
    return outputs[places.argsort().to(outputs.device)].unflatten(0, shape)


def _check_integers(name: str, given: torch.Tensor, tokens: torch.Tensor):
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"`{name}` must be a tensor of integers, got {type(given).__name__}")
    if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
        raise TypeError(f"`{name}` must hold integers, got {given.dtype}")
    if given.is_meta and not tokens.is_meta:
        raise ValueError(f"`{name}` must be on the device of the tokens, {tokens.device}, or on the CPU, got meta")


def _as_rows(name: str, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if values.dim() != 2 or values.shape[1] != shape[1] or values.shape[0] not in (1, shape[0]):
        raise ValueError(f"`{name}` must have shape (B, L) = {tuple(shape)} or (1, L), got {tuple(values.shape)}")
    return values.expand(shape)


def _real_tokens(attention_mask: torch.Tensor | None, tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    shape = tokens.shape[:2]
    if attention_mask is not None:
        past_length = max(0, attention_mask.shape[-1] - shape[1]) if attention_mask.dim() else 0
        attention_mask = check_attention_mask(attention_mask, tokens, past_length)
    return torch.ones(shape, dtype=torch.bool, device=device) if attention_mask is None else attention_mask.to(device)


def _restarts(position_ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Where the position of a real token is 0 again, `(B, L)`; padding may have any position."""
    first = real.cumsum(dim=1) == 1
    rises = (real & (position_ids > 0)).any(dim=1, keepdim=True)  # (B, 1)
    return real & ~first & rises & (position_ids == 0)


def _offsets_as_starts(cu_seq_lens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    total = shape.numel()
    grows = cu_seq_lens.dim() == 1 and len(cu_seq_lens) > 1 and bool((cu_seq_lens.diff() > 0).all())
    if not grows or cu_seq_lens[0] != 0 or cu_seq_lens[-1] != total:
        raise ValueError(
            f"`cu_seq_lens_q` must grow from 0 to the number of tokens, B * L = {total}, got {cu_seq_lens.tolist()}"
        )
    starts = torch.zeros(total, dtype=torch.bool)
    starts[cu_seq_lens[:-1].long()] = True
    return starts.unflatten(0, shape)


def batches_of_similar_length(
    starts: torch.Tensor, device: torch.device, together: bool = False
) -> list[DocumentBatch]:
    """The padded batches on `device` of documents that begin at `starts` `(B, L)`; one batch if `together`."""
    first = starts.flatten().nonzero()[:, 0]  # of each document
    lengths = torch.diff(first, append=first.new_tensor([starts.numel()]))
    octaves = torch.zeros(len(lengths)) if together else lengths.double().log2().ceil()
    batches = []
    for octave in octaves.unique():
        chosen = octaves == octave
        offset = torch.arange(int(lengths[chosen].max()))
        real = offset < lengths[chosen, None]
        index = first[chosen, None] + offset
        parts = (index.clamp(max=starts.numel() - 1), real, real.flatten().nonzero()[:, 0])
        batches.append(DocumentBatch(*(part.to(device, non_blocking=True) for part in parts)))
    return batches
