"""The parser of every program: one meaning for each option name, an example first, options in sections.

This module describes the options that several programs share. A program describes only its own options.
"""

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tnn_scripts.common.errors import leave

from tnn_scripts.common.commands import COMMAND_OF
from tnn_scripts.common.declared import field_default
from tnn_scripts.common.model_path import nearest

# Sections of --help -> their options, without the hyphens: those that several programs have.
SECTIONS = {
    "model": {
        "model_name_or_path": "Model: a folder or a Hub id.",
        "config_name": "Preset (`tnn presets` lists them), or a folder or Hub id with a config.json. `tnn pretrain` "
        "uses tnn-tiny unless given, and tnn-bidirectional-small with --objective mlm.",
        "config_overrides": "Fields to change in the configuration, beside a recipe's: tno_type=fd,rpe_layers=3.",
        "tno_type": "Operator, instead of the configuration's: rpe, fd, ski, rtf, s4d, ...",
        "objective": "Kind of language model: clm (causal) or mlm (masked).",
        "transformer": "Train a transformer of the same width, depth and size instead of the TNN.",
        "variants": "Models to compare: name:field=value,field=value for each, with fields of the configuration.",
        "trust_remote_code": "Run Python code that comes with the model.",
    },
    "data": {
        "dataset_name": "Data: a Hub id, a folder or, for text, a file. Programs that need a text have the King James "
        "Bible. `tnn pretrain` takes several with --streaming.",
        "dataset_config_name": "Configuration of the data set; of each one if there are several.",
        "dataset_path": "Local folder or Hub id with the data of the task, instead of their usual source.",
        "task": "Task by its name, such as listops or copying.",
        "train_file": "File to train on: text, JSON, parquet or CSV.",
        "validation_file": "File to evaluate on; a language model has the end of its training text unless given.",
        "text_column": "Column of the data that holds text.",
        "documents": "Where documents end: rows (at each row), lines (nowhere), headings (as in WikiText), or columns "
        "that identify one: book,chapter. Unless given: headings if there are some, lines for text files, else rows.",
        "max_train_samples": "Train on the first so many rows.",
        "max_eval_samples": "Evaluate on the first so many rows.",
        "block_size": "Tokens in a block of text; follows from max_position_embeddings unless given.",
        "mlm_probability": "Fraction of tokens to predict with --objective mlm.",
        "length": "Number of positions of a kernel or of a signal.",
        "lengths": "Numbers of tokens in a row.",
        "longer": "Further lengths to evaluate at, in tokens.",
    },
    "training": {
        "recipe": "Options from a recipe: its name (wikitext2), or a YAML file of options by name.",
        "max_steps": "Number of optimizer steps; a positive number overrides the number of epochs.",
        "per_device_train_batch_size": "Rows on a device in a forward pass. `tnn pretrain` has 8, or what fits "
        "with --global_batch_tokens.",
        "per_device_eval_batch_size": "Rows on a device in a forward pass of the evaluation.",
        "mixed_precision": "Precision: no, bf16 or fp16; that of accelerate unless given, or no.",
        "gradient_accumulation_steps": "Forward passes in an optimizer step; they follow from --global_batch_tokens.",
        "learning_rate": "Peak of the learning rate. Unless given, `tnn pretrain` takes that of the preset, with its "
        "schedule, and `tnn finetune-glue` that of the size of a TNN.",
        "lr_scheduler_type": "Schedule of the learning rate, by the name in transformers: linear, cosine, ... "
        "`tnn pretrain` has cosine with a rate that is given.",
        "lr_scheduler_kwargs": "Further arguments of the schedule, as JSON; warmup_stable_decay needs "
        '{"num_decay_steps": N}.',
        "warmup_steps": "Steps of linear warm-up; below 1, a fraction of all steps. `tnn pretrain` has 0.1 with a "
        "rate that is given.",
        "weight_decay": "Weight decay of matrices; biases and norms have none.",
        "operator_learning_rate": "Learning rate of the Toeplitz operators, which then have no weight decay unless "
        "--operator_weight_decay is given.",
        "operator_weight_decay": "Weight decay of the matrices of the Toeplitz operators.",
        "parameter_groups": "Settings of parameters whose name a regular expression finds: "
        "PATTERN:learning_rate=X,weight_decay=X. Biases and norms stay without weight decay.",
        "optim": "Optimizer, by the name in transformers: adamw_torch, adafactor, ... `tnn pretrain` has muon too.",
        "optim_args": "Further arguments of the optimizer: name=value,name=value.",
        "adam_beta1": "First momentum of AdamW.",
        "adam_beta2": "Second momentum of AdamW.",
        "adam_epsilon": "Epsilon of AdamW.",
        "max_grad_norm": "Gradients are clipped to this norm; 0 for no clipping.",
        "max_pole_radius": "Keep the poles of RTF inside this radius, below 1: after each step or, on an accelerator, "
        "every --logging_steps. Unless given, poles outside 1 are logged.",
        "seed": "Seed of weights, order of the data, masks, dropout and sampling.",
        "sweep_learning_rates": "Learning rates to try; the best one is reported.",
        "seeds": "Train one model for each of these seeds; only --seed unless given.",
        "eval_steps": "Evaluate every so many steps.",
        "logging_steps": "Log loss, learning rate and speed every so many steps.",
        "save_total_limit": "Keep only the newest so many checkpoints.",
        "ddp_timeout": "Seconds that a process waits for the others before the run ends.",
        "resume_from_checkpoint": "Continue from a checkpoint: latest (in the output folder), auto "
        "(latest if there is one), or a folder.",
        "gradient_checkpointing": "Compute activations again in the backward pass, to save memory.",
    },
    "generation": {
        "prompt": "Text to continue.",
        "max_new_tokens": "Largest number of new tokens.",
    },
    "output": {
        "output_dir": "Folder for the results.",
        "overwrite_output_dir": "Replace the model or the unfinished run in --output_dir, which else is an error.",
        "output_file": "JSON file for the figures.",
        "dry_run": "Say what would be done, and end: parameters, tokens, time and memory of a training; the files of "
        "an upload, without contacting the Hub.",
        "report_to": "Tracker: none, tensorboard, wandb, trackio.",
    },
    "device": {
        "device": "Device: cpu, cuda, cuda:1, mps, ...; cuda if there is one, else cpu, unless given.",
        "dtype": "Data type of the weights: auto (as saved), float32, bfloat16, float16.",
        "use_cpu": "Use the CPU even if there is an accelerator.",
        "torch_compile": "Compile the model with torch.compile. `tnn pretrain` does so on a GPU unless this is false.",
        "dataloader_num_workers": "Processes that load data; `tnn pretrain` has 2 for an accelerator unless given.",
        "batch_size": "Sequences in a batch.",
    },
    "Hub": {
        "push_to_hub": "Publish the model on the Hub.",
        "hub_model_id": "Name of the repository, USER/NAME; follows from the output folder unless given.",
        "hub_private_repo": "Make a new repository private.",
        "repo_id": "Name of the repository: USER/NAME.",
    },
}
HELP = {name: text for section in SECTIONS.values() for name, text in section.items()}
EXAMPLE = re.compile(r"\n\nExample:\n(.*?)(?=\n\n|\Z)", re.DOTALL)


def option(default: Any = dataclasses.MISSING, text: str | None = None, **metadata) -> Any:
    """A field of a dataclass that is an option, with its help; one that several programs have is described above."""
    metadata = metadata if text is None else metadata | {"help": text}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_counts(options, *names: str):
    """Check that each of these options is at least 1, or None, which is an option that was not given.

    Raises:
        ValueError: one is below 1.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that shows one name of each option, the kind of its value, and its default."""

    KINDS = {int: "N", float: "X", Path: "PATH"}

    def _format_action_invocation(self, action):
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join([name for name in action.option_strings if "-" not in name[2:]] or action.option_strings)
        if action.nargs == 0 or action.const is True:
            return names
        return f"{names} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _get_default_metavar_for_optional(self, action):
        return self.KINDS.get(action.type, "TEXT")

    def _get_help_string(self, action):
        if action.required and action.option_strings:
            return f"{action.help or ''} (required)"
        default = f" (default: {default_of(action)})" if default_of(action) else ""
        return (action.help or "") + default.replace("%", "%%")


def default_of(action: argparse.Action) -> str:
    """The default of an option as on a command line, or an empty text."""
    if action.default in (None, argparse.SUPPRESS, "", []) or action.default is False:
        return ""
    return shlex.join(map(str, action.default if isinstance(action.default, (list, tuple)) else [action.default]))


def string_to_bool(text: str) -> bool:
    """The value of an option that is true or false.

    Raises:
        ArgumentTypeError: it is neither.
    """
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"must be true or false, got {text}")


class ProgramParser(argparse.ArgumentParser):
    """The parser of a program. `description` is its docstring: a summary, a text, and an example at the end.

    Args:
        classes: dataclasses whose fields are options.
    """

    def __init__(self, classes: Sequence[type] = (), description: str = "", **options):
        options = {"formatter_class": _Formatter, "allow_abbrev": False, "prog": _program()} | options
        super().__init__(description=description, **options)
        self.classes = classes
        for one in classes:
            hints = get_type_hints(one)
            for field in dataclasses.fields(one):
                self._add_field(field, hints[field.name])

    def _add_field(self, field: dataclasses.Field, kind: Any):
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
        self.add_argument(*_spellings(field.name), type=kind, **options | field.metadata)
        if default is True:
            negated, text = _spellings(f"no_{field.name}"), field.metadata.get("help")
            self.add_argument(*negated, action="store_false", dest=field.name, default=False, help=text)

    def fill(self, found: argparse.Namespace) -> list:
        """Instances of the dataclasses with the options that were found."""
        return [one(**{field.name: getattr(found, field.name) for field in dataclasses.fields(one)})
                for one in self.classes]  # fmt: skip

    def add_argument(self, *names, **options):
        action = super().add_argument(*names, **options)
        if action.option_strings:
            action.help = HELP.get(action.option_strings[0].lstrip("-"), action.help)
        return action

    def format_help(self) -> str:
        summary, example, rest = self.description_parts()
        formatter = self._get_formatter()
        formatter.add_usage(f"{self.prog} [options]", (), ())
        for text in (summary, example, rest):
            formatter.add_text(text)
        for title, actions in self.sections():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    def parse_args(self, args=None, namespace=None):
        given = sys.argv[1:] if args is None else list(args)
        found, unknown = self.parse_known_args(given, namespace)
        chosen = (parser for name, parser in self.subcommands().items() if name in given)
        next(chosen, self).refuse(unknown)
        return found

    def error(self, message: str):
        leave(message, 2)

    def format_usage(self) -> str:
        return f"usage: {self.prog} [options]\n"

    def refuse(self, unknown: Sequence[str]):
        """End the program if there are unknown options."""
        for argument in unknown[:1]:
            name = argument.partition("=")[0]
            if not name.startswith("--"):
                self.error(f"{argument!r} does not belong to an option")
            hint = nearest(name.removeprefix("--"), self.option_names(), "--")
            self.error(f"{name} is not an option of this program{hint}")

    def option_names(self) -> list[str]:
        """The names of all options without leading hyphens, also those of subcommands."""
        parsers = [self, *self.subcommands().values()]
        return [name[2:] for parser in parsers for name in parser._option_string_actions if name[:2] == "--"]

    def description_parts(self) -> tuple[str, str, str]:
        """The first line of the docstring, its example and the rest."""
        example = EXAMPLE.search(self.description or "")
        summary, _, rest = EXAMPLE.sub("", self.description or "").strip().partition("\n\n")
        return summary, _as_called(f"Example:\n{example.group(1)}") if example else "", rest

    def subcommands(self) -> dict[str, "ProgramParser"]:
        """The parsers of its subcommands, by name."""
        found = (a.choices for a in self._actions if isinstance(a, argparse._SubParsersAction))
        return next(found, {})

    def sections(self) -> Iterator[tuple[str, list[argparse.Action]]]:
        """The sections of the help with their options. The formatter leaves out sections without options."""
        actions = [action for action in self._actions if action.help != argparse.SUPPRESS]
        of_trainer = {field.name for one in self.classes if one.__name__ == "TrainingArguments"
                      for field in dataclasses.fields(one)}  # fmt: skip
        yield "options", [a for a in actions if a.dest not in HELP.keys() | of_trainer]
        for title, names in SECTIONS.items():
            yield title, [a for a in actions if a.dest in names]
        others = [a for a in actions if a.dest in of_trainer - HELP.keys()]
        yield "transformers.TrainingArguments, the rest", others


def _spellings(name: str) -> list[str]:
    """The option of a field, with underscores and with hyphens."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _program() -> str:
    """The name of the program as it was called: `tnn pretrain`, or as a file."""
    called = sys.argv[0]
    return f"python {called}" if called.endswith(".py") else called


def _as_called(example: str) -> str:
    """The example with `tnn NAME` in place of `python scripts/NAME.py`, if the program was called as `tnn`."""
    if not sys.argv[0].startswith("tnn "):
        return example
    return re.sub(r"python scripts/(\w+)\.py", lambda match: f"tnn {COMMAND_OF[match[1]]}", example)
