"""Checks of a checkpoint before it is loaded.

A configuration may declare any size, and transformers allocates this size before it compares it with the weights. The
checks here come first. They compare the names and shapes in the headers of the safetensors files with the model on the
meta device, and with the index of a checkpoint in several files. A file that is cut off or has a damaged header is
refused. Safetensors has no checksums, so values are not checked. Every method of quantization packs numbers under
names and in shapes of its own: of quantized weights the total alone is compared.
"""

import json
import logging
from collections.abc import Collection
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

# So many layers are compared by their parameters.
FEW_LAYERS = 128

# Prefixes of the parameters of heads. All other parameters are the body, which all models share.
HEADS = ("lm_head.", "transform.", "classifier.", "qa_outputs.")


class CheckpointMismatchError(ValueError, RuntimeError):
    """The error for a configuration that does not fit the weights. For wrong sizes transformers has RuntimeError."""


def find_weights(source, where: dict) -> dict[Path, list[str]]:
    """The safetensors files of a folder or repository, each with the tensors that the index places in it.

    The result is empty if there are no files with the standard names.

    Raises:
        ValueError: the index is invalid, or names a file that is missing.
    """

    def find(name: str) -> Path | None:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **where)
        return None if found is None else Path(found)

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


def read_index(index: Path) -> dict[str, list[str]]:
    """The tensors in each file of a checkpoint in several files, according to its index.

    Raises:
        ValueError: `index` is not an index of safetensors files, or names a file outside its folder.
    """
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
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


def shapes_of(files: dict[Path, list[str]]) -> dict[str, torch.Size]:
    """The name and shape of every tensor in safetensors files, read from their headers.

    Raises:
        ValueError: a file is damaged, or holds other tensors than its index says.
    """
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
    """Compare the number of layers with that of a checkpoint: a thousand layers take seconds, even without memory.

    Raises:
        CheckpointMismatchError: the layers are many more than those of the checkpoint.
    """
    held = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    if declared > max(FEW_LAYERS, 2 * len(held)):
        raise CheckpointMismatchError(
            f"The configuration declares more than the checkpoint holds: {declared} layers instead of {len(held)}."
        )


def check_sizes(declared: dict[str, torch.Size], stored: dict[str, torch.Size]):
    """Compare the shapes of a model with those of a checkpoint.

    Parameters that the checkpoint lacks, as those of a head, are initialised, as in transformers. They must have
    fewer numbers than the whole checkpoint.

    Raises:
        CheckpointMismatchError: a parameter has another shape, or the model declares more than the checkpoint holds.
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
    missing = {name: shape for name, shape in declared.items() if name not in stored}
    if sum(shape.numel() for shape in missing.values()) > sum(shape.numel() for shape in stored.values()):
        raise CheckpointMismatchError(
            f"The configuration declares more than the checkpoint holds: {len(missing)} parameters are missing, such "
            f"as {next(iter(missing))}."
        )


def check_packed(declared: dict[str, torch.Size], size: int):
    """Compare the numbers of a model, without those of a head, with a quantized checkpoint of `size` bytes.

    Raises:
        CheckpointMismatchError: the checkpoint has less than one bit for each of them.
    """
    count = sum(shape.numel() for name, shape in declared.items() if not name.startswith(HEADS))
    if count > 8 * size:
        raise CheckpointMismatchError(
            f"The configuration declares more than the checkpoint holds: {count:,} numbers in {size:,} bytes."
        )


def check_names(declared: dict[str, torch.Size], stored: dict[str, torch.Size], saved_as: Collection[str] = ()):
    """Compare the names of a model with those of a checkpoint of plain tensors.

    A model may have additional parameters, which are initialised, or lack some of the checkpoint. If both occur, the
    names are damaged or it is another model, and random weights would pass for trained ones. A checkpoint of other
    classes may lack the head of the model and have one of its own.

    Args:
        saved_as: the names of other classes that the checkpoint was saved as.

    Raises:
        CheckpointMismatchError: names are missing, and others are left over that belong to no head.
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
    """Compare the operator and the direction of a model with those that its weights were trained for.

    `trained` is the configuration beside the weights. The weights of two operators, and of both directions, may have
    the same names and shapes. Another direction is a warning.

    Raises:
        CheckpointMismatchError: the weights belong to another operator.
    """
    tno_type = trained.get("tno_type", type(config).tno_type)
    if config.tno_type != tno_type:
        raise CheckpointMismatchError(
            f"`tno_type` must be {tno_type!r} for these weights, got {config.tno_type!r}. Leave tno_type out, or "
            "build an untrained model with from_config."
        )
    causal = trained.get("causal", type(config).causal)
    if config.causal != causal:
        logger.warning(
            "The weights were trained with causal=%s and are loaded with causal=%s. The outputs change, so the model "
            "needs further training.",
            causal,
            config.causal,
        )


def check_before_loading(model_class: type[PreTrainedModel], source, options: dict):
    """Check the files that `from_pretrained(source, **options)` will load, see `check_sizes` and `check_names`.

    Raises:
        ValueError: a file is missing or damaged.
        CheckpointMismatchError: the configuration does not fit the weights.
    """
    where = {name: options[name] for name in LOCATION_KWARGS if options.get(name)}
    if source is None or any(
        options.get(name) is not None and options[name] is not False for name in UNCHECKED_KWARGS
    ):
        return
    if not (files := find_weights(source, where)):
        return
    config = options.get("config")
    if not isinstance(config, PreTrainedConfig):
        # Fields of the configuration may be among the options.
        fields = {name: value for name, value in options.items() if name not in ("config", *LOCATION_KWARGS)}
        config, _ = model_class.config_class.from_pretrained(
            config or source, return_unused_kwargs=True, **where, **fields
        )
    if (beside := cached_file(source, CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **where)) is not None:
        trained, _ = PreTrainedConfig.get_config_dict(Path(beside).parent)
        check_function(config, model_class.config_class.rename_old(trained))
    # The names of the body may have a prefix in both, and those of the checkpoint may be of an earlier version.
    prefix = f"{model_class.base_model_prefix}."
    stored = {present_name(name).removeprefix(prefix): shape for name, shape in shapes_of(files).items()}
    check_number_of_layers(config.num_hidden_layers, stored)
    with torch.device("meta"):
        model = model_class(config)
    declared = {name.removeprefix(prefix): value.shape for name, value in model.state_dict().items()}
    if getattr(config, "quantization_config", None) is not None:
        check_packed(declared, sum(file.stat().st_size for file in files))
        return
    check_sizes(declared, stored)
    if config.tie_word_embeddings:
        declared = {name: shape for name, shape in declared.items() if name not in (model._tied_weights_keys or {})}
    check_names(declared, stored, set(config.architectures or []) - {model_class.__name__})


extensions.register(check_before_loading=check_before_loading)
