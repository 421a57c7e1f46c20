"""Code that saved folders carry, so that they load where the package is not installed.

The files are flat: `modeling_tnn.py` and every file that it imports. `auto_map` in `config.json` names the classes of
all Auto classes, because a checkpoint of one head may be loaded with another head or without one. Where the package is
installed, its registered classes are used instead.

A user's operator travels too: its file is copied with imports of the package made relative, and `auto_map` names the
same classes in `operators_tnn.py`, which imports the operator before them.
"""

import ast
import logging
import os
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

from .extensions import extensions

logger = logging.getLogger(__name__)

TASKS = (
    "AudioClassification", "CausalLM", "ImageClassification", "MaskedLM", "MultipleChoice", "QuestionAnswering",
    "SequenceClassification", "TimeSeriesPrediction", "TokenClassification",
)  # fmt: skip
AUTO_MAP = {"AutoConfig": "configuration_tnn.TnnConfig", "AutoModel": "modeling_tnn.TnnModel"}
AUTO_MAP |= {f"AutoModelFor{task}": f"modeling_tnn.TnnFor{task}" for task in TASKS}
WITH_OPERATORS = "operators_tnn"


def own_classes(config: PreTrainedConfig, folder: str | os.PathLike) -> dict[str, str]:
    """Return the entries of `auto_map` for a user's subclasses, whose files transformers has copied to `folder`."""
    entries = getattr(config, "auto_map", None) or {}
    modules = {name: place.partition(".")[0] for name, place in entries.items() if isinstance(place, str)}
    ours = {place.partition(".")[0] for place in AUTO_MAP.values()} | {WITH_OPERATORS}
    theirs = {module for module in modules.values() if module not in ours and Path(folder, f"{module}.py").exists()}
    return {name: entries[name] for name, module in modules.items() if module in theirs}


def save_code(folder: str | os.PathLike, models: str | os.PathLike, operators: Mapping[str, type]) -> dict[str, str]:
    """Copy the file of the models, those that it imports and those of a user's operators to `folder`.

    Other files of these names are renamed. Return `auto_map`. An operator that cannot travel is a warning, so that the
    model is saved: where it is loaded, its module has to be imported first.
    """
    carried = {Path(models), *map(Path, get_relative_import_files(models))}
    for file in carried:
        save_file(file, file.read_bytes(), folder)
    if not operators:
        return AUTO_MAP
    lines = ["from .tno_auto import register_operator"]
    for name, cls in operators.items():
        try:
            file = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "a notebook")
            save_file(file, extensions.operator_code(cls, file, carried), folder)
        except (ValueError, SyntaxError, OSError) as error:
            why = "The operator %r does not travel with %s, and must be imported before it is loaded: %s"
            logger.warning(why, name, folder, error)
            return AUTO_MAP
        lines += [f"from .{file.stem} import {cls.__name__}", f"register_operator({name!r}, {cls.__name__})"]
    lines += [f"from .{module} import {name}" for module, name in (place.split(".") for place in AUTO_MAP.values())]
    Path(folder, f"{WITH_OPERATORS}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {auto: f"{WITH_OPERATORS}.{place.partition('.')[2]}" for auto, place in AUTO_MAP.items()}


def save_file(file: Path, code: bytes, folder: str | os.PathLike):
    """Write the `code` of a file to `folder`. Another file of this name, not a version of it, is renamed."""
    copied = Path(folder, file.name)
    if copied.exists() and copied.samefile(file):
        if copied.read_bytes() != code:
            raise ValueError(f"{file} would be overwritten")
        return
    if copied.exists() and not defined_names(copied.read_bytes()) & defined_names(code):  # versions share names
        names = (copied.with_name(f"{file.name}.orig{number or ''}") for number in count())
        free = next(name for name in names if not name.exists())
        copied.rename(free)
        logger.warning("%s was not saved with a model. It is now %s: the model's code has its name.", copied, free)
    copied.write_bytes(code)


def defined_names(code: bytes) -> set[str]:
    """Return the names of the functions and classes of a file, none of one that cannot be read as Python."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return set()
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
