"""Write the reference pages from the code, and what command lines are checked with. Tests compare both.

Example:
    python docs/site/generate.py
"""

import argparse
import enum
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

import modeling_tnn
import tnn_programs
from modeling_tnn import TnnConfig
from modeling_tnn.presets import configuration_folder, preset_folders
from modeling_tnn.tools import sequence_pairs
from tnn_programs.cli.commands import COMMANDS
from tnn_programs.cli.declared import TYPES
from tnn_programs.cli.generation_fields import OF_JSON
from tnn_programs.cli.parser import HELP, OF_TRAINER, SECTIONS, ProgramParser, default_of
from tnn_programs.cli.tables import markdown_table
from tnn_programs.cli.training_arguments import PresetTraining
from tnn_programs.presets import about, cells, grouped_presets, recipe_files, trainer_of

PAGES = Path(__file__).parents[1] / "reference"
DECLARED = Path(tnn_programs.__file__).parent / "cli" / "declared.json"
# Tables, tuples and Enums whose names options take.
NAMES = (
    "tnn_programs.data.glue.FUNCTIONS",
    "tnn_programs.data.glue.TASKS",
    "tnn_programs.data.lra.TASKS",
    "tnn_programs.original.architectures.ARCHITECTURES",
    "tnn_programs.original.architectures.HEADS",
    "tnn_programs.training.costs.PEAKS",
    "tnn_programs.training.plan.ENGINES",
    "transformers.trainer_utils.SchedulerType",
    "transformers.training_args.OptimizerNames",
)
NOTE = "<!-- Written by docs/site/generate.py. -->\n\n"
# A field of the docstring: "name[ (defaults to ...)]: meaning", to the next one.
FIELD = re.compile(r"^        (\w+)(?: \(defaults to (.*?)\))?: (.*?)(?=^        \w|\Z)", re.MULTILINE | re.DOTALL)
# The pages that explain the commands; the text of --help is in the page of the others.
GUIDES = {
    "demo": ("Start", "../start.md"),
    "pretrain": ("Pretrain", "../guides/pretrain.md"),
    "finetune-glue": ("Fine-tune", "../guides/finetune.md"),
    "plan": ("GPUs and memory", "../guides/devices.md"),
    "evaluate": ("Long sequences", "../guides/long.md"),
    "generate": ("Generate", "../guides/generate.md"),
    "serve": ("Serve", "../guides/serve.md"),
    "api": ("Serve", "../guides/serve.md#an-api"),
    "plot-kernels": ("Look at the kernels", "../guides/kernels.md"),
    "to-recurrent": ("Convert", "../guides/convert.md"),
    "convert": ("Convert", "../guides/convert.md#checkpoints-of-the-released-implementations"),
    "push": ("Publish and load", "../guides/publish.md"),
    "images": ("Images", "../guides/images.md"),
    "lra": ("Tasks of the papers", "../research/tasks.md"),
    "synthetic": ("Tasks of the papers", "../research/tasks.md#synthetic-tasks"),
    "ablation": ("Tasks of the papers", "../research/tasks.md#ablations"),
}
# Not chosen, but written when a model is saved.
BOOKKEEPING = ("layer_types", "tno_class", "converted_from")


def configuration_page() -> str:
    """Every field of TnnConfig with its type, default, meaning, and the presets that set another value."""
    described = FIELD.findall(TnnConfig.__doc__.split("Args:\n")[1].split("    Raises:")[0])
    described = {name: (default, " ".join(meaning.split())) for name, default, meaning in described}
    defaults = {field.name: field.default for field in fields(TnnConfig)}
    changed = defaultdict(lambda: defaultdict(list))
    for preset, folder in preset_folders().items():
        saved = json.loads((folder / "config.json").read_text())
        for name, value in saved.items() if saved["model_type"] == TnnConfig.model_type else ():
            if name in described and value != defaults[name]:
                changed[name][json.dumps(value)].append(preset)
    parts = [
        "# Configuration\n",
        "The fields of `TnnConfig`, in the order of the class. A default in words or with the name of a field follows "
        "from other fields. The presets named are those that set another value.\n",
    ]
    for name, (default, meaning) in described.items():
        kind = getattr(TnnConfig.__annotations__[name], "__name__", None) or str(TnnConfig.__annotations__[name])
        default = (default or "`null`") if defaults[name] is None else f"`{json.dumps(defaults[name])}`"
        parts.append(f"### `{name}`\n\n`{kind.removesuffix(' | None')}`, default {default}. {meaning}\n")
        if name not in BOOKKEEPING and changed[name]:
            values = (f"`{value}` in {_list(presets)}" for value, presets in sorted(changed[name].items()))
            parts.append(f"Presets: {'; '.join(values)}.\n")
    return "\n".join(parts)


def _list(presets: list[str], most: int = 4) -> str:
    named = ", ".join(presets[:most])
    return named if len(presets) <= most else f"{named} and {len(presets) - most} more"


class _Stop(Exception):
    """Carries a parser out of a program."""


def parser_of(command: str) -> ProgramParser:
    """The parser that a program makes when it is called as a subcommand of `tnn`."""

    def stop(parser, *arguments, **options):
        raise _Stop(parser)

    parse, sys.argv = argparse.ArgumentParser.parse_known_args, [f"tnn {command}"]
    argparse.ArgumentParser.parse_known_args = stop
    try:
        import_module(f"tnn_programs.{COMMANDS[command][0]}").main()
    except _Stop as stopped:
        return stopped.args[0]
    finally:
        argparse.ArgumentParser.parse_known_args = parse


def command_line_page() -> str:
    """Every command with its example and its options; options of several commands are described once."""
    parsers = {command: parser_of(command) for command in COMMANDS}
    users = {title: _users(parsers, title) for title in SECTIONS}
    parts = [
        "# Command line\n",
        "This page has every command with its options. `tnn COMMAND` runs a program of the package; in a clone, "
        "`python scripts/NAME.py` is the same. `tnn COMMAND --help` shows the options of one command.\n",
        markdown_table(["command", "what it does"], _commands(), texts=2) + "\n",
        "`--seed 0` means that the default is 0; an option without a value has no default, or is off. Names may be "
        "written with hyphens. `--no_NAME` switches off what is on unless given.\n",
        "## Shared options\n",
        "These mean the same in every command that has them. A command lists the sections that it takes, and the "
        "defaults that differ from those shown here.\n",
    ]
    for title, options in users.items():
        rows = [[_named(name, _commonest(found)), HELP[name]] for name, found in options.items()]
        parts += [f"### {title.capitalize()} options\n", _table(rows)]
    parts.append(
        "Commands that train with transformers' Trainer (`finetune-glue`, `lra`, `images`, `synthetic`, `ablation`) "
        "also take every other field of its `TrainingArguments` as an option.\n"
    )
    shared, told = {name for options in users.values() for name in options}, {}
    for command, parser in parsers.items():
        code = "\n".join(line.removeprefix("    ") for line in parser.example.splitlines()[1:])
        more = f"Guide: [{GUIDES[command][0]}]({GUIDES[command][1]})." if command in GUIDES else parser.rest
        parts += [f"## tnn {command}\n", f"{parser.summary}\n", f"```bash\n{code}\n```\n", f"{more}\n" if more else ""]
        parts += [_shared(command, users), _own(parser, shared, told, command)]
    return "\n".join(part for part in parts if part)


def _commands() -> list[list[str]]:
    return [[f"[`{name}`](#tnn-{name})", summary] for name, (_, summary) in COMMANDS.items()]


def _options(parser: ProgramParser) -> Iterator[argparse.Action]:
    """Those of the program: no help, no negation, and not the rest of TrainingArguments."""
    for group in parser._action_groups:
        for action in group._group_actions if group.title != OF_TRAINER else ():
            if not isinstance(action, argparse._HelpAction) and action.option_strings[:1] != [f"--no_{action.dest}"]:
                yield action


def _default(action: argparse.Action) -> str:
    return "(required)" if action.required and action.option_strings else default_of(action)


def _users(parsers: dict[str, ProgramParser], title: str) -> dict[str, dict[str, str]]:
    """The options of a section that at least two commands have -> these commands -> their defaults."""
    users = {name: {} for name in SECTIONS[title]}
    for command, parser in parsers.items():
        for action in _options(parser):
            if action.dest in users and action.option_strings:
                users[action.dest][command] = _default(action)
    return {name: found for name, found in users.items() if len(found) > 1}


def _commonest(defaults: dict[str, str]) -> str:
    """The default of most commands, or none."""
    values = list(defaults.values())
    most = max(values, key=values.count)
    return most if 2 * values.count(most) > len(values) else ""


def _named(name: str, default: str, unset: str = "") -> str:
    """An option with its default, as it is typed."""
    if default == "(required)":
        return f"`--{name}` (required)"
    return f"`--{name} {default}`" if default and default != "True" else f"`--{name}`{unset}"


def _shared(command: str, users: dict[str, dict[str, dict[str, str]]]) -> str:
    """The sections of shared options that a command takes."""
    lines = []
    for title, options in users.items():
        mine = {name: found for name, found in options.items() if command in found}
        listed = [_named(name, found[command]) for name, found in mine.items()]
        missing = [f"`--{name}`" for name in options if name not in mine]
        other = [
            _named(name, found[command], " unset")
            for name, found in mine.items()
            if found[command] != _commonest(found)
        ]
        short = "all" + (f" but {', '.join(missing)}" if missing else "") + (f"; {', '.join(other)}" if other else "")
        if mine:
            text = short if len(missing) + len(other) < len(listed) else ", ".join(listed)
            lines.append(f"- [{title.capitalize()}](#{title.lower()}-options): {text}.\n")
    return "".join(lines)


def _own(parser: ProgramParser, shared: set[str], told: dict[tuple, str], command: str) -> str:
    """The options of one command alone, and the names of those that an earlier command has described."""
    rows, before = [], defaultdict(list)
    for action in _options(parser):
        if action.option_strings and action.dest in shared:
            continue
        named = _named(_name(action), _default(action)) if action.option_strings else f"`{action.dest}`"
        row = (named, action.help)
        first = told.setdefault(row, command)
        if first == command:
            rows.append([named, action.help])
        else:
            before[first].append(named)
    lines = [f"As in [`tnn {first}`](#tnn-{first}): {', '.join(names)}.\n" for first, names in before.items()]
    return "\n".join([*lines, _table(rows)] if rows else lines)


def _name(action: argparse.Action) -> str:
    return next((name for name in action.option_strings if "-" not in name.lstrip("-")), action.dest).lstrip("-")


def _table(rows: list[list[str]]) -> str:
    cells = [[named, (text or "").replace("|", "\\|").replace("<", "&lt;")] for named, text in rows]
    return markdown_table(["option", "meaning"], cells, texts=2) + "\n" if cells else ""


def presets_page() -> str:
    """The presets with their sizes and how they are trained, by use; the recipes with what they say of themselves."""
    parts = [
        "# Presets and recipes\n",
        "Choose a model size. A preset is a configuration by name: `load_preset(name)` in Python, `--config_name "
        "NAME` on the command line. `tnn presets` lists them, and `tnn presets NAME` shows the fields of one and "
        "the command that trains it. [configuration/](../../configuration/README.md) says where their values come "
        "from, and [Differences](../research/differences.md#differences-of-the-recipes-from-the-papers) where they "
        "are not those of the papers.\n",
        "The size is layers x width, and the length of the training in tokens. Parameters are those that are trained, "
        "with the head of the preset. The rate is the learning rate unless one is given: the best one that was "
        "measured or, in brackets, that of a paper, which was not tried. Minutes are those of the recipe on one core "
        "of a CPU.\n",
    ]
    for title, presets in grouped_presets().items():
        rows = [_preset_row(preset) for preset in presets]
        shown = [column for column in rows[0] if any(row[column] for row in rows)]
        table = markdown_table(shown, [[row[column] for column in shown] for row in rows], texts=3)
        parts += [f"## {title}\n", table + "\n"]
    texts = {name: about(name).partition(". ")[0].removesuffix(".") for name in recipe_files()}
    plain = [f"`{name}`" for name, text in texts.items() if text.startswith("The task ")]
    named = [
        [f"`{name}`", f"`tnn {trainer_of(name)}`", text] for name, text in texts.items() if f"`{name}`" not in plain
    ]
    parts += [
        "## Recipes\n",
        "A recipe is a file of options by name: `tnn pretrain --recipe wikitext2`. Options of the command line go "
        "before those of the recipe. `tnn presets RECIPE` shows one. Recipes of a paper's size were not run here. "
        f"`tnn lra` also has {', '.join(plain)}, each with the preset of its name.\n",
        markdown_table(["recipe", "command", "what"], named, texts=3) + "\n",
    ]
    return "\n".join(parts)


def _preset_row(preset: PresetTraining) -> dict[str, str]:
    config = AutoConfig.from_pretrained(configuration_folder() / preset.name)
    name, kind, _, rate, origin, minutes, recipe = cells(preset)
    longest = getattr(config, "max_position_embeddings", "any")  # a Bloom has none
    return {
        "preset": f"`{name}`",
        "model": " ".join([kind, *getattr(config, "tno_types", ())]),
        "size": f"{config.num_hidden_layers} x {config.hidden_size}, {longest}",
        "parameters": f"{_parameters(config):,}",
        "rate": f"({rate})" if origin == "paper" else rate,
        "minutes": minutes,
        "recipe": recipe and f"`{recipe}`",
    }


def _parameters(config) -> int:
    """Of the class that the preset names, built without memory."""
    name = (config.architectures or ["TnnForSequenceClassification"])[0]
    places = (modeling_tnn, transformers, sequence_pairs)
    head = next(getattr(place, name) for place in places if hasattr(place, name))
    with torch.device("meta"):
        return head(config).num_parameters(only_trainable=True)


GENERATED = {
    "configuration.md": configuration_page,
    "command-line.md": command_line_page,
    "presets.md": presets_page,
}


def declared() -> dict:
    """What `tnn_programs.cli.declared` reads: names of the code and of the installed release of transformers."""
    names = {}
    for path in NAMES:
        module, _, name = path.rpartition(".")
        found = getattr(import_module(module), name)
        names[path] = [one.value if isinstance(one, enum.Enum) else one for one in found]
    return {"names": names, "generation": generation_fields(), "training": training_fields()}


def generation_fields() -> dict[str, list[str]]:
    """The fields of GenerationConfig with their kinds, which only its docstring has."""
    kinds = dict.fromkeys((name for name in vars(GenerationConfig()) if name[0] != "_"), [])
    for name, text in re.findall(r"^\s*(\w+) *\((.*)\):?$", GenerationConfig.__doc__, re.MULTILINE):
        outer = re.sub(r"(list|tuple|dict)[\[(].*", r"\1", text.partition("*optional*")[0].partition("defaults to")[0])
        kinds[name] = [word for word in re.findall(r"\w+", outer) if word in OF_JSON]
    return kinds


def training_fields() -> dict[str, dict]:
    """The fields of TrainingArguments as `argparse` takes them: type, default, help, and what else they have."""
    options = {}
    for action in HfArgumentParser(TrainingArguments)._actions:
        if isinstance(action, argparse._StoreAction):
            kind = "bool" if action.type is string_to_bool else getattr(action.type, "__name__", "")
            choices = list(action.choices or (isinstance(action.type, enum.EnumMeta) and action.type) or ()) or None
            made = {"type": kind if kind in TYPES else "str", "default": action.default, "choices": choices}
            made |= {name: getattr(action, name) for name in ("nargs", "const", "help")}
            found = {name: value for name, value in made.items() if value is not None or name == "default"}
            options[action.dest] = found
    return options


def main():
    DECLARED.write_text(json.dumps(declared(), indent=2) + "\n", encoding="utf-8")
    for name, make in GENERATED.items():
        (PAGES / name).write_text(NOTE + make(), encoding="utf-8")


if __name__ == "__main__":
    main()
