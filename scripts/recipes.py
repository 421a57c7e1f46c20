"""Command lines of the training scripts: dataclasses, with a recipe as their defaults.

A recipe is a YAML file of options by name. `--recipe FILE` reads it; options of the command line go before it.
"""

import argparse
import sys
from pathlib import Path

import yaml
from transformers import HfArgumentParser, TrainingArguments

ROOT = Path(__file__).resolve().parent.parent


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Examples with their line breaks, options with their defaults."""


def parse_arguments(dataclasses: list[type], description: str) -> tuple:
    """Instances of `dataclasses` from the command line; errors of their `__post_init__` end it with their message."""
    parser = HfArgumentParser(dataclasses, description=description, formatter_class=_Help, allow_abbrev=False)
    parser.add_argument("--recipe", action="append", default=[], metavar="FILE", help="YAML file of options by name.")
    given = sys.argv[1:]
    try:
        recipes = [option for file in _recipe_files(given) for option in recipe_options(file)]
        *filled, _ = parser.parse_args_into_dataclasses(recipes + given, look_for_args_file=False)
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
    pairs = zip(given, given[1:] + [""], strict=True)
    return [value if name == "--recipe" else name.removeprefix("--recipe=") for name, value in pairs
            if name == "--recipe" or name.startswith("--recipe=")]  # fmt: skip
