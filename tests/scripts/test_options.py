"""One vocabulary over all programs: the same option has the same name and type, and old spellings go on working."""

import argparse
import logging

import pytest
from transformers import TrainingArguments

from helpers.scripts import SCRIPTS, run_script
from tnn_scripts.common.names import find_recipe
from tnn_scripts.common.parser import HELP, RENAMED, rename_options

PROGRAMS = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("__init__", "tnn"))
# Options that mean something else in these programs than a renamed one did in others.
OTHER_MEANING = {"generate": {"--batch_size"}, "plot_kernels": {"--length"}, "run_synthetic": {"--length"}}


# A path is a text that is checked; a choice is one of some texts.
SAME = {"Path": "str", "None": "str", "string_to_bool": "bool", "check_device": "str"}
# Trainer has types of its own for some options, such as a share or a number of steps for --warmup_steps.
OF_TRAINER = {f"--{name}" for name in TrainingArguments.__dataclass_fields__}
OF_TRAINER |= {name[:2] + name[2:].replace("_", "-") for name in OF_TRAINER}


class Found(Exception):
    """Carries a parser out of a program."""


def parser_of(program: str, monkeypatch) -> argparse.ArgumentParser:
    def parse(self, *arguments, **options):
        raise Found(self)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    with pytest.raises(Found) as found:
        run_script(program)
    return found.value.args[0]


@pytest.fixture
def options(monkeypatch) -> dict[str, dict[str, argparse.Action]]:
    """Every option of every program."""
    parsers = {program: parser_of(program, monkeypatch) for program in PROGRAMS}
    return {
        program: {name: action for action in parser._actions for name in action.option_strings if name[:2] == "--"}
        for program, parser in parsers.items()
    }


def test_an_option_has_one_type(options):
    types = {}
    for program, actions in options.items():
        for name, action in actions.items():
            kind = "bool" if action.nargs == 0 else getattr(action.type, "__name__", str(action.type))
            types.setdefault(name, {}).setdefault(SAME.get(kind, kind), []).append(program)
    assert not {name: kinds for name, kinds in types.items() if len(kinds) > 1 and name not in OF_TRAINER}


def test_an_option_has_one_help(options):
    """An option of two programs is described in `common/parser.py`, or by transformers."""
    found = {}
    for program, actions in options.items():
        for name, action in actions.items():
            found.setdefault(name, {}).setdefault(action.help, []).append(program)
    assert not {name: texts for name, texts in found.items() if len(texts) > 1}
    assert not {name for name in HELP if f"--{name}" not in found}


def test_no_program_has_an_old_spelling(options):
    for program, actions in options.items():
        assert not (RENAMED.keys() & actions.keys()) - OTHER_MEANING.get(program, set()), program


def test_every_option_has_a_help(options):
    silent = {
        (program, name) for program, actions in options.items() for name, action in actions.items() if not action.help
    }
    assert not {(program, name) for program, name in silent if name not in OF_TRAINER}


def test_old_spellings(caplog):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--batch_size")
    with caplog.at_level(logging.WARNING, "arguments"):
        given = rename_options(["--model", "a", "--model=b", "--batch_size", "3", "--dataset", "c"], parser)
    assert given == ["--model_name_or_path", "a", "--model_name_or_path=b", "--batch_size", "3", "--dataset", "c"]
    assert caplog.text.count("--model is an old name. Use --model_name_or_path instead.") == 2


def test_recipes_by_name(tmp_path):
    assert find_recipe("wikitext2").name == "wikitext2.yaml"
    assert find_recipe("lra/small-text").parent.name == "lra"
    with pytest.raises(ValueError, match="--recipe must be .*, got wikitex2; did you mean wikitext2[?]"):
        find_recipe("wikitex2")


def test_a_key_that_is_no_option(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("lerning_rate: 0.1\n")
    with pytest.raises(SystemExit):
        run_script("pretrain", "--recipe", tmp_path / "mine.yaml")
    assert "lerning_rate is not an option of this program; did you mean learning_rate?" in capsys.readouterr().err
