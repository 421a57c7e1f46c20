"""Checks of a checkpoint before it is loaded, and what a later check of its values needs, see `self_check.py`.

A configuration may declare any size, and transformers allocates it before it compares it with the weights. Here the
names and shapes in the headers of the safetensors files are compared with the model on the meta device before.
"""

import json
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open
from torch import distributed
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging

from ..configuration_tnn import TOEPLITZ
from ..extensions import extensions
from ..self_check import FILE, LOCATION, summaries

logger = logging.get_logger(__name__)

# Arguments of `from_pretrained` that disable the checks: weights are from elsewhere, or of other sizes or names.
UNCHECKED_KWARGS = ("state_dict", "gguf_file", "variant", "force_download", "ignore_mismatched_sizes", "key_mapping")

# Prefixes of the parameters of heads.
HEADS = ("lm_head.", "transform.", "classifier.", "qa_outputs.", "prediction_head.")

LARGEST = 2**31  # parameters, of which the summaries take some seconds
TOO_MUCH = "The configuration declares more than the checkpoint holds"


class CheckpointMismatchError(ValueError, RuntimeError):
    """The error for a configuration that does not fit the weights. For wrong sizes transformers has RuntimeError."""


def read_index(index: str) -> dict[str, str]:
    """Return the name of the file of each tensor of a checkpoint in several files."""
    try:
        places = dict(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].items())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
    for tensor, name in places.items():
        # An index must not make the loader read files outside its folder.
        beside = isinstance(name, str) and PurePosixPath(name.replace("\\", "/")).name == name
        if not (beside and name.endswith(".safetensors")):
            raise ValueError(f"The file of {tensor} in {index} must be a safetensors file beside it, got {name!r}")
    return places


def stored_shapes(find: Callable[[str], str | None]) -> tuple[dict[str, torch.Size], int, dict[str, str]]:
    """Return the shape of every tensor in the safetensors files that `find` finds, and the bytes of the files.

    The last value has the names and the types of those that are not of floating point.
    """
    files, places, shapes, others = [find(SAFE_WEIGHTS_NAME)], {}, {}, {}
    if files == [None] and (index := find(SAFE_WEIGHTS_INDEX_NAME)) is not None:
        places = read_index(index)
        files = [find(name) for name in sorted(set(places.values()))]
    files = [file for file in files if file is not None]
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
                shapes |= {name: torch.Size(one.get_shape()) for name, one in slices.items()}
                kinds = {name: one.get_dtype() for name, one in slices.items()}
                others |= {name: kind for name, kind in kinds.items() if not kind.startswith(("F", "BF"))}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error
    for tensor in sorted(places.keys() - shapes.keys()):
        raise ValueError(f"The checkpoint is incomplete: {places[tensor]} is missing, or does not have {tensor}.")
    return shapes, sum(Path(file).stat().st_size for file in files), others


def check_weights(declared: dict[str, torch.Size], stored: dict[str, torch.Size], numbers: int, optional: tuple):
    """Compare the names and shapes of a model with those of a checkpoint of `numbers` numbers.

    Parameters that it lacks are initialised. They must have fewer numbers than it has in all. If the model lacks some
    of the checkpoint too, and not only a head, the names are damaged or it is another model, and random weights would
    pass for trained ones. `optional`: beginnings of the names that may be missing then.
    """
    for name, shape in declared.items():
        if (expected := stored.get(name, shape)) != shape:
            raise CheckpointMismatchError(
                f"The configuration does not fit the weights: {name} must be {tuple(expected)}, got {tuple(shape)}. "
                "Load with ignore_mismatched_sizes=True to initialise such parameters instead."
            )
    missing = [name for name in declared if name not in stored]
    if sum(declared[name].numel() for name in missing) > numbers:
        raise CheckpointMismatchError(f"{TOO_MUCH}: {len(missing)} parameters are missing, such as {missing[0]}.")
    missing = [name for name in missing if not name.startswith(optional)]
    left_over = [name for name in stored if name not in declared and not name.startswith(HEADS)]
    if missing and left_over:
        raise CheckpointMismatchError(
            f"The weights are damaged or belong to another model: {missing[0]} is missing, {left_over[0]} not in the "
            "model. Load with ignore_mismatched_sizes=True to use the weights that fit."
        )


def check_before_loading(model_class: type[PreTrainedModel], source, options: dict):
    """Refuse missing or damaged files of `from_pretrained(source, **options)`, and weights that do not fit."""
    where = {name: options[name] for name in LOCATION if options.get(name)}
    if source is None or any(options.get(name) not in (None, False) for name in UNCHECKED_KWARGS):
        return
    find = partial(cached_file, source, _raise_exceptions_for_missing_entries=False, **where)
    shapes, size, others = stored_shapes(find)
    if not size:
        return
    config, config_class = options.get("config"), model_class.config_class
    if not isinstance(config, PreTrainedConfig):
        # Fields of the configuration may be among the options.
        given = where | {name: value for name, value in options.items() if name not in ("config", *LOCATION)}
        config, _ = config_class.from_pretrained(config or source, return_unused_kwargs=True, **given)
    if (saved := find(CONFIG_NAME)) is not None:
        trained, _ = PreTrainedConfig.get_config_dict(Path(saved).parent)
        # The weights of two operators may have the same names and shapes.
        own = {int(index): given for index, given in (trained.get("per_layer_config") or {}).items()}
        base, kinds = trained.get("tno_type", config_class.tno_type), enumerate(config.layer_types)
        saved = dict.fromkeys(own.get(i, {}).get("tno_type", base) for i, kind in kinds if kind == TOEPLITZ)
        if saved and {*saved} != {*config.tno_types}:
            raise CheckpointMismatchError(
                f"`tno_type` must be {', '.join(saved)!r} for these weights, got {', '.join(config.tno_types)!r}"
            )
    # The names of the body may have a prefix in both.
    prefix = f"{model_class.base_model_prefix}."
    stored = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
    layers = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    if config.num_hidden_layers > max(128, 2 * len(layers)):  # a thousand take seconds to build, even without memory
        raise CheckpointMismatchError(f"{TOO_MUCH}: {config.num_hidden_layers} layers instead of {len(layers)}.")
    with torch.device("meta"):
        model = model_class(config)
    values = {name.removeprefix(prefix): value for name, value in model.state_dict().items()}
    declared = {name: value.shape for name, value in values.items()}
    numbers = sum(shape.numel() for shape in stored.values())
    if getattr(config, "quantization_config", None) is not None:
        stored, numbers = {}, 8 * size  # each method has names and shapes of its own, and a bit or more for a number
        others = {}
    for name, kind in ((name.removeprefix(prefix), kind) for name, kind in others.items()):
        if name in values and values[name].is_floating_point():
            raise CheckpointMismatchError(f"{name} must have floating-point numbers, got {kind} in the checkpoint.")
    optional = tuple((config.tie_word_embeddings and model._tied_weights_keys) or ())
    if set(config.architectures or []) - {model_class.__name__}:
        optional += HEADS
    check_weights(declared, stored, numbers, optional)


def write_check(model, folder: str | os.PathLike):
    """Write the summaries of the weights that a model has saved to `folder`. A folder without them is not checked."""
    other = distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0
    if other or getattr(model, "_hf_peft_config_loaded", False):
        return  # adapters alone are saved, or another process saves
    single, index = (Path(folder, name) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
    Path(folder, FILE).unlink(missing_ok=True)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.device("cpu"))
            names = [single.name] if single.exists() else {*json.loads(index.read_text())["weight_map"].values()}
            files = [stack.enter_context(safe_open(Path(folder, name), "pt")) for name in names]
            places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            sizes = {name: math.prod(file.get_slice(name).get_shape()) for name, file in places.items()}
            if (size := sum(sizes.values())) > LARGEST:
                raise ValueError(f"the model has more than {LARGEST:,} parameters")
            length = max(16, min(256, 2**30 // size // 16 * 16, model.config.max_position_embeddings))
            find = {name: partial(file.get_tensor, name) for name, file in places.items()}
            dtype = str(find[max(sizes, key=sizes.get)]().dtype).removeprefix("torch.")
            saved = {"class": type(model).__name__, "dtype": dtype, "length": length}
            blocks = summaries(type(model), model.config, lambda name: find[name](), length, head=True)
        Path(folder, FILE).write_text(json.dumps(saved | {"blocks": blocks}, indent=1), encoding="utf-8")
    except Exception as error:  # whatever it is, the model is saved
        logger.warning("%s has no self-check: %s", folder, error)


extensions.register(check_before_loading=check_before_loading, write_check=write_check)
