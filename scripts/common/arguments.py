"""Command lines of the programs: recipes, presets, overrides of a configuration.

A recipe is a YAML file of options by name. `--recipe FILE` reads it; options of the command line override it.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from transformers import AutoConfig, HfArgumentParser, PreTrainedConfig, TrainingArguments

import modeling_tnn

logger = logging.getLogger("arguments")


def parse_overrides(text: str | None, known: PreTrainedConfig | None = None) -> dict:
    """`name=value,name=value` as a dictionary; values are read as YAML.

    Raises:
        ValueError: a value cannot be read, or a name is no field of the configuration `known` (of a TNN unless given).
    """
    known = known or modeling_tnn.TnnConfig()
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair.strip()]
    try:
        fields = {name.strip(): yaml.safe_load(value) for name, _, value in pairs}
    except yaml.YAMLError as error:
        raise ValueError(f"{text} cannot be read as name=value,name=value: {' '.join(str(error).split())}") from error
    if unknown := [name for name in fields if not hasattr(known, name)]:
        raise ValueError(f"a {type(known).__name__} has no field {', '.join(unknown)}: see its docstring.")
    return fields


def load_config(name: str, *overrides: dict) -> PreTrainedConfig:
    """A preset, folder or Hub id with other fields; what follows from the fields follows from the new ones."""
    # From the file: a configuration that is built has filled in what follows from the old ones.
    fields, _ = PreTrainedConfig.get_config_dict(find_config(name))
    for changed in overrides:
        fields |= changed
    return AutoConfig.for_model(**fields)


ROOT = Path(__file__).resolve().parents[2]


# Old spellings of options, which go on working, and the one that all programs have.
RENAMED = {
    "--model": "--model_name_or_path",
    "--dataset": "--dataset_name",
    "--dataset_config": "--dataset_config_name",
    "--file": "--validation_file",
    "--config": "--config_name",
    "--train_rows": "--max_train_samples",
    "--eval_rows": "--max_eval_samples",
    "--batch_size": "--per_device_train_batch_size",
    "--json": "--output_file",
}


def rename_options(given: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """`given` with the options that `parser` has under another name now; a warning names it."""
    known = {name for action in parser._actions for name in action.option_strings}
    renamed = []
    for argument in given:
        name, equals, value = argument.partition("=")
        new = RENAMED.get(name)
        if name not in known and new in known:
            logger.warning("%s is called %s now.", name, new)
            argument = f"{new}{equals}{value}"
        renamed.append(argument)
    return renamed


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Examples with their line breaks, options with their defaults."""


def parse_arguments(dataclasses: list[type], description: str) -> tuple:
    """Instances of `dataclasses` from the command line; errors of their `__post_init__` end it with their message."""
    parser = HfArgumentParser(dataclasses, description=description, formatter_class=_Help, allow_abbrev=False)
    parser.add_argument("--recipe", action="append", default=[], metavar="FILE", help="YAML file of options by name.")
    given = sys.argv[1:]
    try:
        recipes = [option for file in _recipe_files(given) for option in recipe_options(file)]
        *filled, _ = parser.parse_args_into_dataclasses(
            rename_options(recipes + given, parser), look_for_args_file=False
        )
    except ValueError as error:
        parser.error(str(error))
    return tuple(filled)


def recipe_options(file: str) -> list[str]:
    """The options of a recipe as they would stand on a command line.

    Raises:
        ValueError: there is no such file, or it is not a YAML mapping.
    """
    if not Path(file).is_file():
        raise ValueError(f"--recipe {file}: there is no such file.")
    try:
        recipe = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--recipe {file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"--recipe {file}: it must hold lines of the form `name: value`.")
    options = []
    for name, value in recipe.items():
        values = value if isinstance(value, list) else [value]
        options += [] if value is None else [f"--{name}", *map(str, values)]
    return options


def chosen_seeds(seeds: list[int] | None, training: TrainingArguments) -> list[int]:
    """Those of `--seeds`, or the one of `--seed`, which is Trainer's default unless given.

    Raises:
        ValueError: both were given, and say different things.
    """
    if seeds is None:
        return [training.seed]
    if training.seed not in (TrainingArguments.seed, *seeds):
        listed = " ".join(map(str, seeds))
        raise ValueError(f"`--seed {training.seed}` must not be given beside `--seeds {listed}`, which are trained.")
    return seeds


def find_config(name: str) -> str:
    """A preset of `configuration/` by its name, or what was given: a folder or a Hub id.

    Raises:
        ValueError: a name that begins with "tnn-" is none of a preset.
    """
    presets = {path.parent.name: str(path.parent) for path in ROOT.glob("configuration/**/config.json")}
    if Path(name).exists() or not (name in presets or name.startswith("tnn-")):
        return name
    if name not in presets:
        raise ValueError(f"config={name!r} is not possible: the presets are {', '.join(sorted(presets))}.")
    return presets[name]


def _recipe_files(given: list[str]) -> list[str]:
    pairs = zip(given, [*given[1:], ""], strict=False)  # no options: no pairs
    return [value if name == "--recipe" else name.removeprefix("--recipe=") for name, value in pairs
            if name == "--recipe" or name.startswith("--recipe=")]  # fmt: skip
