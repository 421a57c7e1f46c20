"""Command lines of the programs: recipes, presets, overrides of a configuration.

A recipe is a YAML file of options by name. `--recipe NAME` reads one of `configuration/recipes/` or another file.
Options of the command line go before those of the recipe.
"""

import sys
from pathlib import Path

import yaml
from transformers import AutoConfig, PreTrainedConfig, TrainingArguments

import modeling_tnn
from modeling_tnn.presets import configuration_folder, preset_folders
from tnn_scripts.common.nearest import nearest
from tnn_scripts.common.parser import RENAMED, ProgramParser


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


def parse_arguments(dataclasses: list[type], description: str) -> tuple:
    """Instances of `dataclasses` from recipes and the command line, the second before the first.

    Errors of their `__post_init__` end the program with their message.
    """
    parser = ProgramParser(dataclasses, description)
    recipe_help = "Options from a recipe: its name (wikitext2), or a YAML file of options by name."
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME", help=recipe_help)
    given = sys.argv[1:]
    try:
        recipes = [option for file in _recipe_files(given) for option in recipe_options(file, parser)]
        *filled, _, unknown = parser.parse_args_into_dataclasses(
            recipes + given, return_remaining_strings=True, look_for_args_file=False
        )
    except ValueError as error:
        parser.error(str(error))
    parser.refuse(unknown)
    return tuple(filled)


def recipe_options(file: str, parser: ProgramParser) -> list[str]:
    """The options of a recipe as they would stand on a command line of `parser`.

    Raises:
        ValueError: there is no such file, it is not a YAML mapping, or it has a key that is no option.
    """
    try:
        recipe = yaml.safe_load(find_recipe(file).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--recipe {file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"--recipe {file}: it must hold lines of the form `name: value`.")
    options, known = [], parser.option_names()
    for name, value in recipe.items():
        if name not in known and f"--{name}" not in RENAMED:
            raise ValueError(f"--recipe {file}: {name} is no option of this program{nearest(name, known)}")
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
    """The folder of a preset by its name, or what was given: a folder or a Hub id.

    Raises:
        ValueError: a name that begins with "tnn-" is none of a preset.
    """
    presets = {folder.name: str(folder) for folder in preset_folders().values()}
    if Path(name).exists() or not (name in presets or name.startswith("tnn-")):
        return name
    if name not in presets:
        raise ValueError(f"config={name!r} is not possible: the presets are {', '.join(sorted(presets))}.")
    return presets[name]


def find_recipe(name: str) -> Path:
    """The file of a recipe by its name, such as wikitext2 or lra/small-text, or what was given: a file.

    Raises:
        ValueError: there is neither.
    """
    folder = configuration_folder() / "recipes"
    recipes = {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.yaml"))}
    if Path(name).is_file():
        return Path(name)
    if name in recipes:
        return recipes[name]
    hint = nearest(name, recipes)
    raise ValueError(f"--recipe {name}: there is no such file, and the recipes are {', '.join(recipes)}{hint}")


def _recipe_files(given: list[str]) -> list[str]:
    pairs = zip(given, [*given[1:], ""], strict=False)  # no options: no pairs
    return [value if name == "--recipe" else name.removeprefix("--recipe=") for name, value in pairs
            if name == "--recipe" or name.startswith("--recipe=")]  # fmt: skip
