"""Command lines of the programs: recipes, presets, overrides of a configuration.

A recipe is a YAML file of options by name. `--recipe NAME` reads a recipe of `configuration/recipes/` or another file.
Options on the command line override those of the recipe, and data on the command line all options that describe the
recipe's data. Of `--config_overrides`, each field does so alone.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import field, make_dataclass
from dataclasses import fields as fields_of
from importlib import import_module
from typing import TYPE_CHECKING

from tnn_scripts.common.errors import importing

import yaml

from tnn_scripts.common.declared import changed, dataclass_like
from tnn_scripts.common.model_path import find_config, find_recipe, nearest
from tnn_scripts.common.parser import ProgramParser

if TYPE_CHECKING:  # a command line is read before these are imported
    from transformers import PreTrainedConfig

# A comma outside of brackets, which hold lists and mappings.
BETWEEN_OVERRIDES = r",(?![^\[{]*[\]}])"
# An option of a recipe, and what replaces it on the command line.
REPLACED_BY = {
    "seed": "--seeds",
    "seeds": "--seed",
    "global_batch_tokens": "--gradient_accumulation_steps",
    "gradient_accumulation_steps": "--global_batch_tokens",
}
# Other data replace those of a recipe, with all options that describe these.
DATA = {"--train_file", "--dataset_name"}
OF_DATA = {
    "train_file", "validation_file", "test_file", "dataset_name", "dataset_config_name", "dataset_path", "task_name",
    "text_column", "documents", "sentence1_key", "sentence2_key", "label_column_name", "interleave_probabilities",
}  # fmt: skip


def start(options: type, description: str, program: str, **defaults):
    """Read the command line of a program that trains, and call `run` of its module in `runs`.

    Args:
        options: a dataclass.
        defaults: those of `TrainingArguments` that are not transformers' (see `training_options`).
    """
    args, given = parse_arguments([options, training_options(**defaults)], description)
    with importing("training"):
        from transformers import TrainingArguments

        run = import_module(f"tnn_scripts.runs.{program}").run
    run(args, TrainingArguments(**defaults | changed(given)))


def parse_overrides(
    text: str | None, known: "PreTrainedConfig | None" = None, option: str = "--config_overrides"
) -> dict:
    """The overrides `name=value,name=value` as a dictionary. Values are read as YAML: `[a, b]` is a list.

    Args:
        option: what the user gave the overrides to.

    Raises:
        ValueError: a value cannot be read, or a name is not a field of `known` (by default a `TnnConfig`).
    """
    if known is None:
        with importing():
            from modeling_tnn import TnnConfig
        known = TnnConfig()
    pairs = [pair.partition("=") for pair in re.split(BETWEEN_OVERRIDES, text or "") if pair.strip()]
    try:
        fields = {name.strip(): yaml.safe_load(value) for name, _, value in pairs}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{option} must have the form name=value,name=value, got {text}: {reason}") from error
    if unknown := [name for name in fields if not hasattr(known, name)]:
        hint = nearest(unknown[0], known.to_dict())
        raise ValueError(f"{option} must be fields of {type(known).__name__}, got {', '.join(unknown)}{hint}")
    return fields


def load_config(name: str, *overrides: dict) -> "PreTrainedConfig":
    """The configuration of a preset, folder or Hub id with overrides. Derived fields follow from the new values.

    Raises:
        ValueError: it cannot be read, or its fields contradict each other.
    """
    with importing():
        from transformers import AutoConfig, PreTrainedConfig

        import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
        from tnn_scripts.common.loading import PARTS, naming

    folder, changed = find_config(name), {}
    for fields in overrides:
        changed |= fields
    # Read the file: a built configuration has derived fields from the old values.
    with naming(folder, *PARTS[AutoConfig]):
        fields, _ = PreTrainedConfig.get_config_dict(folder)
        fields["return_dict"] = True  # the programs read outputs by name
        AutoConfig.from_pretrained(folder)  # it checks what a file may ask for
        config = AutoConfig.for_model(**fields)
    if not changed:
        return config
    try:
        return AutoConfig.for_model(**fields | changed)
    except ValueError:
        raise
    except Exception as error:  # a value of another kind, for which each model has its own error
        listed = ",".join(f"{field}={value}" for field, value in changed.items())
        raise ValueError(f"{name} cannot have the overrides {listed}: {' '.join(str(error).split())}") from error


def parse_arguments(dataclasses: list[type], description: str) -> tuple:
    """Instances of `dataclasses` from recipes and the command line, which overrides the recipes.

    A ValueError in their `__post_init__` ends the program with its message.
    """
    parser = ProgramParser(dataclasses, description)
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME")
    options = sys.argv[1:]
    try:
        for name in reversed([*_values_of("--recipe", options)]):  # a later recipe overrides an earlier one
            options = recipe_options(name, parser, options) + options
        overrides = [*_values_of("--config_overrides", options)]  # of a field, the last value counts
        options += ["--config_overrides", ",".join(overrides)] if len(overrides) > 1 else []
        found, unknown = parser.parse_known_args(options)
        parser.refuse(unknown)
        filled = parser.fill(found)
    except ValueError as error:
        parser.error(str(error))
    return tuple(filled)


def recipe_options(file: str, parser: ProgramParser, given: list[str]) -> list[str]:
    """The options of a recipe as arguments on a command line of `parser`, but for those that `given` replaces.

    Raises:
        ValueError: the recipe is missing, is not a YAML mapping, or has a key that is not an option.
    """
    try:
        recipe = yaml.safe_load(find_recipe(file).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--recipe {file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"--recipe must hold lines of the form `name: value`, got {file}")
    options, known = [], parser.option_names()
    names = {argument.partition("=")[0] for argument in given}
    for name, value in recipe.items():
        if name not in known:
            raise ValueError(f"--recipe {file}: {name} is not an option of this program{nearest(name, known)}")
        if value is None or REPLACED_BY.get(name) in names or (name in OF_DATA and names & DATA):
            continue
        values = value if isinstance(value, list) else [value]
        options += [f"--{name}", *(json.dumps(one) if isinstance(one, dict) else str(one) for one in values)]
    return options


def training_options(**defaults) -> type:
    """A dataclass like transformers' `TrainingArguments`, whose fields are options of a program.

    Args:
        defaults: other defaults than transformers'; None for a field that is None unless it is given.
    """
    like = dataclass_like("transformers.training_args", "TrainingArguments")
    kinds = {one.name: one.type for one in fields_of(like)}
    changed = [(name, kinds[name] | None if value is None else kinds[name], field(default=value))
               for name, value in defaults.items()]  # fmt: skip
    return make_dataclass(like.__name__, changed, bases=(like,), kw_only=True)


def _values_of(option: str, given: list[str]) -> Iterator[str]:
    """The values of an option that takes one, each time it is given."""
    for name, value in zip(given, [*given[1:], ""], strict=False):  # no options: no pairs
        if name == option or name.startswith(f"{option}="):
            yield value if name == option else name.removeprefix(f"{option}=")
