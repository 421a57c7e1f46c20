"""One vector for each text of any length, read in chunks that continue a cache. B batch, L length, d hidden size."""

import torch
from torch import nn

from ..cache_tnn import CACHE, cache_argument
from ..inputs import POOLINGS, pool_tokens
from ..numerics import compute_dtype


@torch.no_grad()
def embed_texts(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *,
    pooling: str = "mean", chunk_size: int = 4096,
) -> torch.Tensor:  # fmt: skip
    """One vector for each text of any length, `(B, L)` to `(B, d)`, without gradients.

    Memory is that of a chunk and the decoding states, which do not grow but for attention and kernels without an end.

    Args:
        model: a causal `TnnModel`.
        input_ids: `(B, L)` token ids; `input_values` of a model with `config.input_channels`.
        attention_mask: `(B, L)`, 0 at padding, on any side. Without it all tokens are real.
        pooling: "mean" over the hidden states of real tokens, or the "last" of them.
        chunk_size: number of tokens of each row that are read at once.

    Raises:
        ValueError: the model is bidirectional, the pooling is unknown, the chunk size is below 1, or as for `forward`.
    """
    model.config.require("causal", model.config.causal, "True to read in chunks")
    if pooling not in POOLINGS or chunk_size < 1:
        allowed = f"`pooling` must be one of {', '.join(POOLINGS)}, and `chunk_size` at least 1"
        raise ValueError(f"{allowed}, got {pooling!r} and {chunk_size}")
    name = "input_ids" if model.embed_values is None else "input_values"
    pooled, seen, cache = None, 0, None
    for start in range(0, max(1, input_ids.shape[1]), chunk_size):
        part = input_ids[:, start : start + chunk_size]
        mask = None if attention_mask is None else attention_mask[:, : start + part.shape[1]]
        outputs = model(**{name: part}, attention_mask=mask, use_cache=True, **cache_argument(cache))
        states, cache = outputs.last_hidden_state, outputs[CACHE]
        found = pool_tokens(pooling, states.to(compute_dtype(states.dtype)), mask)  # (B, d)
        real = states.new_ones(part.shape[:2]) if mask is None else mask[:, start:].ne(0)
        count = real.sum(dim=1, keepdim=True, dtype=found.dtype).to(found.device)  # (B, 1)
        seen = seen + count
        share = count / seen.clamp(min=1) if pooling == "mean" else count.clamp(max=1)
        pooled = torch.lerp(pooled if start else torch.zeros_like(found), found, share)
    return pooled.to(states.dtype)
