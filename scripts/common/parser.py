"""The parser of every program: one meaning for each option name, an example first, options in sections.

An option that several programs have is described here, once. A program describes its own options alone.
"""

import argparse
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import HfArgumentParser, TrainingArguments

from tnn_scripts.common.commands import COMMAND_OF
from tnn_scripts.common.nearest import nearest

logger = logging.getLogger("arguments")

# Sections of --help -> their options, without the hyphens.
SECTIONS = {
    "model": {
        "model_name_or_path": "Model: a folder or a Hub id.",
        "config_name": "Preset (see configuration/README.md), or a folder or Hub id with a config.json.",
        "config_overrides": "Fields of the configuration to change: tno_type=fd,rpe_layers=3.",
        "tno_type": "Operator, instead of the configuration's: rpe, fd, ski, rtf, ...",
        "transformer": "Train a transformer of the same width, depth and size instead of the TNN.",
        "trust_remote_code": "Run Python code that comes with the model.",
    },
    "data": {
        "dataset_name": "Data: a Hub id, a local folder or, for text, a local file. Without data, programs that "
        "need a text take the King James Bible.",
        "dataset_config_name": "Configuration of the data set.",
        "dataset_path": "Local folder or Hub id with the data of the task, instead of their usual source.",
        "task": "Name of the task.",
        "train_file": "File to train on: text, JSON, parquet or CSV.",
        "validation_file": "File to evaluate on, of the same kinds. A language model is evaluated on the end of the "
        "training text unless one is given.",
        "text_column": "Column of the data that holds text.",
        "documents": "Where documents end: rows, lines (nowhere), headings (as in WikiText) or columns that tell "
        "one from the next, as book,chapter. Unless given: headings where there are some, lines for text files, else "
        "rows.",
        "max_train_samples": "Train on the first so many rows.",
        "max_eval_samples": "Evaluate on the first so many rows.",
        "block_size": "Tokens in a block of text; follows from max_position_embeddings unless given.",
        "length": "Positions of a kernel or of a signal.",
    },
    "training": {
        "max_steps": "Optimizer steps. Where epochs can be given, a positive number goes before them.",
        "per_device_train_batch_size": "Rows on a device in a forward pass.",
        "per_device_eval_batch_size": "Rows on a device in a forward pass of the evaluation.",
        "gradient_accumulation_steps": "Forward passes in an optimizer step.",
        "learning_rate": "Peak of the learning rate.",
        "lr_scheduler_type": "Schedule of the learning rate, by the name in transformers: linear, cosine, ...",
        "warmup_steps": "Steps of linear warm-up; below 1, a share of all steps.",
        "weight_decay": "Weight decay of matrices; biases and norms have none.",
        "operator_learning_rate": "Learning rate of the Toeplitz operators, which then have no weight decay unless "
        "--operator_weight_decay is given.",
        "operator_weight_decay": "Weight decay of the matrices of the Toeplitz operators.",
        "parameter_groups": "Parameters with settings of their own: PATTERN:learning_rate=X,weight_decay=X, with a "
        "regular expression that is searched in their names. Biases and norms stay without weight decay.",
        "optim": "Optimizer, by the name in transformers: adamw_torch, adamw_torch_fused, adafactor, ...",
        "optim_args": "Further arguments of the optimizer: name=value,name=value.",
        "adam_beta1": "First momentum of AdamW.",
        "adam_beta2": "Second momentum of AdamW.",
        "adam_epsilon": "Epsilon of AdamW.",
        "max_grad_norm": "Gradients are clipped to this norm; 0 for no clipping.",
        "seed": "Seed of weights, order of the data, masks, dropout and sampling.",
        "sweep_learning_rates": "Learning rates to try; the best one is reported.",
        "seeds": "One model for each of these seeds; the one of --seed unless given.",
        "eval_steps": "Evaluate every so many steps.",
        "logging_steps": "Log loss, learning rate and speed every so many steps.",
        "save_total_limit": "Keep the newest so many checkpoints.",
        "dry_run": "Say what the run would take (parameters, tokens, time, memory) and end; nothing is written.",
        "resume_from_checkpoint": "Go on from a checkpoint: latest (of the output folder), or its folder.",
        "gradient_checkpointing": "Compute activations again in the backward pass, to save memory.",
    },
    "generation": {
        "prompt": "Text to continue.",
        "max_new_tokens": "Largest number of new tokens.",
    },
    "output": {
        "output_dir": "Folder for the results.",
        "overwrite_output_dir": "Replace the model or the unfinished run that --output_dir holds; without this option "
        "it is refused.",
        "output_file": "JSON file for the figures.",
        "report_to": "Tracker: none, tensorboard, wandb, trackio.",
    },
    "device": {
        "device": "Device: cpu, cuda, cuda:1, mps, ...",
        "dtype": "Data type of the weights: auto (as saved), float32, bfloat16, float16.",
        "use_cpu": "Use the CPU although there is an accelerator.",
        "torch_compile": "Compile the model with torch.compile.",
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
# Old spellings of options, which go on working, and the ones that the programs have now.
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
    "--length": "--block_size",
}
OF_TRAINER = set(TrainingArguments.__dataclass_fields__)
EXAMPLE = re.compile(r"\n\nExample:\n(.*?)(?=\n\n|\Z)", re.DOTALL)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """One spelling of each option, the kind of its value, and its default."""

    KINDS = {int: "N", float: "X", Path: "PATH"}

    def _format_action_invocation(self, action):
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "-" not in name.lstrip("-")] or action.option_strings
        if action.nargs == 0 or action.const is True:
            return ", ".join(names)
        return f"{', '.join(names)} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _get_default_metavar_for_optional(self, action):
        return self.KINDS.get(action.type, "TEXT")

    def _get_help_string(self, action):
        text = action.help or ""
        if action.required and action.option_strings:
            return f"{text} (required)"
        return text + (f" (default: {default_of(action)})" if default_of(action) else "").replace("%", "%%")


def default_of(action: argparse.Action) -> str:
    """The default of an option as one would give it; nothing if there is none to give."""
    if action.default in (None, argparse.SUPPRESS, "", []) or action.default is False:
        return ""
    return " ".join(map(str, action.default)) if isinstance(action.default, (list, tuple)) else str(action.default)


class ProgramParser(HfArgumentParser):
    """Of a program whose docstring is `description`: a summary, what it does, and an example at the end."""

    def __init__(self, dataclasses: Sequence[type] = (), description: str = "", **options):
        options = {"formatter_class": _Formatter, "allow_abbrev": False, "prog": _program()} | options
        super().__init__(list(dataclasses), description=description, **options)

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
        found, unknown = self.parse_known_args(args, namespace)
        self.refuse(unknown)
        return found

    def parse_known_args(self, args=None, namespace=None):
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(rename_options(given, self), namespace)

    def error(self, message: str):
        self.exit(2, f"error: {message}\n")

    def format_usage(self) -> str:
        return f"usage: {self.prog} [options]\n"

    def refuse(self, unknown: Sequence[str]):
        """End the program if there are unknown options."""
        for argument in unknown[:1]:
            name = argument.partition("=")[0]
            if not name.startswith("--"):
                self.error(f"{argument!r} belongs to no option")
            hint = nearest(name.removeprefix("--"), self.option_names(), "--")
            self.error(f"{name} is no option of this program{hint}")

    def option_names(self) -> list[str]:
        """Without hyphens in front, those of subcommands included."""
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
        """Sections of the help with their options; those without options are left out by the formatter."""
        actions = [action for action in self._actions if action.help != argparse.SUPPRESS]
        shared = set(HELP) | (OF_TRAINER if TrainingArguments in self.dataclass_types else set())
        yield "options", [a for a in actions if a.dest not in shared]
        for title, names in SECTIONS.items():
            yield title, [a for a in actions if a.dest in names]
        others = [a for a in actions if a.dest in OF_TRAINER & shared - set(HELP)]
        yield "transformers.TrainingArguments, the rest", others


def _program() -> str:
    """How it was called: `tnn pretrain`, or as a file."""
    called = sys.argv[0]
    return f"python {called}" if called.endswith(".py") else called


def _as_called(example: str) -> str:
    """An example of `python scripts/NAME.py` as one of `tnn`, if that was called."""
    if not sys.argv[0].startswith("tnn "):
        return example
    return re.sub(r"python scripts/(\w+)\.py", lambda match: f"tnn {COMMAND_OF[match[1]]}", example)


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
