"""Whether a configuration fits the weights that it comes with, found out before anything is allocated.

A configuration from elsewhere may declare any size. transformers allocates what it declares and compares afterwards;
here the headers of the safetensors files, which list names and shapes, are compared with the model on the meta device.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

# Arguments of `from_pretrained` that say where files are.
WHERE = ("cache_dir", "local_files_only", "token", "revision", "subfolder")
# With these, the weights are somewhere else, or of other sizes on purpose.
OTHERWISE = ("state_dict", "gguf_file", "variant", "force_download", "ignore_mismatched_sizes")


class CheckpointMismatchError(ValueError, RuntimeError):
    """The configuration does not fit the weights. transformers reports other sizes as a RuntimeError."""


def find_weights(source, where: dict) -> list[Path]:
    """The safetensors files of a folder or repository; none if they are called differently."""

    def find(name: str) -> Path | None:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **where)
        return None if found is None else Path(found)

    if (single := find(SAFE_WEIGHTS_NAME)) is not None:
        return [single]
    if (index := find(SAFE_WEIGHTS_INDEX_NAME)) is None:
        return []
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [file for name in sorted(names) if (file := find(name)) is not None]


def shapes_of(files: list[Path]) -> dict[str, torch.Size]:
    """Name and shape of every tensor in safetensors files, out of their headers."""
    shapes = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: torch.Size(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def check_sizes(declared: dict[str, torch.Size], stored: dict[str, torch.Size], prefix: str = "model."):
    """Compare the shapes of a model with those of a checkpoint; the body may have a prefix in either.

    Heads that the checkpoint lacks are initialised, as always. A body may lack parameters only as far as they are
    fewer than those that are there.

    Raises:
        CheckpointMismatchError: a parameter has another shape, or the model declares much more than there is.
    """
    stored = {name.removeprefix(prefix): shape for name, shape in stored.items()}
    declared = {name.removeprefix(prefix): shape for name, shape in declared.items()}
    wrong = [
        f"{name} {tuple(shape)} instead of {tuple(stored[name])}"
        for name, shape in declared.items()
        if name in stored and shape != stored[name]
    ]
    if wrong:
        raise CheckpointMismatchError(
            f"The configuration does not fit the weights: {', '.join(wrong[:3])} ({len(wrong)} in all). "
            "With ignore_mismatched_sizes=True they are initialised instead."
        )
    # Quantised weights are stored in parts, under longer names.
    missing = {name: shape for name, shape in declared.items() if not any(known.startswith(name) for known in stored)}
    layers = {name: shape.numel() for name, shape in missing.items() if name.startswith("layers.")}
    if sum(layers.values()) > sum(shape.numel() for shape in stored.values()):
        raise CheckpointMismatchError(
            f"The configuration declares more than the checkpoint holds: {len(layers)} parameters of layers are not "
            f"in it, such as {next(iter(layers))}."
        )


def check_before_loading(model_class: type[PreTrainedModel], source, options: dict):
    """What `from_pretrained` of `source` with `options` is about to load, see `check_sizes`.

    Raises:
        CheckpointMismatchError: the configuration does not fit the weights.
    """
    where = {name: options[name] for name in WHERE if options.get(name)}
    if source is None or any(options.get(name) is not None and options[name] is not False for name in OTHERWISE):
        return
    if not (files := find_weights(source, where)):
        return
    config = options.get("config")
    if not isinstance(config, PreTrainedConfig):
        # Fields of the configuration may be among the options.
        fields = {name: value for name, value in options.items() if name not in ("config", *WHERE)}
        config, _ = model_class.config_class.from_pretrained(
            config or source, return_unused_kwargs=True, **where, **fields
        )
    with torch.device("meta"):
        declared = model_class(config).state_dict()
    check_sizes({name: value.shape for name, value in declared.items()}, shapes_of(files))
