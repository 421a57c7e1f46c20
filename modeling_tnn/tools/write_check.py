"""What a saved model gives, as `self_check.py` compares it when the folder is loaded."""

import json
import math
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import distributed
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from ..extensions import extensions
from ..self_check import FILE, summaries

logger = logging.get_logger(__name__)
LARGEST = 2**31  # parameters, of which a check takes some seconds


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
            length = max(16, min(256, 2**31 // size, model.config.max_position_embeddings))
            find = {name: partial(file.get_tensor, name) for name, file in places.items()}
            dtype = str(find[max(sizes, key=sizes.get)]().dtype).removeprefix("torch.")
            saved = {"class": type(model).__name__, "dtype": dtype, "length": length}
            blocks = summaries(type(model), model.config, lambda name: find[name](), length, head=True)
        Path(folder, FILE).write_text(json.dumps(saved | {"blocks": blocks}, indent=1), encoding="utf-8")
    except Exception as error:  # whatever it is, the model is saved
        logger.warning("%s has no self-check: %s", folder, error)


extensions.register(write_check=write_check)
