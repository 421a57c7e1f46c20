"""List the presets and recipes, or show one: what it is, and the command that trains it.

The rate is the learning rate that a training of a preset has unless one is given: the best of those that were
measured, or that of a paper, which was not tried. Minutes are those of the recipe on one core of a CPU.

Example:
    python scripts/presets.py
    python scripts/presets.py tnn-small
    python scripts/presets.py lra/small-text
"""

import argparse
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tnn_scripts.common.errors import report_errors

import yaml

from tnn_scripts.common.model_path import configuration_folder, nearest, preset_folders, recipe_files
from tnn_scripts.common.parser import ProgramParser
from tnn_scripts.common.training_arguments import PresetTraining, read_presets

# The title of a table -> the presets that belong to it, if they belong to none before.
GROUPS = {
    "Long Range Arena": lambda preset: preset.name.startswith("lra/"),
    "Other models, to compare with": lambda preset: preset.name.startswith("peers/"),
    "Start here": lambda preset: preset.minutes is not None,
    "Of the papers": lambda preset: True,
}
ORDER = ("Start here", "Of the papers", "Long Range Arena", "Other models, to compare with")
HEADS = ("preset", "kind", "parameters", "rate", "from", "minutes", "recipe")
# Kind of a preset, or folder of a recipe -> the subcommand that trains it; `pretrain` for all others.
TRAINERS = {"classifier": "lra", "images": "images", "lra": "lra", "synthetic": "synthetic", "ablations": "ablation"}


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("name", nargs="?", help="Name of a preset or of a recipe; all are listed without one.")
    return parser.parse_args()


def grouped_presets() -> dict[str, list[PresetTraining]]:
    """The presets of each table."""
    groups: dict[str, list[PresetTraining]] = {title: [] for title in ORDER}
    for preset in read_presets().values():
        groups[next(title for title, belongs in GROUPS.items() if belongs(preset))].append(preset)
    return groups


def cells(preset: PresetTraining) -> tuple[str, ...]:
    """A row of a table, in the order of `HEADS`."""
    rate = "" if preset.learning_rate is None else f"{preset.learning_rate:g}"
    origin = ("measured" if preset.figures else "paper") if rate else ""
    minutes = "" if preset.minutes is None else f"{preset.minutes:g}"
    return preset.name, preset.kind, f"{preset.parameters:,}", rate, origin, minutes, preset.recipe or ""


def about(recipe: Path) -> str:
    """The comment at the beginning of a recipe, or its task and preset."""
    text = recipe.read_text(encoding="utf-8")
    comment = " ".join(line[1:].strip() for line in re.match(r"(#[^\n]*\n)*", text)[0].splitlines())
    options = yaml.safe_load(text)
    return comment or f"The task {options['task']} with the preset `{options['config_name']}`."


def trainer_of(recipe: str) -> str:
    """The subcommand that reads a recipe."""
    return "finetune-glue" if recipe == "glue" else TRAINERS.get(recipe.partition("/")[0], "pretrain")


def command_of(preset: PresetTraining) -> str:
    """The command that trains a preset, by its recipe if it has one."""
    options = (
        {} if preset.recipe is None else yaml.safe_load(recipe_files()[preset.recipe].read_text(encoding="utf-8"))
    )
    program, short = TRAINERS.get(preset.kind, "pretrain"), preset.name.rpartition("/")[2]
    words = ["tnn", program] + (["--recipe", preset.recipe] if preset.recipe else [])
    if options.get("config_name") != short:
        words += ["--config_name", short]
    if preset.recipe and preset.learning_rate != options.get("learning_rate"):
        words += ["--learning_rate", f"{preset.learning_rate:g}"]
    if preset.kind == "masked" and not preset.recipe:
        words += ["--objective", "mlm"]
    if program == "pretrain" and "dataset_name" not in options:
        words += ["--train_file", "my.txt"]
    if program == "lra" and "task" not in options:
        words += ["--task", "TASK"]
    return shlex.join([*words, "--output_dir", f"outputs/{short}"])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> Iterator[str]:
    """Lines with aligned columns, those called `left` to the left."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        columns = zip(heads, row, widths, strict=True)
        yield (
            "  " + "  ".join(f"{cell:{'<' if head in left else '>'}{width}}" for head, cell, width in columns).rstrip()
        )


def listing() -> Iterator[str]:
    """Lines on all presets and recipes."""
    for title, presets in grouped_presets().items():
        yield f"{title}:"
        yield from table(HEADS, [cells(preset) for preset in presets], ("preset", "kind", "from", "recipe"))
        yield ""
    yield "Recipes (--recipe NAME):"
    rows = [
        (name, f"tnn {trainer_of(name)}", textwrap.shorten(about(file), 100, placeholder=" ..."))
        for name, file in recipe_files().items()
    ]
    yield from table(("recipe", "command", "what"), rows, ("recipe", "command", "what"))
    yield ""
    yield "`tnn presets NAME` shows a preset or a recipe, `--config_name NAME` and `--recipe NAME` take one."


def describe_preset(preset: PresetTraining) -> Iterator[str]:
    """Lines on a preset: its file, its training and its fields."""
    file = configuration_folder() / preset.name / "config.json"
    yield f"preset {preset.name}: {preset.kind}, {preset.parameters:,} parameters"
    yield f"  configuration  {file}"
    if preset.learning_rate is not None:
        yield f"  learning rate  {preset.learning_rate:g} ({preset.source}), schedule {preset.lr_scheduler_type}"
    if preset.minutes is not None:
        yield f"  minutes        {preset.minutes:g} on one core of a CPU"
    yield f"  train it       {command_of(preset)}"
    yield f'  in Python      modeling_tnn.load_preset("{preset.name}")'
    yield "  fields"
    for name, value in json.loads(file.read_text(encoding="utf-8")).items():
        yield f"    {name}: {json.dumps(value)}"


def describe_recipe(name: str, file: Path) -> Iterator[str]:
    """Lines on a recipe: its file, its command and its options."""
    yield f"recipe {name}: {about(file)}"
    yield f"  file           {file}"
    yield f"  train by it    tnn {trainer_of(name)} --recipe {name} --output_dir outputs/{name.rpartition('/')[2]}"
    yield "  options"
    for option, value in yaml.safe_load(file.read_text(encoding="utf-8")).items():
        yield f"    {option}: {json.dumps(value)}"


def description(name: str) -> Iterator[str]:
    """Lines on the preset or the recipe called `name`, or on both.

    Raises:
        ValueError: there is neither.
    """
    presets, recipes = {}, recipe_files()
    for full, preset in read_presets().items():
        presets |= {full: preset, full.rpartition("/")[2]: preset}
    if name not in presets and name not in recipes:
        hint = nearest(name, [*preset_folders(), *recipes])
        raise ValueError(f"The name must be that of a preset or a recipe, got {name}{hint} `tnn presets` lists them.")
    if name in presets:
        yield from describe_preset(presets[name])
    if name in recipes:
        yield from describe_recipe(name, recipes[name])


@report_errors
def main():
    args = parse_arguments()
    lines = listing() if args.name is None else description(args.name)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
