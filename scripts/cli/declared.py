"""Names and options of modules that take seconds to import: a command line is checked with them before.

They stand in `declared.json`, which docs/site/generate.py writes with the releases of .ci/constraints.txt. Programs
that train with transformers' Trainer have the fields of its `TrainingArguments` as options.
"""

import dataclasses
import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnn_programs.cli.errors import importing

from tnn_programs.cli.parser import field_default, option, parse_arguments

if TYPE_CHECKING:  # a command line is read before this is imported
    from transformers import TrainingArguments

DECLARED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# `module.NAME` of a table, a tuple or an Enum -> its keys or values.
NAMES: dict[str, list[str]] = DECLARED["names"]
TYPES = {kind.__name__: kind for kind in (bool, int, float, str)}


def start(options: type, description: str, program: str, *needed: str, **defaults):
    """Read the command line of a program that trains, with a dataclass of `options` and other `defaults` of Trainer.

    Then call `run` of its module in `training`, which needs the packages of `importing`.
    """
    args, given = parse_arguments([options, training_options(**defaults)], description)
    with importing("training", *needed):
        run = import_module(f"tnn_programs.training.{program}").run  # first: it names what is not installed
        training = trainer_arguments(given)
    run(args, training)


def training_options(**defaults) -> type:
    """A dataclass whose fields are transformers' `TrainingArguments` as options, with other `defaults` where given."""
    fields = []
    for name, stored in DECLARED["training"].items():
        stored = stored | {"default": defaults.get(name, stored["default"])}
        fields.append((name, TYPES[stored.pop("type")], option(**stored)))
    return dataclasses.make_dataclass("TrainingArguments", fields, kw_only=True)


def trainer_arguments(options: Any) -> "TrainingArguments":
    """The `TrainingArguments` that an instance of `training_options()` asks for; ValueError for what they lack."""
    import transformers

    known, given = transformers.TrainingArguments.__dataclass_fields__, vars(options).copy()
    for field in dataclasses.fields(options):
        if given[field.name] == field_default(known.get(field.name, field)):
            del given[field.name]
        elif field.name not in known:
            raise ValueError(f"--{field.name} is not an option with transformers {transformers.__version__}")
    return transformers.TrainingArguments(**given)
