"""Checks of the arguments of the models: tokens, masks, labels, images and keywords.

B batch, L length, d hidden size, V vocabulary. A mask is `(B, L)`, 0 at padding and anything else at real tokens.

Padding: masks, alignment to the first real token, positions and pooling over real tokens.

B batch, L length, d hidden size. A mask is `(B, L)`, 0 at padding and anything else at real tokens.
"""

import difflib
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils import TransformersKwargs

from .configuration_tnn import has_attention
from .numerics import compute_dtype, is_on_host, must_be_eager

# Further arguments that models of transformers accept: those of its output classes, and outputs of tokenizers.
# `kwargs` is what transformers' pipelines over several devices pass on of all others.
KEYWORDS = {*TransformersKwargs.__annotations__, "return_dict", "token_type_ids", "cache_position", "kwargs"}


def is_elsewhere(layer: torch.nn.Module) -> bool:
    """Whether a layer lies on another stage of a pipeline, which has an identity in its place."""
    return isinstance(layer, torch.nn.Identity)


def check_keywords(given: dict[str, Any]):
    """Refuse unknown keyword arguments. Otherwise a misspelt argument would be ignored silently.

    Raises:
        TypeError: a name is not among `KEYWORDS`, and its value is not None.
    """
    for name, value in given.items():
        if name not in KEYWORDS and value is not None:
            close = difflib.get_close_matches(name, KEYWORDS, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(f"`{name}` is not an argument of this model.{hint}")


def require_tensor(name: str, value: Any, shape: str):
    """Check that `value` is a tensor.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"`{name}` must be a tensor of shape {shape}, got {type(value).__name__}")


def check_tensor(name: str, value: Any, shape: str, dims: int, dtypes: tuple[torch.dtype, ...] | None = None):
    """Check that `value` is a tensor of `dims` dimensions with one of `dtypes` (floating-point if None).

    Raises:
        TypeError: it is not a tensor, or has another dtype.
        ValueError: it has another number of dimensions.
    """
    require_tensor(name, value, shape)
    if value.dim() != dims:
        raise ValueError(f"`{name}` must have shape {shape}, got {tuple(value.shape)}")
    if not (value.is_floating_point() if dtypes is None else value.dtype in dtypes):
        wanted = "floating-point numbers" if dtypes is None else " or ".join(map(str, dtypes))
        raise TypeError(f"`{name}` must hold {wanted}, got {value.dtype}")


def check_tokens(input_ids: Any, inputs_embeds: Any, embedding: torch.nn.Module):
    """Check that the tokens fit the `embedding` of the model.

    The range of ids is checked on the CPU only, since elsewhere the search would stall the device, and not while a
    graph is recorded or a function is transformed.

    Raises:
        TypeError: an argument is not a tensor, or has another dtype.
        ValueError: both arguments or none are given, a shape is wrong, an id is outside the vocabulary, or the tokens
            are on another device than the model.
    """
    if (input_ids is None) == (inputs_embeds is None):
        found = "none" if input_ids is None else "both"
        raise ValueError(f"Exactly one of `input_ids` and `inputs_embeds` must be given, got {found}")
    if is_elsewhere(embedding):
        return
    weight = embedding.weight
    if input_ids is not None:
        check_tensor("input_ids", input_ids, "(B, L)", 2, (torch.int64, torch.int32))
        _check_range("input_ids", input_ids, "vocab_size", weight.shape[0])
    else:
        shape = f"(B, L, {weight.shape[1]})"
        check_tensor("inputs_embeds", inputs_embeds, shape, 3)
        if inputs_embeds.shape[2] != weight.shape[1]:
            raise ValueError(f"`inputs_embeds` must have shape {shape}, got {tuple(inputs_embeds.shape)}")
        differs = inputs_embeds.dtype != weight.dtype and weight.is_floating_point()
        if differs and not is_autocast_on(inputs_embeds.device.type):  # PyTorch 2.11 cannot compile the question
            raise TypeError(f"`inputs_embeds` must have dtype {weight.dtype} as the model, got {inputs_embeds.dtype}")
    name, tokens = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    # A hook of accelerate loads the weights of an offloaded model when they are used.
    if tokens.is_meta != weight.is_meta and not hasattr(embedding, "_hf_hook"):
        raise ValueError(f"`{name}` must be on the device of the model, {weight.device}, got {tokens.device}")


def is_autocast_on(device: str) -> bool:
    """Whether autocast is on for devices of this type, of which some have none."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def check_prompt(
    input_ids: Any, inputs_embeds: Any, attention_mask: Any, embedding: torch.nn.Module, past_length: int = 0
):
    """Check the tokens and the mask that `generate` takes. Both kinds of tokens may be given, or none.

    Args:
        past_length: the number of tokens in a cache. The mask may include them where the tokens do not.

    Raises:
        TypeError, ValueError: those of `check_tokens`; or the mask is not a tensor of the shape of the prompt.
    """
    if input_ids is not None:
        check_tokens(input_ids, None, embedding)
    if inputs_embeds is not None:
        check_tokens(None, inputs_embeds, embedding)
    prompt = input_ids if inputs_embeds is None else inputs_embeds
    if attention_mask is None or prompt is None:
        return
    require_tensor("attention_mask", attention_mask, "(B, L)")
    shape, whole = tuple(prompt.shape[:2]), (prompt.shape[0], past_length + prompt.shape[1])
    if attention_mask.shape not in (shape, whole) or attention_mask.is_meta != prompt.is_meta:
        with_past = f", or {whole} with the tokens of `past_key_values`" if past_length else ""
        raise ValueError(
            f"`attention_mask` must have shape {shape} on {prompt.device}, as the prompt{with_past}, got "
            f"{tuple(attention_mask.shape)} on {attention_mask.device}"
        )


def can_be_read(ids: torch.Tensor) -> bool:
    """Whether the values of `ids` can be read without stalling a device."""
    return is_on_host(ids) and not must_be_eager() and ids.numel() > 0


def _check_range(name: str, ids: torch.Tensor, limit_name: str, limit: int):
    if not can_be_read(ids):
        return
    lowest, highest = ids.min().item(), ids.max().item()
    if lowest < 0 or highest >= limit:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"Entries of `{name}` must be in [0, {limit_name}={limit}), got {outside}")


def check_labels(
    labels: Any,
    hidden_states: torch.Tensor,
    classes: int,
    name: str = "labels",
    ignore_index: int = -100,
    limit: str = "vocab_size",
):
    """Check that labels fit the hidden states `(B, L, d)` of all positions.

    Raises:
        TypeError: the labels are not a tensor of int64.
        ValueError: they are not `(B, L)`, or hold an id outside [0, classes) other than `ignore_index` (checked on
            the CPU only). The field `limit` has the number of classes.
    """
    check_tensor(name, labels, "(B, L)", 2, (torch.int64,))
    if labels.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"`{name}` must have shape (B, L) = {tuple(hidden_states.shape[:2])}, one label for each position with "
            f"logits, got {tuple(labels.shape)}"
        )
    _check_device(name, labels, hidden_states)
    _check_range(name, labels.where(labels != ignore_index, 0), limit, classes)


def check_logits_to_keep(logits_to_keep: Any, length: int, labels: torch.Tensor | None):
    """Check the choice of positions in a sequence of `length`.

    Raises:
        TypeError: `logits_to_keep` is neither an integer nor a tensor of positions, `(K,)`.
        ValueError: it is negative, a position is outside the sequence, or `labels` need the logits left out.
    """
    if isinstance(logits_to_keep, torch.Tensor):
        check_tensor("logits_to_keep", logits_to_keep, "(K,)", 1, (torch.int64, torch.int32))
        _check_range("logits_to_keep", logits_to_keep.where(logits_to_keep >= 0, logits_to_keep + length), "L", length)
    elif not isinstance(logits_to_keep, int):
        raise TypeError(f"`logits_to_keep` must be an integer or a tensor of positions, got {logits_to_keep!r}")
    elif logits_to_keep < 0:
        raise ValueError(f"`logits_to_keep` must be at least 0, got {logits_to_keep}")
    if labels is not None and (isinstance(logits_to_keep, torch.Tensor) or logits_to_keep > 0):
        raise ValueError("`logits_to_keep` must not be given with `labels`: the loss needs all logits")


def check_class_labels(labels: Any, logits: torch.Tensor):
    """Check that labels fit the `logits` `(B, C)` of C classes.

    Raises:
        TypeError: the labels are not a tensor, or hold neither int64 nor floating-point numbers.
        ValueError: they are neither `(B,)` classes nor `(B, C)` floating-point numbers (`(B,)` for C = 1), or hold a
            class outside [0, C) other than -100.
    """
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
    """Check that the ends of spans fit the `logits` `(B, L)`.

    Raises:
        TypeError: they are not tensors of int64.
        ValueError: they are not `(B,)`, or negative (checked on the CPU only).
    """
    batch = logits.shape[0]
    for name, places in {"start_positions": start_positions, "end_positions": end_positions}.items():
        check_tensor(name, places, "(B,)", 1, (torch.int64,))
        if places.shape != (batch,):
            raise ValueError(f"`{name}` must have shape (B,) = ({batch},), got {tuple(places.shape)}")
        _check_device(name, places, logits)
        if can_be_read(places) and (places < 0).any():
            raise ValueError(f"`{name}` must be at least 0, got {int(places.min())}")


def check_choices(name: str, tokens: Any, attention_mask: torch.Tensor | None) -> int:
    """Check that `tokens` are `(B, C, L)` ids or `(B, C, L, d)` embeddings, and the mask `(B, C, L)`; returns C.

    Raises:
        TypeError: they are not tensors.
        ValueError: they have other shapes.
    """
    shape, dims = ("(B, C, L)", 3) if name == "input_ids" else ("(B, C, L, d)", 4)
    require_tensor(name, tokens, shape)
    if tokens.dim() != dims:
        raise ValueError(f"`{name}` must have shape {shape}, got {tuple(tokens.shape)}")
    if attention_mask is not None:
        require_tensor("attention_mask", attention_mask, "(B, C, L)")
        if attention_mask.shape != tokens.shape[:3]:
            raise ValueError(
                f"`attention_mask` must have shape (B, C, L) = {tuple(tokens.shape[:3])}, "
                f"got {tuple(attention_mask.shape)}"
            )
    return tokens.shape[1]


def _check_device(name: str, value: torch.Tensor, like: torch.Tensor):
    if value.is_meta != like.is_meta:
        raise ValueError(f"`{name}` must be on the device {like.device}, got {value.device}")


def take_options(keywords: dict, *names: str) -> dict:
    """Move the keyword arguments with these names out of `keywords`."""
    return {name: keywords.pop(name) for name in names if name in keywords}


def check_direction(model: str, causal: bool, needed: bool):
    """Check that `config.causal` is the direction that the class called `model` needs.

    Raises:
        ValueError: it is not.
    """
    if causal != needed:
        why = "the tokens before it" if needed else "the tokens on both sides"
        raise ValueError(
            f"`causal` must be {needed} for {model}, which predicts a token from {why}, got {causal}. "
            f"For causal={causal} use {'TnnForMaskedLM' if needed else 'TnnForCausalLM'}."
        )


def check_pixel_values(pixel_values: Any, projection: torch.nn.Conv2d):
    """Check that images fit the `projection` of patches.

    Raises:
        TypeError: the images are not a tensor of real numbers.
        ValueError: they are not square, their side is not a multiple of the patch size, they have another number of
            channels, or they are on another device than the model.
    """
    if not isinstance(pixel_values, torch.Tensor):
        raise TypeError(f"`pixel_values` must be a tensor, got {type(pixel_values).__name__}")
    if pixel_values.is_complex():
        raise TypeError(f"`pixel_values` must hold real numbers, got {pixel_values.dtype}")
    shape, channels, size = tuple(pixel_values.shape), projection.in_channels, projection.kernel_size[0]
    fits = len(shape) == 4 and shape[1] == channels and shape[2] == shape[3] and shape[2] % size == 0
    if not fits or shape[2] == 0:
        raise ValueError(
            f"`pixel_values` must have shape (B, {channels}, side, side), the side a multiple of patch_size={size}, "
            f"got {shape}"
        )
    # A hook of accelerate loads the weights of an offloaded model when they are used.
    if pixel_values.is_meta != projection.weight.is_meta and not hasattr(projection, "_hf_hook"):
        device = projection.weight.device
        raise ValueError(f"`pixel_values` must be on the device of the model, {device}, got {pixel_values.device}")


def check_patches(config):
    """Check that a configuration is one of images.

    Raises:
        ValueError: `config.causal` is True, a layer is attention, or `max_position_embeddings` is not the number of
            patches.
    """
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


def check_attention_mask(
    attention_mask: torch.Tensor | None, inputs_embeds: torch.Tensor, past_length: int
) -> torch.Tensor | None:
    """The part `(B, L)` of the mask for the tokens of `inputs_embeds` `(B, L, d)`, or None if all tokens are real.

    Raises:
        TypeError: the mask is not a tensor.
        ValueError: the sequence is empty, or the mask is not `(B, past_length + L)` or `(1, past_length + L)`.
    """
    batch, length = inputs_embeds.shape[:2]
    if length == 0:
        raise ValueError(
            f"The length of the sequence must be at least 1, got inputs of shape {tuple(inputs_embeds.shape)}"
        )
    if attention_mask is None:
        return None
    require_tensor("attention_mask", attention_mask, "(B, L)")
    if attention_mask.shape not in ((batch, past_length + length), (1, past_length + length)):
        raise ValueError(
            f"`attention_mask` must have shape (B, past length + L) = {(batch, past_length + length)}, one entry for "
            f"each token, got {tuple(attention_mask.shape)}"
        )
    _check_device("attention_mask", attention_mask, inputs_embeds)
    attention_mask = (attention_mask[:, -length:] != 0).expand(batch, length)
    # To learn that a mask hides nothing costs an accelerator more than to apply it.
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

    Args:
        attention_mask: `(B, past_length + L)`.
    """
    length = tokens.shape[1]
    if attention_mask is None:
        return torch.arange(past_length, past_length + length, device=tokens.device)[None]
    return (attention_mask.ne(0).cumsum(dim=1) - 1).clamp(min=0)[:, -length:]


POOLINGS = {"last": last_real_token, "mean": mean_of_real_tokens}


def pool_tokens(pooling: str, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """One vector for each sequence, `(B, L, d)` to `(B, d)`. `pooling` is a name in `POOLINGS`."""
    if attention_mask is not None:
        # `device_map` may put the last layers on another device than the inputs.
        attention_mask = attention_mask.to(hidden_states.device)
    return POOLINGS[pooling](hidden_states, attention_mask)


def check_pooled_whole(pooling: str, past_key_values: Cache | None):
    """Check that mean pooling sees the whole text: a cache does not keep the hidden states of earlier tokens.

    Raises:
        ValueError: `pooling` is the mean, and the cache holds tokens.
    """
    # The model refuses objects that are not caches.
    past_length = past_key_values.get_seq_length() if isinstance(past_key_values, Cache) else 0
    if pooling == "mean" and past_length > 0:
        raise ValueError(
            "`past_key_values` must be empty with classifier_pooling='mean', which needs the hidden states of all "
            f"tokens, got {past_length} tokens. Give the whole text at once."
        )
