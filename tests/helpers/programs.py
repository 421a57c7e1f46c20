"""The tests that every program inherits: a subclass gives its command, and what it promises beside them.

    class TestPlan(ProgramTests):
        command = "plan"
        needed = "--config_name tnn-tiny"
        refused = {"--lengths 1": "--lengths must be at least 2, got 1"}

A program that trains inherits more, from `TrainingTests`. All are called in this process.
"""

import argparse
import functools
import io
import json
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from helpers.models import seeded, tiny_config
from helpers.scripts import ROOT, run, run_script, save_model, tree, write_config, write_text
from modeling_tnn import TnnForMaskedLM
from modeling_tnn.data.text import train_tokenizer
from tnn_programs.cli.commands import COMMANDS
from tnn_programs.cli.parser import parse_arguments
from tnn_programs.data.corpus import load_corpus

# Trainer has no help for some of its options, and types of its own for others.
OF_TRAINER = {f"--{name}" for name in TrainingArguments.__dataclass_fields__}
OF_TRAINER |= {name[:2] + name[2:].replace("_", "-") for name in OF_TRAINER}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """Models and files that programs are given by their names: TNNs, a GPT-2, good files and bad ones."""
    folder = tmp_path_factory.mktemp("programs") / "inputs"
    save_model(folder / "tnn", tno_type="rpe", decay=0.9)
    save_model(folder / "gpt2")
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=300)).save_pretrained(
        folder / "gpt2"
    )
    write_config(folder / "config")
    text = load_corpus(str(write_text(folder / "good.txt")))["train"]
    train_tokenizer(text, 300).save_pretrained(folder / "tokenizer")
    for name, masked in (("masked", True), ("unmasked", False)):
        seeded(TnnForMaskedLM, tiny_config(causal=False, vocab_size=300)).save_pretrained(folder / name)
        train_tokenizer(text, 300, masked=masked).save_pretrained(folder / name)
    (folder / "empty.txt").touch(), (folder / "empty.csv").touch()
    (folder / "good.csv").write_text("sentence,label\nx,0\ny,1\n")
    (folder / "bad.txt").write_bytes(b"a: b\n\xff\xfe\n")
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "bad.yaml").write_text("a: [1\nb: }")
    (folder / "wrong.yaml").write_text("lerning_rate: 0.1\n")
    return folder


class Found(Exception):
    """Carries a parser out of a program."""


@functools.cache
def options_of(program: str) -> dict[str, argparse.Action]:
    """The options of a program by their names."""

    def parse(self, *arguments, **options):
        raise Found(self)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Found) as found:
        patched.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        run_script(program)
    actions = found.value.args[0]._actions
    return {name: action for action in actions for name in action.option_strings if name[:2] == "--"}


def parse(classes: list[type], *options) -> tuple:
    """What a program with these dataclasses of options reads of a command line."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["program", *shlex.split(" ".join(map(str, options)))])
        return parse_arguments(classes, "")


def unlike(program: str, given: list, refused: dict[str, str]) -> dict[str, str]:
    """Of options that `program` must refuse, those that it does not with the status 2 and one line of these words."""
    found = {}
    for options, expected in refused.items():
        ended = run(program, *given, *shlex.split(options), check=False)
        *_, line = ended.stderr.splitlines() or [""]
        if ended.returncode != 2 or not line.startswith("error: ") or not re.search(expected, line):
            found[options] = f"status {ended.returncode}: {ended.stderr[-1000:]}"
    return found


class ProgramTests:
    """Promises of every program.

    Attributes:
        command: its name as a subcommand of `tnn`.
        needed: options that it cannot do without, of the files of `inputs`.
        refused: wrong options, and a regular expression of the line that says so.
        unknown: an option that it does not have, and the one that was meant.
        left: what it may write before it refuses.
    """

    command = ""
    needed = ""
    refused: dict[str, str] = {}
    unknown = ("--hepl", "--help")
    left = {".lock"}

    @property
    def program(self) -> str:
        return COMMANDS[self.command][0]

    @pytest.fixture(autouse=True)
    def among_inputs(self, inputs, monkeypatch):
        monkeypatch.chdir(inputs)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("sys.stdin", io.StringIO(""))

    def test_help_begins_with_an_example_and_describes_each_option(self):
        shown = run("tnn", self.command, "--help").stdout
        usage, _, example, *_ = shown.split("\n\n")
        assert usage == f"usage: tnn {self.command} [options]"
        assert example.startswith(f"Example:\n    tnn {self.command}") and "python scripts" not in example
        for name, action in options_of(self.program).items():
            assert action.help or name in OF_TRAINER, name
            assert name in shown or "-" in name[2:], name

    def test_what_is_wrong_is_one_line_and_nothing_is_written(self, inputs):
        ended = run("tnn", self.command, *self.needed.split(), self.unknown[0], check=False)
        assert ended.returncode == 2 and ended.stderr.count("\n") == 1
        assert f"did you mean {self.unknown[1]}" in ended.stderr
        before, output = tree(inputs), inputs.parent / "out"
        shutil.rmtree(output, ignore_errors=True)
        assert not unlike(self.program, shlex.split(self.needed), self.refused)
        assert tree(inputs) == before and {path.name for path in output.glob("*")} <= self.left
        assert import_module(f"tnn_programs.{self.program}").main.__wrapped__.__name__ == "main", (
            "nothing else starts it"
        )


class TrainingTests(ProgramTests):
    """Promises of programs that train.

    Attributes:
        keeps: whether it leaves a model, which it does not write over unasked.
        figure: where it leaves none, the figure of its models.
        recipes: its recipes, as a pattern of files; `beside` are options that they do not have.
        arguments: the dataclasses of its options.
    """

    keeps = True
    figure = ""
    recipes = ""
    beside = "--output_dir x"
    arguments: list[type] = []

    def small(self, folder: Path) -> list:
        """The options of a run that takes a second, without an output folder."""
        raise NotImplementedError

    def configure(self, recipe: Path, *parsed):
        """Check what a recipe asks for."""
        raise NotImplementedError

    def result(self, given: list, output: Path, *more) -> object:
        """What a run ends with: the model, or the figures of several."""
        run_script(self.program, *given, f"--output_dir {output}", *more)
        if self.keeps:
            return (output / "model.safetensors").read_bytes()
        rows = json.loads((output / "all_results.json").read_text())["rows"]
        return [(row["seed"], row[self.figure]) for row in rows]

    def test_one_seed_gives_one_result_and_no_model_is_written_over_unasked(self, tmp_path):
        given, output = self.small(tmp_path), tmp_path / "out"
        first, again = self.result(given, output, "--seed 3"), []
        repeated = output if self.keeps else tmp_path / "again"  # a comparison does not repeat its runs
        if self.keeps:
            before, again = tree(output), ["--overwrite_output_dir"]
            with pytest.raises(SystemExit, match="--overwrite_output_dir to replace it"):
                run_script(self.program, *given, f"--output_dir {output} --seed 3")
            assert tree(output) == before
        assert first == self.result(given, repeated, "--seed 3", *again)
        assert first != self.result(given, tmp_path / "other", "--seed 4")

    def test_its_recipes_are_read(self):
        """Each option is known, and the configuration is that of a model."""
        for recipe in sorted((ROOT / "configuration" / "recipes").glob(self.recipes)):
            self.configure(recipe, *parse(self.arguments, "--recipe", recipe, self.beside))
