"""List the presets and recipes, or show one: what it is, and the command that trains it.

The rate is the learning rate that a training of a preset has unless one is given: the best of those that were
measured, or that of a paper, which was not tried. Minutes are those of the recipe on one core of a CPU.

Example:
    python scripts/presets.py
    python scripts/presets.py tnn-small
    python scripts/presets.py lra/small-text
"""

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tnn_programs.cli.errors import report_errors

import yaml

from tnn_programs.cli.model_path import configuration_folder, did_you_mean, preset_folders, recipe_files
from tnn_programs.cli.parser import ProgramParser
from tnn_programs.cli.training_arguments import PresetTraining, read_presets

START, PAPERS, SIGNALS = "Start here", "Of the papers", "Signals and time series"
# Folder of presets -> the title of their table.
GROUPS = {"lra": "Long Range Arena", "peers": "Other models, to compare with"}
HEADS = ("preset", "kind", "parameters", "rate", "from", "minutes", "recipe")
# Kind of a preset, or folder of a recipe -> the subcommand that trains it; `pretrain` for all others.
TRAINERS = {"classifier": "lra", "images": "images", "lra": "lra", "synthetic": "synthetic", "ablations": "ablation"}


def grouped_presets() -> dict[str, list[PresetTraining]]:
    """The presets of each table."""
    groups: dict[str, list[PresetTraining]] = {title: [] for title in (START, PAPERS, SIGNALS, *GROUPS.values())}
    for preset in read_presets().values():
        usual = SIGNALS if preset.kind == "signals" else PAPERS if preset.minutes is None else START
        groups[GROUPS.get(preset.name.partition("/")[0], usual)].append(preset)
    return groups


def cells(preset: PresetTraining) -> tuple[str, ...]:
    """A row of a table, in the order of `HEADS`."""
    rate = "" if preset.learning_rate is None else f"{preset.learning_rate:g}"
    origin = ("measured" if preset.figures else "paper") if rate else ""
    minutes = "" if preset.minutes is None else f"{preset.minutes:g}"
    return preset.name, preset.kind, f"{preset.parameters:,}", rate, origin, minutes, preset.recipe or ""


def about(name: str) -> str:
    """The comment at the beginning of a recipe, or its task and preset."""
    text = recipe_files()[name].read_text(encoding="utf-8")
    comment = " ".join(line[1:].strip() for line in re.match(r"(#[^\n]*\n)*", text)[0].splitlines())
    options = yaml.safe_load(text)
    return comment or f"The task {options['task']} with the preset `{options['config_name']}`."


def trainer_of(recipe: str) -> str:
    """The subcommand that reads a recipe."""
    return "finetune-glue" if recipe == "glue" else TRAINERS.get(recipe.partition("/")[0], "pretrain")


def command_of(preset: PresetTraining) -> str:
    """The command that trains a preset, by its recipe if it has one. No command trains one for signals."""
    if preset.kind == "signals":
        return "transformers' Trainer, as docs/guides/signals.md shows"
    short, needed = preset.name.rpartition("/")[2], {"masked": {"objective": "mlm"}, "classifier": {"task": "TASK"}}
    options = {"recipe": preset.recipe} if preset.recipe else needed.get(preset.kind, {})
    options |= {"config_name": short, "learning_rate": preset.learning_rate, "output_dir": f"outputs/{short}"}
    words = [f"--{name} {value}" for name, value in options.items() if value is not None]
    return " ".join(["tnn", TRAINERS.get(preset.kind, "pretrain"), *words])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> Iterator[str]:
    """Lines with aligned columns, those called `left` to the left. It does without tabulate, which is an extra."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        columns = zip(heads, row, widths, strict=True)
        line = "  ".join(f"{cell:{'<' if head in left else '>'}{width}}" for head, cell, width in columns)
        yield f"  {line.rstrip()}"


def listing() -> Iterator[str]:
    """Lines on all presets and recipes."""
    for title, presets in grouped_presets().items():
        yield f"{title}:"
        yield from table(HEADS, [cells(preset) for preset in presets], ("preset", "kind", "from", "recipe"))
        yield ""
    yield "Recipes (--recipe NAME):"
    heads = ("recipe", "command", "what")
    rows = [(name, f"tnn {trainer_of(name)}", textwrap.shorten(about(name), 100, placeholder=" ..."))
            for name in recipe_files()]  # fmt: skip
    yield from table(heads, rows, heads)
    yield ""
    yield "`tnn presets NAME` shows a preset or a recipe, `--config_name NAME` and `--recipe NAME` take one."


def describe_preset(preset: PresetTraining) -> Iterator[str]:
    """Lines on a preset: its training and its file."""
    yield f"preset {preset.name}: {preset.kind}, {preset.parameters:,} parameters"
    if preset.learning_rate is not None:
        yield f"  learning rate  {preset.learning_rate:g} ({preset.source}), schedule {preset.lr_scheduler_type}"
    yield f"  train it       {command_of(preset)}"
    yield from contents(configuration_folder() / preset.name / "config.json")


def describe_recipe(name: str) -> Iterator[str]:
    """Lines on a recipe: its command and its file."""
    yield f"recipe {name}: {about(name)}"
    yield f"  train by it    tnn {trainer_of(name)} --recipe {name} --output_dir outputs/{name.rpartition('/')[2]}"
    yield from contents(recipe_files()[name])


def contents(file: Path) -> Iterator[str]:
    yield f"  {file}"
    yield textwrap.indent(file.read_text(encoding="utf-8").rstrip(), "    ")


def description(name: str) -> Iterator[str]:
    """Lines on the preset or the recipe called `name`, or on both."""
    presets = {}
    for full, preset in read_presets().items():
        presets |= {full: preset, full.rpartition("/")[2]: preset}
    if name not in presets and name not in recipe_files():
        hint = did_you_mean(name, [*preset_folders(), *recipe_files()])
        raise ValueError(f"The name must be that of a preset or a recipe, got {name}{hint} `tnn presets` lists them.")
    if name in presets:
        yield from describe_preset(presets[name])
    if name in recipe_files():
        yield from describe_recipe(name)


@report_errors
def main():
    parser = ProgramParser(description=__doc__)
    parser.add_argument("name", nargs="?", help="Name of a preset or of a recipe; all are listed without one.")
    name = parser.parse_args().name
    sys.stdout.write("\n".join(listing() if name is None else description(name)) + "\n")


if __name__ == "__main__":
    main()
