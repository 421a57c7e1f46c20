"""What a model does with its inputs around the layers: checks of tokens, masks and labels, alignment, pooling.

B batch, L length, d hidden size, V vocabulary. A mask is `(B, L)`, 0 at padding and anything else at real tokens.
"""

import difflib
from typing import Any

import torch
from transformers.utils import TransformersKwargs

from .numerics import must_be_eager

# What models of transformers take besides: arguments of its output classes, and what tokenizers give.
KEYWORDS = {*TransformersKwargs.__annotations__, "return_dict", "token_type_ids", "cache_position"}


def check_keywords(given: dict[str, Any]):
    """Refuse keyword arguments that nothing reads; a misspelt one would be ignored in silence.

    Raises:
        TypeError: a name is not among `KEYWORDS`, and its value is not None.
    """
    for name, value in given.items():
        if name not in KEYWORDS and value is not None:
            close = difflib.get_close_matches(name, KEYWORDS, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(f"{name} is no argument of this model.{hint}")


def require_tensor(name: str, value: Any, shape: str):
    """Refuse what is no tensor.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of shape {shape}, not {type(value).__name__}.")


def check_tensor(name: str, value: Any, shape: str, dims: int, dtypes: tuple[torch.dtype, ...] | None = None):
    """Refuse what is no tensor of `dims` dimensions and of one of `dtypes`, or of floating numbers without them.

    Raises:
        TypeError: it is no tensor, or one of other numbers.
        ValueError: it has another number of dimensions.
    """
    require_tensor(name, value, shape)
    if value.dim() != dims:
        raise ValueError(f"{name} must have shape {shape}, not {tuple(value.shape)}.")
    if not (value.is_floating_point() if dtypes is None else value.dtype in dtypes):
        wanted = "floating numbers" if dtypes is None else " or ".join(map(str, dtypes))
        raise TypeError(f"{name} must hold {wanted}, not {value.dtype}.")


def check_tokens(input_ids: Any, inputs_embeds: Any, embedding: torch.nn.Module):
    """Refuse tokens that the `embedding` of the model does not fit.

    Raises:
        TypeError: they are no tensors, or of another dtype.
        ValueError: both or none are given, a shape is another, an id is outside the vocabulary (looked for on the CPU
            only, since elsewhere the search would stall the device, and not while a graph is recorded or a function
            transformed), or the device is not the model's.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Exactly one of input_ids and inputs_embeds must be given.")
    weight = embedding.weight
    if input_ids is not None:
        check_tensor("input_ids", input_ids, "(B, L)", 2, (torch.int64, torch.int32))
        _check_range("input_ids", input_ids, "vocab_size", weight.shape[0])
    else:
        shape = f"(B, L, {weight.shape[1]})"
        check_tensor("inputs_embeds", inputs_embeds, shape, 3)
        if inputs_embeds.shape[2] != weight.shape[1]:
            raise ValueError(f"inputs_embeds must have shape {shape}, not {tuple(inputs_embeds.shape)}.")
        device = inputs_embeds.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if inputs_embeds.dtype != weight.dtype and weight.is_floating_point() and not autocast:
            raise TypeError(f"inputs_embeds has dtype {inputs_embeds.dtype}, the model {weight.dtype}.")
    name, tokens = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    # The weights of an offloaded model are there while they are used, by a hook of accelerate.
    if tokens.is_meta != weight.is_meta and not hasattr(embedding, "_hf_hook"):
        raise ValueError(f"{name} is on the device {tokens.device}, the model on {weight.device}.")


def check_prompt(input_ids: Any, inputs_embeds: Any, attention_mask: Any, embedding: torch.nn.Module):
    """`check_tokens` of what `generate` takes, where all of them may be given or none, and of the mask beside them.

    Raises:
        TypeError, ValueError: as `check_tokens`; or the mask is no tensor of the shape of the prompt.
    """
    if input_ids is not None:
        check_tokens(input_ids, None, embedding)
    if inputs_embeds is not None:
        check_tokens(None, inputs_embeds, embedding)
    prompt = input_ids if inputs_embeds is None else inputs_embeds
    if attention_mask is None or prompt is None:
        return
    require_tensor("attention_mask", attention_mask, "(B, L)")
    shape = tuple(prompt.shape[:2])
    if attention_mask.shape != shape or attention_mask.is_meta != prompt.is_meta:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} on {attention_mask.device}: it must be {shape} "
            f"on {prompt.device}, as the prompt."
        )


def can_be_read(ids: torch.Tensor) -> bool:
    """Whether there are values to look at, and looking at them stalls no device."""
    return ids.device.type == "cpu" and not must_be_eager() and ids.numel() > 0


def _check_range(name: str, ids: torch.Tensor, limit_name: str, limit: int):
    if not can_be_read(ids):
        return
    lowest, highest = ids.min().item(), ids.max().item()
    if lowest < 0 or highest >= limit:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"{name} holds {outside}: entries must be in [0, {limit_name}={limit}).")


def check_labels(labels: Any, logits: torch.Tensor, name: str = "labels", ignore_index: int = -100):
    """Refuse labels that do not belong to `logits` `(B, L, V)` of all positions.

    Raises:
        TypeError: they are no tensor of integers.
        ValueError: they are not `(B, L)`, or hold an id outside the vocabulary that is not `ignore_index` (looked for
            on the CPU).
    """
    check_tensor(name, labels, "(B, L)", 2, (torch.int64,))
    if labels.shape != logits.shape[:2]:
        raise ValueError(
            f"{name} has shape {tuple(labels.shape)}: it must be (B, L) = {tuple(logits.shape[:2])}, one label for "
            "each position that has logits."
        )
    _check_device(name, labels, logits)
    _check_range(name, labels.where(labels != ignore_index, 0), "vocab_size", logits.shape[2])


def check_logits_to_keep(logits_to_keep: Any, length: int, labels: torch.Tensor | None):
    """Refuse what chooses no positions of `length`, or chooses among those whose loss is wanted.

    Raises:
        TypeError: it is neither an integer nor a tensor of positions, `(K,)`.
        ValueError: it is a negative number, a position is none of the sequence, or there are `labels`.
    """
    if isinstance(logits_to_keep, torch.Tensor):
        check_tensor("logits_to_keep", logits_to_keep, "(K,)", 1, (torch.int64, torch.int32))
        _check_range("logits_to_keep", logits_to_keep.where(logits_to_keep >= 0, logits_to_keep + length), "L", length)
    elif not isinstance(logits_to_keep, int):
        raise TypeError(f"logits_to_keep must be an integer or a tensor of positions, not {logits_to_keep!r}.")
    elif logits_to_keep < 0:
        raise ValueError(f"logits_to_keep={logits_to_keep} must be at least 0.")
    if labels is not None and (isinstance(logits_to_keep, torch.Tensor) or logits_to_keep > 0):
        raise ValueError("logits_to_keep leaves out logits that the loss of labels needs: give one of them.")


def check_class_labels(labels: Any, logits: torch.Tensor):
    """Refuse labels that do not belong to `logits` `(B, C)` of C classes.

    Raises:
        TypeError: they are no tensor, or hold neither int64 nor floating numbers.
        ValueError: they are neither `(B,)` classes nor `(B, C)` floating numbers (`(B,)` for C = 1), or hold a class
            outside [0, C) other than -100.
    """
    batch, classes = logits.shape
    require_tensor("labels", labels, f"(B,) or (B, {classes})")
    whole = not labels.is_floating_point()
    if whole and labels.dtype is not torch.int64:
        raise TypeError(f"labels must hold torch.int64 or floating numbers, not {labels.dtype}.")
    allowed = ((batch,), (batch, 1)) if whole or classes == 1 else ((batch, classes),)
    if labels.shape not in allowed:
        raise ValueError(f"labels has shape {tuple(labels.shape)} of {labels.dtype}: it must be {allowed[0]}.")
    _check_device("labels", labels, logits)
    if whole and classes > 1:
        _check_range("labels", labels.where(labels != -100, 0), "num_labels", classes)


def _check_device(name: str, value: torch.Tensor, like: torch.Tensor):
    if value.is_meta != like.is_meta:
        raise ValueError(f"{name} is on the device {value.device}, not on {like.device}.")


def take_options(keywords: dict, *names: str) -> dict:
    """Move the keyword arguments with these names out of `keywords`."""
    return {name: keywords.pop(name) for name in names if name in keywords}


def check_direction(model: str, causal: bool, needed: bool):
    """Refuse a configuration whose `causal` is not what the class called `model` needs.

    Raises:
        ValueError: it is not.
    """
    if causal != needed:
        why = "it predicts from what comes before" if needed else "it predicts from both sides"
        raise ValueError(
            f"causal={causal} is not possible: {model} needs causal={needed}, since {why}. "
            f"A model with causal={causal} is for {'TnnForMaskedLM' if needed else 'TnnForCausalLM'}."
        )


def check_pixel_values(pixel_values: Any, projection: torch.nn.Conv2d):
    """Refuse images that the `projection` of patches does not fit.

    Raises:
        TypeError: they are no tensor of real numbers.
        ValueError: an image is not square, has a side that is no multiple of the patch size, or another number of
            channels, or they are on another device than the model.
    """
    if not isinstance(pixel_values, torch.Tensor):
        raise TypeError(f"pixel_values must be a tensor, not {type(pixel_values).__name__}.")
    if pixel_values.is_complex():
        raise TypeError(f"pixel_values must hold real numbers, not {pixel_values.dtype}.")
    shape, channels, size = tuple(pixel_values.shape), projection.in_channels, projection.kernel_size[0]
    fits = len(shape) == 4 and shape[1] == channels and shape[2] == shape[3] and shape[2] % size == 0
    if not fits or shape[2] == 0:
        raise ValueError(
            f"pixel_values must have shape (B, {channels}, side, side), the side a multiple of patch_size={size}, "
            f"not {shape}."
        )
    # The weights of an offloaded model are there while they are used, by a hook of accelerate.
    if pixel_values.is_meta != projection.weight.is_meta and not hasattr(projection, "_hf_hook"):
        device = projection.weight.device
        raise ValueError(f"pixel_values is on the device {pixel_values.device}, the model on {device}.")
