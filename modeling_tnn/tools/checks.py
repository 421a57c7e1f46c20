"""Checks of a checkpoint before it is loaded.

A configuration may declare any size, and transformers allocates it before it compares it with the weights. The checks
here come first. They compare the names and shapes in the headers of the safetensors files with the model on the meta
device, and with the index of a checkpoint in several files. Values are not checked: safetensors has no checksums. Each
method of quantization packs numbers under other names and in other shapes: there the total alone is compared.
"""

import json
import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ..extensions import extensions
from ..hub import present_name

logger = logging.getLogger(__name__)

# Arguments of `from_pretrained` that say where files are.
LOCATION_KWARGS = ("cache_dir", "local_files_only", "token", "revision", "subfolder")

# Arguments that disable the checks: the weights come from elsewhere, or may have other sizes or names.
UNCHECKED_KWARGS = ("state_dict", "gguf_file", "variant", "force_download", "ignore_mismatched_sizes", "key_mapping")

# Prefixes of the parameters of heads. All other parameters are the body, which all models share.
HEADS = ("lm_head.", "transform.", "classifier.", "qa_outputs.")

TOO_MUCH = "The configuration declares more than the checkpoint holds"


class CheckpointMismatchError(ValueError, RuntimeError):
    """The error for a configuration that does not fit the weights. For wrong sizes transformers has RuntimeError."""


def find_weights(find: Callable[[str], str | None]) -> dict[str, list[str]]:
    """Return the safetensors files that `find` finds, each with the tensors that the index places in it."""
    if (single := find(SAFE_WEIGHTS_NAME)) is not None:
        return {single: []}
    if (index := find(SAFE_WEIGHTS_INDEX_NAME)) is None:
        return {}
    files = {}
    for name, tensors in sorted(read_index(index).items()):
        if (file := find(name)) is None:
            raise ValueError(f"The checkpoint is incomplete: {index} names {name}, which is missing.")
        files[file] = tensors
    return files


def read_index(index: str) -> dict[str, list[str]]:
    """Return the tensors in each file of a checkpoint in several files."""
    try:
        placed = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].items()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
    files: dict[str, list[str]] = {}
    for tensor, name in placed:
        # An index must not make the loader read files outside its folder.
        beside = isinstance(name, str) and PurePosixPath(name.replace("\\", "/")).name == name
        if not (beside and name.endswith(".safetensors")):
            raise ValueError(f"The file of {tensor} in {index} must be a safetensors file beside it, got {name!r}")
        files.setdefault(name, []).append(tensor)
    return files


def shapes_of(files: dict[str, list[str]]) -> dict[str, torch.Size]:
    """Return the name and shape of every tensor in safetensors files, read from their headers."""
    shapes = {}
    for file, indexed in files.items():
        try:
            with safe_open(file, framework="pt") as tensors:
                found = {name: torch.Size(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error
        # Tied weights may be in a file without being in the index.
        if missing := sorted(set(indexed) - found.keys()):
            raise ValueError(f"{file} does not fit its index: {missing[0]} is missing in it.")
        shapes |= found
    return shapes


def check_number_of_layers(declared: int, stored: Collection[str]):
    """Compare the number of layers, unless it is small: a thousand layers take seconds, even without memory."""
    held = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    if declared > max(128, 2 * len(held)):
        raise CheckpointMismatchError(f"{TOO_MUCH}: {declared} layers instead of {len(held)}.")


def check_sizes(declared: dict[str, torch.Size], stored: dict[str, torch.Size]):
    """Compare the shapes of a model with those of a checkpoint.

    Parameters that the checkpoint lacks, as those of a head, are initialised, as in transformers. They must have
    fewer numbers than the whole checkpoint.
    """
    wrong = [
        f"{name} must be {tuple(stored[name])}, got {tuple(shape)}"
        for name, shape in declared.items()
        if name in stored and shape != stored[name]
    ]
    if wrong:
        raise CheckpointMismatchError(
            f"The configuration does not fit the weights: {'; '.join(wrong[:3])} ({len(wrong)} in all). "
            "Load with ignore_mismatched_sizes=True to initialise these parameters instead."
        )
    missing = [name for name in declared if name not in stored]
    if sum(declared[name].numel() for name in missing) > sum(shape.numel() for shape in stored.values()):
        raise CheckpointMismatchError(f"{TOO_MUCH}: {len(missing)} parameters are missing, such as {missing[0]}.")


def check_names(declared: Collection[str], stored: Collection[str], saved_as: Collection[str]):
    """Compare the names of a model with those of a checkpoint of plain tensors, which was `saved_as` other classes.

    A model may have additional parameters, which are initialised, or lack some of the checkpoint. If both occur, the
    names are damaged or it is another model, and random weights would pass for trained ones. A checkpoint of other
    classes may lack the head of the model and have one of its own.
    """
    left_over = [name for name in stored if name not in declared and not name.startswith(HEADS)]
    missing = [name for name in declared if name not in stored and not (saved_as and name.startswith(HEADS))]
    if missing and left_over:
        owners = " or ".join([*sorted(saved_as), "another model"])
        raise CheckpointMismatchError(
            f"The weights are damaged or belong to {owners}: {missing[0]} is missing, and {left_over[0]} is not in "
            "the model. Load with ignore_mismatched_sizes=True to use the weights that fit."
        )


def check_function(config: PreTrainedConfig, trained: dict):
    """Compare the operator and the direction of a model with those of `trained`, the configuration of the weights.

    The weights of two operators, and of both directions, may have the same names and shapes. Another direction is a
    warning.
    """
    if config.tno_type != (tno_type := trained.get("tno_type", type(config).tno_type)):
        raise CheckpointMismatchError(
            f"`tno_type` must be {tno_type!r} for these weights, got {config.tno_type!r}. Leave tno_type out, or "
            "build an untrained model with from_config."
        )
    if config.causal != (causal := trained.get("causal", type(config).causal)):
        logger.warning(
            f"The weights were trained with causal={causal} and are loaded with causal={config.causal}. The outputs "
            "change, so the model needs further training."
        )


def check_before_loading(model_class: type[PreTrainedModel], source, options: dict):
    """Check the files that `from_pretrained(source, **options)` will load.

    Raises:
        ValueError: a file is missing or damaged, or an index is invalid or names a file outside its folder.
        CheckpointMismatchError: the configuration does not fit the weights.
    """
    where = {name: options[name] for name in LOCATION_KWARGS if options.get(name)}
    if source is None or any(options.get(name) not in (None, False) for name in UNCHECKED_KWARGS):
        return
    find = partial(cached_file, source, _raise_exceptions_for_missing_entries=False, **where)
    if not (files := find_weights(find)):
        return
    config = options.get("config")
    if not isinstance(config, PreTrainedConfig):
        # Fields of the configuration may be among the options.
        given = where | {name: value for name, value in options.items() if name not in ("config", *LOCATION_KWARGS)}
        config, _ = model_class.config_class.from_pretrained(config or source, return_unused_kwargs=True, **given)
    if (beside := find(CONFIG_NAME)) is not None:
        trained, _ = PreTrainedConfig.get_config_dict(Path(beside).parent)
        check_function(config, trained)
    # The names of the body may have a prefix in both, and those of the checkpoint may be of an earlier version.
    prefix = f"{model_class.base_model_prefix}."
    stored = {present_name(name).removeprefix(prefix): shape for name, shape in shapes_of(files).items()}
    check_number_of_layers(config.num_hidden_layers, stored)
    with torch.device("meta"):
        model = model_class(config)
    declared = {name.removeprefix(prefix): value.shape for name, value in model.state_dict().items()}
    if getattr(config, "quantization_config", None) is not None:
        size = sum(Path(file).stat().st_size for file in files)
        numbers = sum(shape.numel() for name, shape in declared.items() if not name.startswith(HEADS))
        if numbers > 8 * size:  # less than a bit for each
            raise CheckpointMismatchError(f"{TOO_MUCH}: {numbers:,} numbers in {size:,} bytes.")
        return
    check_sizes(declared, stored)
    tied = (config.tie_word_embeddings and model._tied_weights_keys) or ()
    names = [name for name in declared if name not in tied]
    check_names(names, stored, set(config.architectures or []) - {model_class.__name__})


extensions.register(check_before_loading=check_before_loading)
