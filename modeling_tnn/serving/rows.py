"""Rows of a cache for texts that begin and end at different times: put in, aligned, and counted in bytes.

A Toeplitz product is the same wherever its text stands, and padding is exact in all layers. So texts of different
lengths continue in one batch. Each ends at the last place, and the shorter ones have padding before them:

    padding padding padding a b c          3 tokens
    d e f g h i                            6 tokens, the length of the cache
    padding padding j k l m                4 tokens

In a Toeplitz layer padding is zeros, within the reach of its kernel. Layers of attention keep keys and values of it,
which a mask has to hide.
"""

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ..cache_tnn import TnnCacheLayer, bind_to_config, is_toeplitz, past_length
from ..configuration_tnn import SLIDING, TOEPLITZ
from ..history import write_rows
from .states import bytes_per_channel, compact, forget_first, insert_state_rows

# transformers' own layers whose keys and values can be moved.
OF_ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)


def insert_rows(cache: Cache, other: Cache, rows: list[int]):
    """Give the `rows` of a cache the texts of `other`, which is empty afterwards.

    All rows then have the length of the longest text. The next pass is that of the left-padded batch, so a model with
    attention or positions needs its mask. Continue in one batch what was read in two:

        insert_rows(cache, another, [2, 3])      # cache has two rows, 0 and 1, and gets two more

    Args:
        cache: a dynamic cache of the same model, or an empty one.
        rows: one for each row of `other`: present rows, which are replaced, or the next ones, which are added.

    Raises:
        ValueError: a cache is static or belongs to another model, or there are no such rows.
        NotImplementedError: an operator of the user's own has a recurrence whose rows cannot be moved.
    """
    for one in (cache, other):
        if not all(map(is_movable, one.layers)):
            raise ValueError(
                "`cache` must be a dynamic cache with layers of known kinds, got "
                f"{[type(layer).__name__ for layer in one.layers]}"
            )
    if not cache.layers:
        cache.layers += [type(one)(sliding_window=getattr(one, "sliding_window", None)) for one in other.layers]
        cache.layer_class_to_replicate = other.layer_class_to_replicate
    bind_to_config(cache, cache.layers, other.tnn_fields)
    held, count = rows_of(cache), rows_of(other)
    added = sorted(row for row in rows if row >= held)
    distinct = len(rows) == len(set(rows)) == count and min(rows, default=0) >= 0
    if not distinct or added != list(range(held, held + len(added))):
        raise ValueError(f"`rows` must be {count} different rows below {held}, or the next ones, got {rows}")
    length = max(past_length(cache.layers), past_length(other.layers))
    for layer, new in zip(cache.layers, other.layers, strict=True):
        if is_toeplitz(layer):
            insert_states(layer, new, rows)
        else:
            insert_keys(layer, new, rows, length)


@torch.inference_mode(False)  # later calls write into the state
@torch.no_grad()
def insert_states(layer: TnnCacheLayer, new: TnnCacheLayer, rows: list[int]):
    """`insert_rows` for one Toeplitz layer."""
    for name, other in new.states.items():
        other.build()
        state = layer.states.get(name)
        if state is None:
            layer.lazy_initialization(other.history.buffer)
            state = layer.states[name] = other
            compact(state.recurrence, state)
            continue
        state.build()
        size = state.group_size
        insert_state_rows(state.recurrence, state, other, [row * size + i for row in rows for i in range(size)])
        state.length = max(state.length, other.length)
    new.reset()


def insert_keys(layer: DynamicLayer, new: DynamicLayer, rows: list[int], length: int):
    """`insert_rows` for one layer of attention; `length` is that of the longest text."""
    if not layer.is_initialized:
        layer.lazy_initialization(new.keys, new.values)
        layer.keys, layer.values = new.keys[:0], new.values[:0]
    longest = max(layer.keys.shape[-2], new.keys.shape[-2])
    for name in ("keys", "values"):
        padded = [pad(one, (0, 0, longest - one.shape[-2], 0)) for one in (getattr(layer, name), getattr(new, name))]
        setattr(layer, name, write_rows(padded[0], rows, padded[1]))
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = length
    # `reset` of transformers 5.17 leaves as many keys, all zero.
    new.keys, new.values, new.is_initialized = None, None, False
    new.reset()


def drop_padding(cache: Cache, count: int):
    """Forget the first `count` tokens of all rows, which must be padding in each."""
    for layer in cache.layers if count else ():
        if is_toeplitz(layer):
            for state in layer.states.values():
                forget_first(state, count)
            continue
        length = layer.get_seq_length() - count
        kept = min(length, layer.keys.shape[-2])
        layer.keys, layer.values = layer.keys[..., -kept:, :], layer.values[..., -kept:, :]
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length


def is_movable(layer) -> bool:
    """Whether the rows of a layer can be moved: that of a dynamic cache, which records no past to crop."""
    if is_toeplitz(layer):
        return not layer.is_compileable
    return type(layer) in OF_ATTENTION and not getattr(layer, "record_past", False)


def rows_of(cache: Cache) -> int:
    """The number of texts in a cache."""
    for layer in cache.layers:
        if layer.is_initialized:
            return next(iter(layer.states.values())).rows if is_toeplitz(layer) else len(layer.keys)
    return 0


def bytes_of_text(model: nn.Module, tokens: int) -> int:
    """The most bytes of decoding state of one text of `tokens` tokens, when it is written token by token.

    Args:
        model: a `TnnModel`.

    Raises:
        NotImplementedError: an operator of the user's own has a recurrence that does not tell its size.
    """
    config, total = model.config, 0
    for kind, layer in zip(config.layer_types, model.layers, strict=True):
        if kind == TOEPLITZ:
            for operator in (layer.mixer.tno, *([layer.mixer.short] if hasattr(layer.mixer, "short") else [])):
                width = operator.channels * operator.group_size
                total += width * bytes_per_channel(operator.recurrence(), tokens, model.dtype)
        else:
            kept = min(tokens, config.sliding_window - 1) if kind == SLIDING else tokens
            total += 2 * config.num_key_value_heads * config.head_dim * kept * model.dtype.itemsize
    return total
