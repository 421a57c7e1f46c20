"""Write the reference pages from the code. A test compares them with what this program makes.

Example:
    python docs/site/generate.py
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig

import modeling_tnn
from modeling_tnn import TnnConfig
from modeling_tnn.presets import configuration_folder, preset_folders
from tnn_scripts.common import sequence_pairs
from tnn_scripts.common.commands import COMMANDS
from tnn_scripts.common.parser import ProgramParser, default_of
from tnn_scripts.common.preset_training import PresetTraining
from tnn_scripts.common.tables import markdown_table
from tnn_scripts.presets import HEADS, about, cells, grouped_presets, recipe_files, trainer_of

PAGES = Path(__file__).parents[1] / "reference"
NOTE = "<!-- Written by docs/site/generate.py. -->\n\n"
# A field of the docstring: "name[ (defaults to ...)]: meaning", to the next one.
FIELD = re.compile(r"^        (\w+)(?: \(defaults to (.*?)\))?: (.*?)(?=^        \w|\Z)", re.MULTILINE | re.DOTALL)
# Not chosen, but written when a model is saved.
BOOKKEEPING = ("tno_class", "converted_from")


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
        import_module(f"tnn_scripts.{COMMANDS[command][0]}").main()
    except _Stop as stopped:
        return stopped.args[0]
    finally:
        argparse.ArgumentParser.parse_known_args = parse


def command_line_page() -> str:
    """Every command with its example and its options, in sections."""
    parts = [
        "# Command line\n",
        "`tnn COMMAND` runs a program of the package; in a clone, `python scripts/NAME.py` is the same. Several "
        "programs also take the options of transformers' `TrainingArguments` that are not listed here; `--help` lists "
        "them all.\n",
        markdown_table(["command", "what it does", "program"], _commands(), texts=3) + "\n",
    ]
    for command in COMMANDS:
        parser = parser_of(command)
        summary, example, rest = parser.description_parts()
        code = "\n".join(line.removeprefix("    ") for line in example.splitlines()[1:])
        parts += [f"## tnn {command}\n", f"{summary}\n", f"```bash\n{code}\n```\n", f"{rest}\n" if rest else ""]
        for name, suite in parser.subcommands().items():
            parts += [f"### tnn {command} {name}\n", suite.description.strip().partition("\n\n")[0] + "\n"]
            parts.append(_options(suite))
        parts.append(_options(parser))
    return "\n".join(part for part in parts if part)


def _commands() -> list[list[str]]:
    rows = COMMANDS.items()
    return [[f"[`{name}`](#tnn-{name})", summary, f"`scripts/{module}.py`"] for name, (module, summary) in rows]


def _options(parser: ProgramParser) -> str:
    rows = []
    for title, actions in parser.sections():
        if title.startswith("transformers."):
            continue
        for action in actions:
            if action.option_strings == ["-h", "--help"] or isinstance(action, argparse._SubParsersAction):
                continue
            names = [name for name in action.option_strings if "-" not in name.lstrip("-")] or [action.dest]
            default = "required" if action.required else default_of(action)
            rows.append(
                [f"`{names[0]}`", default and f"`{default}`" if default != "required" else default, action.help]
            )
    cells = [[name, default, (text or "").replace("|", "\\|").replace("<", "&lt;")] for name, default, text in rows]
    return markdown_table(["option", "default", "meaning"], cells, texts=3) + "\n" if cells else ""


def presets_page() -> str:
    """The presets with their sizes and how they are trained, by use; the recipes with what they say of themselves."""
    parts = [
        "# Presets and recipes\n",
        "A preset is a configuration by name: `load_preset(name)` in Python, `--config_name NAME` on the command "
        "line. `tnn presets` lists them, `tnn presets NAME` shows the fields of one and the command that trains it. "
        "[configuration/](../../configuration/README.md) says where their values come from; where they differ from "
        "the papers is [listed](../concepts/differences.md#differences-of-the-recipes-from-the-papers). Parameters "
        "are those that are trained, with the head that the preset names. The rate is the learning rate that a "
        "training has unless one is given: the best one that was measured, or that of a paper. Minutes are those of "
        "the recipe on one core of a CPU.\n",
    ]
    columns = [HEADS[0], HEADS[1], "`tno_type`", "layers", "width", "length", *HEADS[2:]]
    for title, presets in grouped_presets().items():
        rows = [_preset_row(preset) for preset in presets]
        parts += [f"## {title}\n", markdown_table(columns, rows, texts=3) + "\n"]
    named = [[f"`{name}`", f"`tnn {trainer_of(name)}`", about(file)] for name, file in recipe_files().items()]
    parts += [
        "## Recipes\n",
        "A recipe is a file of options by name: `tnn pretrain --recipe wikitext2`. Options of the command line go "
        "before those of the recipe.\n",
        markdown_table(["recipe", "command", "what"], named, texts=3) + "\n",
    ]
    return "\n".join(parts)


def _preset_row(preset: PresetTraining) -> list[str]:
    config = AutoConfig.from_pretrained(configuration_folder() / preset.name)
    name, kind, _, rate, origin, minutes, recipe = cells(preset)
    longest = getattr(config, "max_position_embeddings", "any")  # a Bloom has none
    size = map(str, (config.num_hidden_layers, config.hidden_size, longest))
    operator, parameters = getattr(config, "tno_type", ""), f"{_parameters(config):,}"
    return [f"`{name}`", kind, operator, *size, parameters, rate, origin, minutes, recipe and f"`{recipe}`"]


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


def main():
    for name, make in GENERATED.items():
        (PAGES / name).write_text(NOTE + make(), encoding="utf-8")


if __name__ == "__main__":
    main()
