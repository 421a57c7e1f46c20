"""Checks of the arguments of the models: tokens, masks, labels, images and keywords.

Also what follows from a mask: alignment, positions and pooling of real tokens.

B batch, L length, d hidden size, C classes or choices, K chosen positions. A mask is `(B, L)`, 0 at padding and
anything else at real tokens.

Every check raises a TypeError for an argument of another kind or dtype, and a ValueError for another shape or value.
Values are checked on the CPU only: on other devices, reading them is a device sync.
"""

from typing import Any

import torch
from transformers.utils import TransformersKwargs

from .numerics import compute_dtype, is_on_host, must_be_eager

# Further arguments that models of transformers accept: options of losses and outputs, and outputs of tokenizers.
# `kwargs`: pipeline stages forward unused arguments under this name.
KEYWORDS = {*TransformersKwargs.__annotations__, "return_dict", "token_type_ids", "cache_position", "kwargs"}

IDS = (torch.int64, torch.int32)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_elsewhere(layer: torch.nn.Module) -> bool:
    """Whether a layer belongs to another stage of a pipeline: an identity is in its place."""
    return isinstance(layer, torch.nn.Identity)


def check_keywords(given: dict[str, Any]):
    """Refuse unknown keyword arguments, which would be ignored silently."""
    for name, value in given.items():
        if name not in KEYWORDS and value is not None:
            raise TypeError(f"`{name}` is not an argument of this model.")


def require_tensor(name: str, value: Any, letters: str, dims=None, dtypes=(), shapes=(), meaning: str = ""):
    """Check that `value` is a tensor: of `dims` dimensions, of one of `shapes` and one of `dtypes`, where given.

    In the error, `letters` describe the shape and `meaning` says where it is from.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"`{name}` must be a tensor of shape {letters}, got {type(value).__name__}")
    found = tuple(value.shape)
    if dims is not None and value.dim() != dims:
        raise ValueError(f"`{name}` must have shape {letters}, got {found}")
    if shapes and found not in shapes:
        raise ValueError(f"`{name}` must have shape {letters} = {tuple(shapes[0])}{meaning}, got {found}")
    if dtypes and value.dtype not in dtypes:
        raise TypeError(f"`{name}` must hold {' or '.join(map(str, dtypes))}, got {value.dtype}")


def require_one(name: str, given: Any, inputs_embeds: Any):
    """Check that either `given`, of this name, or embeddings are given."""
    if (given is None) == (inputs_embeds is None):
        found = "none" if given is None else "both"
        raise ValueError(f"Exactly one of `{name}` and `inputs_embeds` must be given, got {found}")


def check_tokens(input_ids: Any, inputs_embeds: Any, embedding: torch.nn.Module, config, input_values: Any = None):
    """Check that the tokens fit the `embedding` of the model, which a user's module may wrap."""
    if input_values is not None:
        raise ValueError("`input_values` must be None for a model with input_channels=None, got values")
    require_one("input_ids", input_ids, inputs_embeds)
    if is_elsewhere(embedding):
        return
    if inputs_embeds is not None:
        return check_last_size("inputs_embeds", inputs_embeds, config.hidden_size)
    require_tensor("input_ids", input_ids, "(B, L)", 2, IDS)
    _check_range("input_ids", input_ids, "vocab_size", config.vocab_size)


def check_values(input_ids: Any, input_values: Any, inputs_embeds: Any, channels: int, width: int):
    """Check the input of a model of real values: `(B, L, channels)` values or `(B, L, width)` embeddings."""
    if input_ids is not None:
        raise ValueError(f"`input_ids` must be None for a model with input_channels={channels}, got ids")
    require_one("input_values", input_values, inputs_embeds)
    if inputs_embeds is not None:
        check_last_size("inputs_embeds", inputs_embeds, width)
    elif channels > 1 or getattr(input_values, "ndim", 3) != 2:  # one channel may have no dimension
        check_last_size("input_values", input_values, channels)
    else:
        require_tensor("input_values", input_values, "(B, L)", 2, FLOATS)


def check_last_size(name: str, values: Any, size: int):
    """Check that `values` are floats `(B, L, size)`."""
    shape = f"(B, L, {size})"
    require_tensor(name, values, shape, 3, FLOATS)
    if values.shape[2] != size:
        raise ValueError(f"`{name}` must have shape {shape}, got {tuple(values.shape)}")


def can_be_read(ids: torch.Tensor) -> bool:
    """Whether `ids` has values that can be read without a device sync, outside of graphs and of torch.func."""
    return is_on_host(ids) and not must_be_eager() and ids.numel() > 0


def _check_range(name: str, ids: torch.Tensor, limit_name: str, limit: int):
    if not can_be_read(ids):
        return
    lowest, highest = ids.min().item(), ids.max().item()
    if lowest < 0 or highest >= limit:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"Entries of `{name}` must be in [0, {limit_name}={limit}), got {outside}")


def check_labels(labels: Any, like: torch.Tensor, classes: int, name="labels", ignored=-100, limit="vocab_size"):
    """Check that labels `(B, L)` are in [0, `classes`) or `ignored`, for hidden states or logits `like` `(B, L, ...)`.

    The field `limit` has the number of classes.
    """
    meaning = ", one label for each position with logits"
    require_tensor(name, labels, "(B, L)", 2, (torch.int64,), [like.shape[:2]], meaning)
    _check_range(name, labels.where(labels != ignored, 0), limit, classes)


def check_class_labels(labels: Any, logits: torch.Tensor, regression: bool = False):
    """Check labels for `logits` `(B, C)`: classes `(B,)`, -100 for none, or floats `(B, C)`, `(B,)` if C is 1.

    Floats of several classes are shares in [0, 1], unless they are the values of a `regression`.
    """
    batch, classes = logits.shape
    whole = isinstance(labels, torch.Tensor) and not labels.is_floating_point()
    shapes = [(batch,), (batch, 1)] if whole or classes == 1 else [(batch, classes)]
    require_tensor("labels", labels, "(B,) or (B, C)", None, (torch.int64,) if whole else FLOATS, shapes)
    if whole and classes > 1:
        _check_range("labels", labels.where(labels != -100, 0), "num_labels", classes)
    elif classes > 1 and not regression and can_be_read(labels):
        outside = labels[~((labels >= 0) & (labels <= 1))]
        if len(outside):
            raise ValueError(f"Entries of `labels` must be in [0, 1] for several labels, got {outside[0].item()}")


def check_spans(start_positions: Any, end_positions: Any, logits: torch.Tensor, real: torch.Tensor | None):
    """Check the first and last positions `(B,)` of spans for `logits` `(B, L)`. Within L they are not at padding.

    `real` `(B, L)` is False there, or None without padding.
    """
    length = logits.shape[1]
    for name, places in {"start_positions": start_positions, "end_positions": end_positions}.items():
        require_tensor(name, places, "(B,)", 1, (torch.int64,), [logits.shape[:1]])
        if can_be_read(places) and (places < 0).any():
            raise ValueError(f"`{name}` must be at least 0, got {int(places.min())}")
        if real is not None and can_be_read(places) and can_be_read(real):
            inside = places.clamp(max=length - 1)
            hidden = (places < length) & ~real.expand(len(places), length).gather(1, inside[:, None])[:, 0]
            if hidden.any():
                wrong = int(places[hidden][0])
                raise ValueError(f"`{name}` must be real tokens, or {length} for no answer, got padding, {wrong}")


def take_options(keywords: dict, *names: str) -> dict:
    """Move the keyword arguments with these names out of `keywords`."""
    return {name: keywords.pop(name) for name in names if name in keywords}


def check_pixel_values(pixel_values: Any, channels: int, size: int):
    """Check images `(B, channels, side, side)` with patches of `size` pixels, which divide the side."""
    letters = "(B, channels, side, side)"
    require_tensor("pixel_values", pixel_values, letters)
    shape = tuple(pixel_values.shape)
    fits = len(shape) == 4 and shape[1:] == (channels, shape[3], shape[3]) and shape[3] > 0 and shape[3] % size == 0
    if not fits:
        wanted = f"{letters} with {channels} channels and a side that is a multiple of patch_size={size}"
        raise ValueError(f"`pixel_values` must have shape {wanted}, got {shape}")


def check_attention_mask(attention_mask: Any, inputs_embeds: torch.Tensor, past_length: int) -> torch.Tensor | None:
    """The part `(B, L)` of the mask for the tokens of `inputs_embeds` `(B, L, d)`; None if all are real."""
    batch, length = inputs_embeds.shape[:2]
    if length == 0:
        raise ValueError(f"The length of the sequence must be at least 1, got {tuple(inputs_embeds.shape)}")
    if attention_mask is None:
        return None
    shapes = [(rows, past_length + length) for rows in (batch, 1)]
    require_tensor("attention_mask", attention_mask, "(B, past length + L)", shapes=shapes)
    attention_mask = (attention_mask[:, -length:] != 0).expand(batch, length)
    # On an accelerator, the device sync to learn that a mask hides nothing costs more than applying it.
    return None if can_be_read(attention_mask) and attention_mask.all() else attention_mask


def first_real_token(attention_mask: torch.Tensor) -> torch.Tensor:
    """The position of the first real token in each row, `(B,)`; 0 in a row without real tokens."""
    return attention_mask.ne(0).int().argmax(dim=1)


def roll(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The rows of `x` `(B, L, D)`, each rotated towards its end by its entry of `shift` `(B,)`, at most L."""
    length = x.shape[1]
    index = torch.arange(length, device=x.device) - shift[:, None]  # (B, L), within -L .. 2L - 1
    # Not index % length: the exporter to ONNX supports no remainder by a size.
    index = torch.where(index < 0, index + length, index)
    index = torch.where(index < length, index, index - length)
    return x.gather(1, index[..., None].expand_as(x))


def end_with_real(x: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of `x` `(B, L, D)` and of the mask, rotated so that the last position of each is real."""
    mask = attention_mask.expand(x.shape[:2])
    shift = mask.ne(0).flip(1).int().argmax(dim=1)
    return roll(x, shift), roll(mask[..., None], shift)[..., 0]


def mean_of_real_tokens(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The mean over the real tokens, `(B, L, d)` to `(B, d)`; 0 for a row without real tokens."""
    if attention_mask is None:
        return hidden_states.mean(dim=1)
    real = attention_mask[:, -hidden_states.shape[1] :].ne(0)
    dtype = compute_dtype(hidden_states.dtype)  # float16 overflows in long sums
    total = hidden_states.masked_fill(~real[..., None], 0).sum(dim=1, dtype=dtype)  # (B, d)
    return (total / real.sum(dim=1, keepdim=True).clamp(min=1)).to(hidden_states.dtype)


def last_real_token(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The last real token, `(B, L, d)` to `(B, d)`; the last position in a row without real tokens."""
    if attention_mask is None:
        return hidden_states[:, -1]
    length = hidden_states.shape[1]
    from_end = attention_mask[:, -length:].ne(0).flip(1).int().argmax(dim=1)  # (B,)
    rows = torch.arange(hidden_states.shape[0], device=hidden_states.device)  # not len(): export would fix it
    return hidden_states[rows, length - 1 - from_end]


def extend_mask(attention_mask: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mask `(B, past)` for real `tokens` `(B, L, ...)` after those it knows, `(B, past + L)`."""
    return torch.cat([attention_mask, attention_mask.new_ones(tokens.shape[:2])], dim=1)


def token_positions(attention_mask: torch.Tensor | None, past_length: int, tokens: torch.Tensor) -> torch.Tensor:
    """The positions of `tokens` `(B, L, ...)`, 0 at a row's first real one, by the mask `(B, past_length + L)`."""
    length = tokens.shape[1]
    if attention_mask is None:
        return torch.arange(past_length, past_length + length, device=tokens.device)[None]
    return (attention_mask.ne(0).cumsum(dim=1) - 1).clamp(min=0)[:, -length:]


POOLINGS = {"last": last_real_token, "mean": mean_of_real_tokens}


def pool_tokens(pooling: str, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """One vector for each sequence, `(B, L, d)` to `(B, d)`. `pooling` is a name in `POOLINGS`."""
    # `device_map` may put the last layers on another device than the inputs.
    mask = None if attention_mask is None else attention_mask.to(hidden_states.device)
    return POOLINGS[pooling](hidden_states, mask)
