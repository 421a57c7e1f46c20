"""Code that saved folders carry, so that they load where the package is not installed.

The files are flat: `modeling_tnn.py` and every file that it imports. `auto_map` in `config.json` names the classes of
all Auto classes, because a checkpoint of one head may be loaded with another head or without one. Where the package is
installed, its registered classes are used instead.
"""

import ast
import logging
import os
import shutil
from itertools import count
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

logger = logging.getLogger(__name__)

TASKS = (
    "AudioClassification", "CausalLM", "ImageClassification", "MaskedLM", "MultipleChoice", "QuestionAnswering",
    "SequenceClassification", "TimeSeriesPrediction", "TokenClassification",
)  # fmt: skip
AUTO_MAP = {"AutoConfig": "configuration_tnn.TnnConfig", "AutoModel": "modeling_tnn.TnnModel"}
AUTO_MAP |= {f"AutoModelFor{task}": f"modeling_tnn.TnnFor{task}" for task in TASKS}


def own_classes(config: PreTrainedConfig, folder: str | os.PathLike) -> dict[str, str]:
    """Return the entries of `auto_map` for a user's subclasses, whose files transformers has copied to `folder`."""
    entries = getattr(config, "auto_map", None) or {}
    modules = {name: place.partition(".")[0] for name, place in entries.items() if isinstance(place, str)}
    ours = {place.partition(".")[0] for place in AUTO_MAP.values()}
    theirs = {module for module in modules.values() if module not in ours and Path(folder, f"{module}.py").exists()}
    return {name: entries[name] for name, module in modules.items() if module in theirs}


def save_code(folder: str | os.PathLike, models: str | os.PathLike):
    """Copy the file of the models and those that it imports to `folder`. Other files of these names are renamed."""
    for file in {Path(models), *map(Path, get_relative_import_files(models))}:
        copied = Path(folder) / file.name
        if copied.exists() and copied.samefile(file):
            continue
        if copied.exists() and not defined_names(copied) & defined_names(file):  # versions of a file share names
            names = (copied.with_name(f"{file.name}.orig{number or ''}") for number in count())
            free = next(name for name in names if not name.exists())
            copied.rename(free)
            logger.warning("%s was not saved with a model. It is now %s: the model's code has its name.", copied, free)
        shutil.copy(file, copied)


def defined_names(file: Path) -> set[str]:
    """Return the names of the functions and classes of a file, none of one that cannot be read as Python."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):
        return set()
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
