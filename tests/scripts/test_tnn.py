"""The command `tnn`: what it lists, what it runs, what it refuses."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from helpers.scripts import SCRIPTS, run_script
from tnn_scripts import presets, tnn
from tnn_scripts.common.commands import COMMANDS, next_steps
from tnn_scripts.common.names import find_config, find_recipe
from tnn_scripts.common.preset_training import read_presets

# What takes seconds to import. Of other modules an answer needs few: argparse, json, logging and what these import.
SLOW = {"torch", "transformers", "datasets", "scipy", "matplotlib", "numpy", "accelerate", "huggingface_hub"}
ANSWERS = f"""
import contextlib, io, sys
from tnn_scripts.tnn import main
for line in LINES:
    sys.argv, shown = ["tnn", *line], io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), contextlib.suppress(SystemExit):
        main()
    assert "usage: " in shown.getvalue() or shown.getvalue().startswith("error: "), (line, shown.getvalue())
    assert not {SLOW} & sys.modules.keys(), (line, {SLOW} & sys.modules.keys())
assert len(sys.modules) < 300, len(sys.modules)
"""
# Ctrl-C while a module is imported.
INTERRUPTED = """
import signal, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == "MODULE":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
sys.argv = ["tnn", *LINE]
from tnn_scripts.tnn import main
main()
"""
# What the package brings alone.
WITHOUT_EXTRAS = """
import sys
extras = ("accelerate", "datasets", "evaluate", "matplotlib", "scipy", "sklearn", "tabulate", "fastapi", "gradio")
for name in (*extras, "peft"):  # which transformers imports if it is there, and needs accelerate
    sys.modules[name] = None
from tnn_scripts.runs import chat, generate
from tnn_scripts.tnn import main
for line in LINES:
    sys.argv = ["tnn", *line]
    try:
        main()
    except SystemExit as end:
        assert end.code == 1, line
"""


def test_the_demo_needs_no_server():
    """`make demo` installs the extra of the programs, not that of `tnn api`."""
    names = ("fastapi", "starlette", "uvicorn", "prometheus_client", "gradio")
    code = f"import sys\nsys.modules |= dict.fromkeys({names})\nimport tnn_scripts.runs.demo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_program_has_a_command():
    programs = {path.stem for path in SCRIPTS.glob("*.py")} - {"__init__", "tnn"}
    assert sorted(module for module, _ in COMMANDS.values()) == sorted(programs)


@pytest.mark.parametrize(("model_type", "drawn"), [("tnn", True), ("modernbert", False)])
def test_kernels_are_drawn_of_a_tnn_alone(model_type, drawn, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    for kind in ("causal", "masked", "classifier"):
        assert ("plot-kernels" in next_steps(str(tmp_path), kind)) is drawn


def test_answers_before_anything_slow_is_imported():
    """Help, wrong options, names and files; by modules and not by seconds, which other programs change."""
    lines = [["--help"], ["no-such-command"]]
    lines += [[command, given] for command in COMMANDS for given in ("--help", "--no_such_option")]
    lines += [[command, *given] for command, given in WRONG.items()]
    done = subprocess.run(
        [sys.executable, "-c", ANSWERS.replace("LINES", repr(lines))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# Names and files that are not there, and texts in place of numbers.
WRONG = {
    "generate": ["--model_name_or_path", "outputs/none", "--prompt", "a"],
    "chat": ["--model_name_or_path", "outputs/none"],
    "serve": ["--model_name_or_path", "outputs/none"],
    "api": ["--model_name_or_path", "outputs/none"],
    "card": ["outputs/none", "--repo_id", "a/b", "--output_dir", "out"],
    "push": ["outputs/none", "--repo_id", "a/b"],
    "plot-kernels": ["--model_name_or_path", "outputs/none", "--output_dir", "out"],
    "to-recurrent": ["--model_name_or_path", "outputs/none", "--output_dir", "out"],
    "evaluate": ["--model_name_or_path", "a/b", "--validation_file", "none.txt", "--output_dir", "out"],
    "convert": ["none.pt", "out", "--architecture", "tnn_v2_decay_99_pre"],
    "pretrain": ["--train_file", "none.txt"],
    "demo": ["--tno_type", "rpee"],
    "plan": ["--config_name", "tnn-cuasal"],
    "presets": ["tnn-smal"],
    "finetune-glue": ["--model_name_or_path", "a/b", "--task_name", "sst3", "--do_train"],
    "lra": ["--task", "listop", "--config_name", "tnn-listops"],
    "images": ["--config_name", "tnn-image-tny", "--output_dir", "out"],
    "synthetic": ["--task", "copying", "--learning_rate", "fast", "--output_dir", "out"],
    "ablation": ["--variants", "rpe", "--dataset_name", "none.txt", "--output_dir", "out"],
    "benchmark": ["operators", "--ways", "rpee"],
}


@pytest.mark.parametrize(
    ("module", "line"),
    [("tnn_scripts.common.parser", ["chat"]), ("torch", ["chat", "--model_name_or_path", "a/b"])],
    ids=["ours", "torch"],
)
def test_ctrl_c_while_modules_are_imported(module, line):
    code = INTERRUPTED.replace("MODULE", module).replace("LINE", repr(line))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.slow
def test_without_extras():
    """generate and chat need none; the others name theirs."""
    needed = {"plan": "training", "synthetic": "training", "api": "api", "demo": "demo", "serve": "scripts,space"}
    options = {"synthetic": ["--recipe", "synthetic/small-copying"]}
    options |= dict.fromkeys(("api", "serve"), ["--model_name_or_path", "a/b"])
    lines = [[command, *options.get(command, [])] for command in needed]
    code = WITHOUT_EXTRAS.replace("LINES", repr(lines))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for error, (command, extra) in zip(errors, needed.items(), strict=True):
        assert error.startswith(f"error: tnn {command} needs ")
        assert error.endswith(f': pip install "modeling-tnn[{extra}]"')


def test_presets_are_listed(capsys):
    """All of them with kind, size, rate and minutes, and all recipes; before anything slow is imported (above)."""
    run_script("presets")
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line[:2] == "  "}
    assert lines["tnn-small"] == ["causal", "5,367,936", "0.004", "measured", "25", "small-causal"]
    assert lines.keys() >= read_presets().keys() | presets.recipe_files().keys()


def test_a_preset_and_a_recipe_are_shown(capsys):
    """By any of their names, with a command that names what exists."""
    for name, preset in read_presets().items():
        run_script("presets", name.rpartition("/")[2])
        shown = capsys.readouterr().out
        assert f"preset {name}: {preset.kind}, {preset.parameters:,} parameters" in shown
        assert all(
            f"    {field}: " in shown for field in json.loads((Path(find_config(name)) / "config.json").read_text())
        )
        _, program, *options = shlex.split(re.search(r"train it +(.*)", shown)[1])
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert program in COMMANDS and given.keys() & {"--recipe", "--config_name"}
        recipe = yaml.safe_load(find_recipe(given["--recipe"]).read_text()) if "--recipe" in given else {}
        assert find_config(given.get("--config_name") or recipe["config_name"]) == find_config(name)
        assert float(given.get("--learning_rate") or recipe.get("learning_rate", 0)) == (preset.learning_rate or 0)
    run_script("presets", "wikitext2")
    shown = capsys.readouterr().out
    assert "train by it    tnn pretrain --recipe wikitext2" in shown and '    config_name: "tnn-tiny"' in shown


def test_an_unknown_preset(capsys):
    with pytest.raises(SystemExit):
        run_script("presets", "tnn-smal")
    assert "preset or a recipe, got tnn-smal; did you mean tnn-small?" in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["-h"]])
def test_help(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tnn", *given])
    tnn.main()
    shown = capsys.readouterr().out
    assert shown.startswith("usage: tnn COMMAND [options]\n")
    assert all(f"  {command} " in shown for command in COMMANDS)


def test_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tnn", "--version"])
    tnn.main()
    assert capsys.readouterr().out.startswith("modeling-tnn ")


def test_unknown_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tnn", "pretrian"])
    with pytest.raises(SystemExit) as left:
        tnn.main()
    assert left.value.code == 2
    assert "pretrian is not a command of tnn; did you mean pretrain?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "pretrain", "convert"])
def test_help_of_a_command(command, monkeypatch, capsys):
    """The example comes first, and is one of `tnn`."""
    monkeypatch.setattr(sys, "argv", ["tnn", command, "--help"])
    with pytest.raises(SystemExit) as left:
        tnn.main()
    shown = capsys.readouterr().out
    assert left.value.code == 0
    usage, summary, example, *_ = shown.split("\n\n")
    assert usage == f"usage: tnn {command} [options]"
    assert example.startswith(f"Example:\n    tnn {command} ") and "python" not in example


@pytest.mark.parametrize("command", ["evaluate", "pretrain", "lra", "benchmark"])
def test_an_unknown_option_is_one_line(command, monkeypatch, capsys):
    given = {"benchmark": ["memory", "--lenghts"]}.get(command, ["--output_dri"])
    monkeypatch.setattr(sys, "argv", ["tnn", command, *given, "x", *REQUIRED.get(command, [])])
    with pytest.raises(SystemExit) as left:
        tnn.main()
    errors = capsys.readouterr().err
    assert left.value.code == 2 and errors.count("\n") == 1
    assert "is not an option of this program; did you mean --" in errors


def test_suggestions_are_those_of_the_subcommand(monkeypatch, capsys):
    """`--output_dir` is an option of `benchmark gpu` alone."""
    monkeypatch.setattr(sys, "argv", ["tnn", "benchmark", "state_size", "--output_dir", "x"])
    with pytest.raises(SystemExit):
        tnn.main()
    assert "did you mean --output_file?" in capsys.readouterr().err


REQUIRED = {
    "evaluate": ["--model_name_or_path", "x", "--output_dir", "y"],
    "lra": ["--task", "listops", "--config_name", "tnn-listops", "--output_dir", "y"],
}
