"""Code that saved folders carry, so that they load where the package is not installed.

A model that is saved puts the files of its code, flat, beside `config.json`: `modeling_tnn.py` and every file that it
imports. `auto_map` in `config.json` names the classes of all Auto classes, because a checkpoint of one head may be
loaded with another head or without one. Where the package is installed, its registered classes are used instead.
"""

import logging
import os
import shutil
from itertools import count
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

logger = logging.getLogger(__name__)

AUTO_MAP = {
    "AutoConfig": "configuration_tnn.TnnConfig",
    "AutoModel": "modeling_tnn.TnnModel",
    "AutoModelForCausalLM": "modeling_tnn.TnnForCausalLM",
    "AutoModelForImageClassification": "modeling_tnn.TnnForImageClassification",
    "AutoModelForMaskedLM": "modeling_tnn.TnnForMaskedLM",
    "AutoModelForMultipleChoice": "modeling_tnn.TnnForMultipleChoice",
    "AutoModelForQuestionAnswering": "modeling_tnn.TnnForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_tnn.TnnForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_tnn.TnnForTokenClassification",
}

# Modules of earlier versions that `auto_map` of a saved folder may name.
FORMER_MODULES = {"heads"}


def own_classes(config: PreTrainedConfig, folder: str | os.PathLike) -> dict[str, str]:
    """The entries of `auto_map` for a user's subclasses, whose files transformers has copied to `folder`."""
    entries = (getattr(config, "auto_map", None) or {}).items()
    ours = {place.partition(".")[0] for place in AUTO_MAP.values()} | FORMER_MODULES
    return {
        auto_class: place
        for auto_class, place in entries
        if isinstance(place, str)
        and (module := place.partition(".")[0]) not in ours
        and Path(folder, f"{module}.py").exists()
    }


def save_code(folder: str | os.PathLike, models: str | os.PathLike):
    """Copy the file of the models, and those that it imports, to `folder`.

    A file that is no copy of this code, but has the name of one, is moved aside.
    """
    for file in {Path(models), *map(Path, get_relative_import_files(models))}:
        copied = Path(folder) / file.name
        if not (copied.exists() and copied.samefile(file)):
            move_aside(copied, file)
            shutil.copy(file, copied)


def move_aside(found: Path, file: Path):
    """Give `found` another name if it exists and its first line is not that of `file`, as in copies of any version."""
    if not found.exists() or found.read_bytes().partition(b"\n")[0] == file.read_bytes().partition(b"\n")[0]:
        return
    names = (found.with_name(f"{found.name}.orig{number or ''}") for number in count())
    free = next(name for name in names if not name.exists())
    found.rename(free)
    logger.warning("%s was not saved with a model. It is now %s: the code of the model has its name.", found, free)
