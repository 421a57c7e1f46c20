"""The command line of every program: options with one meaning, recipes that set them, overrides of a configuration.

Options that several programs share are described in `options.yaml`; a program describes only its own. A recipe is a
YAML file of options by name, of `configuration/recipes/` or another folder. Options on the command line override those
of the recipe, and data on the command line all options that describe the recipe's data. Of `--config_overrides`, each
field does so alone.
"""

import argparse
import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from tnn_programs.cli.errors import importing, leave

import yaml

from tnn_programs.cli.commands import COMMAND_OF
from tnn_programs.cli.model_path import did_you_mean, find_config, find_recipe

if TYPE_CHECKING:  # a command line is read before this is imported
    from transformers import PreTrainedConfig

# Sections of --help -> their options, without the hyphens -> their help: of those that several programs have.
SECTIONS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text("utf-8"))
HELP = {name: text for section in SECTIONS.values() for name, text in section.items()}
OF_TRAINER = "transformers.TrainingArguments, the rest"
EXAMPLE = re.compile(r"\n\nExample:\n(.*?)(?=\n\n|\Z)", re.DOTALL)
BOOLEANS = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)
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
    "regions", "validation_contigs", "reverse_complement", "soft_masked_weight",
}  # fmt: skip


def option(default: Any = dataclasses.MISSING, text: str | None = None, **metadata) -> Any:
    """A field of a dataclass that is an option, with its help; one that several programs have is in options.yaml."""
    metadata = metadata if text is None else metadata | {"help": text}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_counts(options, *names: str, least: int = 1):
    """Check that each of these options is at least `least`, or None, which is an option that was not given."""
    for name in names:
        value = getattr(options, name)
        require(options, name, value is None or value >= least, f"at least {least}")


def require(options, name: str, holds: bool, allowed: str):
    """Raise a ValueError that says what is `allowed` for an option, and what was given, unless it `holds`."""
    if not holds:
        value = getattr(options, name)
        given = (" ".join(map(str, value)) or "nothing") if isinstance(value, list) else value
        raise ValueError(f"--{name} must be {allowed}, got {given}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that shows the default of an option as it is typed."""

    def _get_help_string(self, action):
        text, default = action.help or "", default_of(action).replace("%", "%%")
        if action.required and action.option_strings:
            return f"{text} (required)"
        return f"{text} (default: {default})" if default else text


def default_of(action: argparse.Action) -> str:
    """The default of an option as on a command line, or an empty text."""
    if action.default in (None, argparse.SUPPRESS, "", []) or action.default is False:
        return ""
    return shlex.join(map(str, action.default if isinstance(action.default, (list, tuple)) else [action.default]))


def string_to_bool(text: str) -> bool:
    """The value of an option that is true or false."""
    if text.lower() not in BOOLEANS:
        raise argparse.ArgumentTypeError(f"must be true or false, got {text}")
    return BOOLEANS[text.lower()]


class ProgramParser(argparse.ArgumentParser):
    """The parser of a program, whose docstring is the `description`. The fields of the dataclasses are its options."""

    def __init__(self, classes: Sequence[type] = (), description: str = "", **options):
        self.groups: dict[str, argparse._ArgumentGroup] = {}
        called = sys.argv[0]  # `tnn pretrain`, or a file
        options = {"allow_abbrev": False, "prog": f"python {called}" if called.endswith(".py") else called} | options
        super().__init__(usage="%(prog)s [options]", formatter_class=_Formatter, **options)
        example = EXAMPLE.search(description)
        self.summary, _, self.rest = EXAMPLE.sub("", description).strip().partition("\n\n")
        self.example = _as_called(f"Example:\n{example.group(1)}") if example else ""
        self.description = "\n\n".join(filter(None, (self.summary, self.example, self.rest)))
        self.groups = {title: self.add_argument_group(title) for title in (*SECTIONS, OF_TRAINER)}
        for one in classes:
            hints = get_type_hints(one)
            for field in dataclasses.fields(one):
                of_trainer = one.__name__ == "TrainingArguments" and field.name not in HELP
                self._add_field(field, hints[field.name], self.groups[OF_TRAINER] if of_trainer else self)

    def _add_field(self, field: dataclasses.Field, kind: Any, place: "ProgramParser | argparse._ArgumentGroup"):
        """Add the option of a field, as transformers' HfArgumentParser does, whose import would take seconds."""
        default = field_default(field)
        options = {"required": True} if default is dataclasses.MISSING else {"default": default}
        if get_origin(kind) in (Union, UnionType):
            kind = next(one for one in get_args(kind) if one is not NoneType)
        if get_origin(kind) is list:
            kind, options = get_args(kind)[0], options | {"nargs": "+"}
        if get_origin(kind) is Literal:
            kind, options = str, options | {"choices": get_args(kind)}
        if kind is bool:
            kind, options = string_to_bool, options | ({} if default is None else {"nargs": "?", "const": True})
        place.add_argument(f"--{field.name}", type=kind, **options | field.metadata)
        if default is True:
            options = {"action": "store_false", "dest": field.name, "default": False}
            place.add_argument(f"--no_{field.name}", help=field.metadata.get("help"), **options)

    def add_argument(self, *names, **options):
        name = names[0].removeprefix("--") if names else ""
        section = next((title for title in self.groups if name in SECTIONS.get(title, ())), None)
        if section is None:
            return super().add_argument(*names, **options)
        return self.groups[section].add_argument(*names, **options | {"help": HELP[name]})

    def parse_known_args(self, args=None, namespace=None):
        return super().parse_known_args(underscored(sys.argv[1:] if args is None else args), namespace)

    def parse_args(self, args=None, namespace=None):
        found, unknown = self.parse_known_args(args, namespace)
        self.refuse(unknown)
        return found

    def error(self, message: str):
        leave(message, 2)

    def refuse(self, unknown: Sequence[str]):
        """End the program if there are unknown options."""
        for argument in unknown[:1]:
            name = argument.partition("=")[0]
            if not name.startswith("--"):
                self.error(f"{argument!r} does not belong to an option")
            hint = did_you_mean(name.removeprefix("--"), self.option_names(), "--")
            self.error(f"{name} is not an option of this program{hint}")

    def option_names(self) -> list[str]:
        """The names of all options without leading hyphens."""
        return [name[2:] for name in self._option_string_actions if name[:2] == "--"]


def field_default(field: dataclasses.Field) -> Any:
    """The default of a field; `MISSING` if it must be given."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def underscored(given: Sequence[str]) -> list[str]:
    """The arguments of a command line with underscores for the hyphens in the names of options."""
    return [re.sub(r"^--[\w-]+(?==|$)", lambda name: f"--{name[0][2:].replace('-', '_')}", one) for one in given]


def _as_called(example: str) -> str:
    """The example with `tnn NAME` in place of `python scripts/NAME.py`, if the program was called as `tnn`."""
    if not sys.argv[0].startswith("tnn "):
        return example
    return re.sub(r"python scripts/(\w+)\.py", lambda match: f"tnn {COMMAND_OF[match[1]]}", example)


class Values(yaml.SafeLoader):
    """YAML with numbers such as 1e-5, which YAML 1.1 reads as text for want of a dot."""


Values.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def parse_overrides(text: str | None, known: Any = None, option: str = "--config_overrides") -> dict:
    """The overrides `name=value,name=value` of fields of `known`, a `TnnConfig` unless given. Values are YAML."""
    if known is None:
        with importing():
            from modeling_tnn.configuration_tnn import TnnConfig
        known = TnnConfig()
    pairs = [pair.partition("=") for pair in re.split(BETWEEN_OVERRIDES, text or "") if pair.strip()]
    try:
        fields = {name.strip(): yaml.load(value, Values) for name, _, value in pairs}  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{option} must have the form name=value,name=value, got {text}: {reason}") from error
    if unknown := [name for name in fields if not hasattr(known, name)]:
        hint = did_you_mean(unknown[0], vars(known))
        raise ValueError(f"{option} must be fields of {type(known).__name__}, got {', '.join(unknown)}{hint}")
    return fields


def load_config(name: str, *overrides: dict) -> "PreTrainedConfig":
    """The configuration of a preset, folder or Hub id with overrides. Derived fields follow from the new values."""
    with importing():
        from transformers import AutoConfig, PreTrainedConfig

        import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
        from tnn_programs.cli.model_path import PARTS, naming

    folder, changed = find_config(name), {}
    for given in overrides:
        changed |= given
    # Read the file: a built configuration has derived fields from the old values.
    with naming(folder, *PARTS["AutoConfig"]):
        fields, _ = PreTrainedConfig.get_config_dict(folder)
        fields["return_dict"] = True  # the programs read outputs by name
        AutoConfig.from_pretrained(folder)  # it checks what a file may ask for
        config = AutoConfig.for_model(**fields)
    try:
        return AutoConfig.for_model(**fields | changed) if changed else config
    except ValueError:
        raise
    except Exception as error:  # a value of another kind, for which each model has its own error
        listed = ",".join(f"{field}={value}" for field, value in changed.items())
        raise ValueError(f"{name} cannot have the overrides {listed}: {' '.join(str(error).split())}") from error


def parse_arguments(classes: list[type], description: str) -> tuple:
    """Instances of dataclasses from the command line and the recipes, which it overrides."""
    parser = ProgramParser(classes, description)
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME")
    options = underscored(sys.argv[1:])
    try:
        for name in reversed([*_values_of("--recipe", options)]):  # a later recipe overrides an earlier one
            options = recipe_options(name, parser, options) + options
        overrides = [*_values_of("--config_overrides", options)]  # of a field, the last value counts
        options += ["--config_overrides", ",".join(overrides)] if len(overrides) > 1 else []
        found, unknown = parser.parse_known_args(options)
        parser.refuse(unknown)
        return tuple(one(**{name: getattr(found, name) for name in one.__dataclass_fields__}) for one in classes)
    except ValueError as error:
        parser.error(str(error))


def recipe_options(file: str, parser: ProgramParser, given: list[str]) -> list[str]:
    """The options of a recipe as arguments on a command line of `parser`, but for those that `given` replaces."""
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
            raise ValueError(f"--recipe {file}: {name} is not an option of this program{did_you_mean(name, known)}")
        if value is None or REPLACED_BY.get(name) in names or (name in OF_DATA and names & DATA):
            continue
        values = value if isinstance(value, list) else [value]
        options += [f"--{name}", *(json.dumps(one) if isinstance(one, dict) else str(one) for one in values)]
    return options


def _values_of(option: str, given: list[str]) -> Iterator[str]:
    """The values of an option that takes one, each time it is given."""
    for name, value in zip(given, [*given[1:], ""], strict=False):  # no options: no pairs
        if name == option or name.startswith(f"{option}="):
            yield value if name == option else name.removeprefix(f"{option}=")
