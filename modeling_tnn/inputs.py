"""Checks of the arguments of the models: tokens, masks, labels, images and keywords.

Also what follows from a mask: alignment, positions and pooling of real tokens; and what a pass hands to a layer.

B batch, L length, d hidden size, C classes or choices, K chosen positions. A mask is `(B, L)`, 0 at padding and
anything else at real tokens.

Every `check_...` raises a TypeError for an argument of another kind or dtype, and a ValueError for another shape,
value or device. Values are checked on the CPU only: on other devices, reading them is a device sync.
"""

from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache
from transformers.utils import TransformersKwargs

from .configuration_tnn import has_attention
from .numerics import compute_dtype, is_on_host, must_be_eager

# Further arguments that models of transformers accept: options of losses and outputs, and outputs of tokenizers.
# `kwargs`: pipeline stages forward unused arguments under this name.
KEYWORDS = {*TransformersKwargs.__annotations__, "return_dict", "token_type_ids", "cache_position", "kwargs"}

IDS = (torch.int64, torch.int32)

# What `ToeplitzOperator.kernel_of` returns: taps, a response, or several parts.
Kernel = torch.Tensor | tuple


class Pass(NamedTuple):
    """What a forward pass of a model hands to a layer, besides the hidden states."""

    mask: torch.Tensor | None = None  # (B, L), False at padding; None if there is none
    cache: Cache | None = None  # holds the state after earlier tokens
    documents: tuple | None = None  # the `packing.Documents` of packed rows
    layout: tuple | None = None  # how the sequence is divided over processes, see `parallel/sequence.py`
    view: tuple | None = None  # the masks and rotary positions of attention, see `mixers.view_of`
    prepared: Kernel | None = None  # the kernel of the layer's operator for this length, if it is known already


NO_PASS = Pass()


def is_elsewhere(layer: torch.nn.Module) -> bool:
    """Whether a layer belongs to another stage of a pipeline: an identity is in its place."""
    return isinstance(layer, torch.nn.Identity)


def check_keywords(given: dict[str, Any]):
    """Refuse unknown keyword arguments: a misspelt one would be ignored silently."""
    for name, value in given.items():
        if name not in KEYWORDS and value is not None:
            hint = "".join(f" Did you mean {close}?" for close in get_close_matches(name, KEYWORDS, n=1))
            raise TypeError(f"`{name}` is not an argument of this model.{hint}")


def require_tensor(
    name: str, value: Any, letters: str, dims: int | None = None, shapes=(), like=None, meaning: str = ""
):
    """Check that `value` is a tensor: of `dims` dimensions, of one of `shapes`, and with values if `like` has them.

    Each is checked if it is given. In the error, `letters` describe the shape and `meaning` says where it is from.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"`{name}` must be a tensor of shape {letters}, got {type(value).__name__}")
    found = tuple(value.shape)
    if dims is not None and value.dim() != dims:
        raise ValueError(f"`{name}` must have shape {letters}, got {found}")
    if shapes and found not in shapes:
        raise ValueError(f"`{name}` must have shape {letters} = {tuple(shapes[0])}{meaning}, got {found}")
    if like is not None:
        _check_device(name, value, like)


def check_tensor(name: str, value: Any, letters: str, dims: int, dtypes: tuple | None = None, **options):
    """`require_tensor` with these options, of one of `dtypes` (floating-point if None)."""
    require_tensor(name, value, letters, dims, **options)
    if not (value.is_floating_point() if dtypes is None else value.dtype in dtypes):
        wanted = "floating-point numbers" if dtypes is None else " or ".join(map(str, dtypes))
        raise TypeError(f"`{name}` must hold {wanted}, got {value.dtype}")


def check_tokens(input_ids: Any, inputs_embeds: Any, embedding: torch.nn.Module):
    """Check that the tokens fit the `embedding` of the model."""
    if (input_ids is None) == (inputs_embeds is None):
        found = "none" if input_ids is None else "both"
        raise ValueError(f"Exactly one of `input_ids` and `inputs_embeds` must be given, got {found}")
    if is_elsewhere(embedding):
        return
    if inputs_embeds is None:
        check_tensor("input_ids", input_ids, "(B, L)", 2, IDS)
        _check_range("input_ids", input_ids, "vocab_size", embedding.weight.shape[0])
        _check_device_of_layer("input_ids", input_ids, embedding)
        return
    width, dtype = embedding.weight.shape[1], embedding.weight.dtype
    shape = f"(B, L, {width})"
    check_tensor("inputs_embeds", inputs_embeds, shape, 3)
    if inputs_embeds.shape[2] != width:
        raise ValueError(f"`inputs_embeds` must have shape {shape}, got {tuple(inputs_embeds.shape)}")
    differs, device = inputs_embeds.dtype != dtype and dtype.is_floating_point, inputs_embeds.device.type
    # PyTorch 2.11 cannot compile the question of autocast, and some types of device have none.
    if differs and not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        raise TypeError(f"`inputs_embeds` must have dtype {dtype} as the model, got {inputs_embeds.dtype}")
    _check_device_of_layer("inputs_embeds", inputs_embeds, embedding)


def check_prompt(
    input_ids: Any, inputs_embeds: Any, attention_mask: Any, embedding: torch.nn.Module, past_length: int = 0
):
    """Check the tokens and the mask of `generate`, which takes both kinds of tokens, one or none.

    The mask may include the `past_length` tokens of a cache if the tokens do not.
    """
    if input_ids is not None:
        check_tokens(input_ids, None, embedding)
    if inputs_embeds is not None:
        check_tokens(None, inputs_embeds, embedding)
    prompt = input_ids if inputs_embeds is None else inputs_embeds
    if attention_mask is None or prompt is None:
        return
    shape, whole = tuple(prompt.shape[:2]), (prompt.shape[0], past_length + prompt.shape[1])
    meaning = ", as the prompt" + (f", or {whole} with the tokens of `past_key_values`" if past_length else "")
    options = {"shapes": (shape, whole), "like": prompt, "meaning": meaning}
    require_tensor("attention_mask", attention_mask, "(B, L)", **options)


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


def check_labels(
    labels: Any, like: torch.Tensor, classes: int, name: str = "labels", ignored: int = -100, limit: str = "vocab_size"
):
    """Check that labels `(B, L)` are in [0, `classes`) or `ignored`, for hidden states or logits `like` `(B, L, ...)`.

    The field `limit` has the number of classes.
    """
    options = {"shapes": [like.shape[:2]], "like": like, "meaning": ", one label for each position with logits"}
    check_tensor(name, labels, "(B, L)", 2, (torch.int64,), **options)
    _check_range(name, labels.where(labels != ignored, 0), limit, classes)


def check_logits_to_keep(logits_to_keep: Any, length: int, labels: torch.Tensor | None):
    """Check the number of last positions that get logits, or the positions `(K,)`, in a sequence of `length`."""
    if isinstance(logits_to_keep, torch.Tensor):
        check_tensor("logits_to_keep", logits_to_keep, "(K,)", 1, IDS)
        _check_range("logits_to_keep", logits_to_keep.where(logits_to_keep >= 0, logits_to_keep + length), "L", length)
    elif not isinstance(logits_to_keep, int):
        raise TypeError(f"`logits_to_keep` must be an integer or a tensor of positions, got {logits_to_keep!r}")
    elif logits_to_keep < 0:
        raise ValueError(f"`logits_to_keep` must be at least 0, got {logits_to_keep}")
    if labels is not None and (isinstance(logits_to_keep, torch.Tensor) or logits_to_keep > 0):
        raise ValueError("`logits_to_keep` must not be given with `labels`: the loss needs all logits")


def check_class_labels(labels: Any, logits: torch.Tensor):
    """Check labels for `logits` `(B, C)`: classes `(B,)`, -100 for none, or floats `(B, C)`, `(B,)` if C is 1."""
    batch, classes = logits.shape
    require_tensor("labels", labels, f"(B,) or (B, {classes})")
    whole = not labels.is_floating_point()
    if whole and labels.dtype is not torch.int64:
        raise TypeError(f"`labels` must hold torch.int64 or floating-point numbers, got {labels.dtype}")
    allowed = ((batch,), (batch, 1)) if whole or classes == 1 else ((batch, classes),)
    if labels.shape not in allowed:
        raise ValueError(f"`labels` of {labels.dtype} must have shape {allowed[0]}, got {tuple(labels.shape)}")
    _check_device("labels", labels, logits)
    if whole and classes > 1:
        _check_range("labels", labels.where(labels != -100, 0), "num_labels", classes)


def check_spans(start_positions: Any, end_positions: Any, logits: torch.Tensor):
    """Check the first and last positions `(B,)` of spans for `logits` `(B, L)`."""
    for name, places in {"start_positions": start_positions, "end_positions": end_positions}.items():
        check_tensor(name, places, "(B,)", 1, (torch.int64,), shapes=[logits.shape[:1]], like=logits)
        if can_be_read(places) and (places < 0).any():
            raise ValueError(f"`{name}` must be at least 0, got {int(places.min())}")


def check_choices(name: str, tokens: Any, attention_mask: torch.Tensor | None) -> int:
    """Return C, the number of choices. Ids must be `(B, C, L)`, embeddings `(B, C, L, d)`, the mask `(B, C, L)`."""
    require_tensor(name, tokens, *(("(B, C, L)", 3) if name == "input_ids" else ("(B, C, L, d)", 4)))
    if attention_mask is not None:
        require_tensor("attention_mask", attention_mask, "(B, C, L)", shapes=[tokens.shape[:3]])
    return tokens.shape[1]


def _check_device(name: str, value: torch.Tensor, like: torch.Tensor, owner: str = ""):
    if value.is_meta != like.is_meta:
        raise ValueError(f"`{name}` must be on the device {owner}{like.device}, got {value.device}")


def _check_device_of_layer(name: str, value: torch.Tensor, layer: torch.nn.Module):
    if not hasattr(layer, "_hf_hook"):  # with a hook of accelerate, offloaded weights are loaded when they are used
        _check_device(name, value, layer.weight, "of the model, ")


def take_options(keywords: dict, *names: str) -> dict:
    """Move the keyword arguments with these names out of `keywords`."""
    return {name: keywords.pop(name) for name in names if name in keywords}


def check_direction(model: str, causal: bool, needed: bool):
    """Check that `config.causal` is what the class called `model` needs."""
    if causal != needed:
        why = "the tokens before it" if needed else "the tokens on both sides"
        raise ValueError(
            f"`causal` must be {needed} for {model}, which predicts a token from {why}, got {causal}. "
            f"For causal={causal} use {'TnnForMaskedLM' if needed else 'TnnForCausalLM'}."
        )


def check_pixel_values(pixel_values: Any, projection: torch.nn.Conv2d):
    """Check images `(B, channels, side, side)` for the `projection` of patches, which divide the side."""
    channels, size = projection.in_channels, projection.kernel_size[0]
    require_tensor("pixel_values", pixel_values, f"(B, {channels}, side, side)")
    if pixel_values.is_complex():
        raise TypeError(f"`pixel_values` must hold real numbers, got {pixel_values.dtype}")
    shape = tuple(pixel_values.shape)
    fits = len(shape) == 4 and shape[1] == channels and shape[2] == shape[3] and shape[2] % size == 0
    if not fits or shape[2] == 0:
        raise ValueError(
            f"`pixel_values` must have shape (B, {channels}, side, side), the side a multiple of patch_size={size}, "
            f"got {shape}"
        )
    _check_device_of_layer("pixel_values", pixel_values, projection)


def check_patches(config):
    """Check that a configuration is one of images: bidirectional, without attention, one position for each patch."""
    if config.causal:
        raise ValueError("`causal` must be False for TnnForImageClassification, got True")
    if has_attention(config):
        raise ValueError(f"`layer_types` must be 'toeplitz' for all layers of images, got {config.layer_types}")
    side = config.image_size // config.patch_size
    if config.image_size % config.patch_size or side**2 != config.max_position_embeddings:
        raise ValueError(
            "`max_position_embeddings` must be the number of patches, (image_size / patch_size)^2 for an image_size "
            f"that is a multiple of patch_size, got {config.max_position_embeddings} with image_size="
            f"{config.image_size} and patch_size={config.patch_size}"
        )


def real_tokens(input_ids: torch.Tensor | None, pad_token_id: int | None) -> torch.Tensor | None:
    """The mask `(B, L)` of tokens that are not `pad_token_id`, or None if the ids or the padding token are unknown."""
    return None if input_ids is None or pad_token_id is None else input_ids != pad_token_id


def check_attention_mask(attention_mask: Any, inputs_embeds: torch.Tensor, past_length: int) -> torch.Tensor | None:
    """The part `(B, L)` of the mask for the tokens of `inputs_embeds` `(B, L, d)`; None if all are real."""
    batch, length = inputs_embeds.shape[:2]
    if length == 0:
        raise ValueError(
            f"The length of the sequence must be at least 1, got inputs of shape {tuple(inputs_embeds.shape)}"
        )
    if attention_mask is None:
        return None
    shapes = [(rows, past_length + length) for rows in (batch, 1)]
    options = {"shapes": shapes, "like": inputs_embeds, "meaning": ", one entry for each token"}
    require_tensor("attention_mask", attention_mask, "(B, past length + L)", **options)
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


def token_positions(attention_mask: torch.Tensor | None, past_length: int, tokens: torch.Tensor) -> torch.Tensor:
    """The positions of `tokens` `(B, L, ...)`, counted from the first real token of a row, `(B, L)` or `(1, L)`.

    The mask is `(B, past_length + L)`.
    """
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


def check_pooled_whole(pooling: str, cache: Cache | None):
    """Check that mean pooling has the whole sequence: a cache does not store the hidden states of earlier tokens."""
    past_length = cache.get_seq_length() if isinstance(cache, Cache) else 0  # the model refuses other objects
    if pooling == "mean" and past_length > 0:
        raise ValueError(
            "`past_key_values` must be empty with classifier_pooling='mean', which needs the hidden states of all "
            f"tokens, got {past_length} tokens. Give the whole text at once."
        )
