"""The command `tnn`: what it lists, runs and refuses, how fast; an import prints nothing, a program nothing of others.

test_programs.py has its commands.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tnn_programs.cli.errors import UserError, importing

import pytest
import yaml
from transformers import AutoConfig

from helpers import processes
from helpers.models import slow
from helpers.scripts import program, run, save_model, write_config, write_text
from tnn_programs import presets
from tnn_programs.cli.commands import COMMANDS
from tnn_programs.cli.model_path import check_model_path, find_config, find_recipe, load, try_hub
from tnn_programs.cli.training_arguments import read_presets

# What takes seconds to import. Of other modules an answer needs few: argparse, json, logging and what these import.
SLOW = {"torch", "transformers", "datasets", "scipy", "matplotlib", "numpy", "accelerate", "huggingface_hub"}
ANSWERS = f"""
import contextlib, io, sys
from tnn_programs.tnn import main
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
sys.argv = ["tnn", *LINES]
from tnn_programs.tnn import main
main()
"""
# What the package brings alone.
WITHOUT_EXTRAS = """
import sys
extras = ("accelerate", "datasets", "matplotlib", "scipy", "sklearn", "tabulate", "fastapi", "gradio")
for name in (*extras, "peft"):  # which transformers imports if it is there, and needs accelerate
    sys.modules[name] = None
from tnn_programs.tnn import main
for line in LINES:
    sys.argv = ["tnn", *line]
    try:
        main()
    except SystemExit as end:
        assert end.code == 1, line
"""
# `make demo` installs the extra of the programs, not that of `tnn api`.
WITHOUT_SERVER = """
import sys
sys.modules |= dict.fromkeys(("fastapi", "starlette", "uvicorn", "prometheus_client", "gradio"))
import tnn_programs.serving.page, tnn_programs.training.pretrain
"""
# Names and files that are not there, and texts in place of numbers.
WRONG = {
    "generate": "--model_name_or_path outputs/none --prompt a",
    "serve": "--model_name_or_path outputs/none",
    "api": "--model_name_or_path outputs/none",
    "push": "outputs/none --repo_id a/b",
    "plot-kernels": "--model_name_or_path outputs/none --output_dir out",
    "to-recurrent": "--model_name_or_path outputs/none --output_dir out",
    "evaluate": "--model_name_or_path a/b --validation_file none.txt --output_dir out",
    "convert": "none.pt out --architecture tnn_v2_decay_99_pre",
    "pretrain": "--train_file none.txt",
    "demo": "--config_name tnn-tny",
    "plan": "--config_name tnn-cuasal",
    "presets": "tnn-smal",
    "finetune-glue": "--model_name_or_path a/b --task_name sst3 --do_train",
    "lra": "--task listop --config_name tnn-listops",
    "images": "--config_name tnn-image-tny --output_dir out",
    "synthetic": "--task copying --learning_rate fast --output_dir out",
    "ablation": "--variants rpe --dataset_name none.txt --output_dir out",
}


def python(code: str, lines: list = ()) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code.replace("LINES", repr(lines))], capture_output=True, text=True)


def test_answers_come_before_anything_slow_is_imported(tmp_path):
    """Help, wrong options, names, files and kinds of models; by modules and not by seconds, which others change."""
    lines = [["--help"], ["no-such-command"]]
    lines += [[command, given] for command in COMMANDS for given in ("--help", "--no_such_option")]
    (tmp_path / "tokenizer.json").write_text("{}")
    masked = {"model_type": "tnn", "causal": False, "architectures": ["TnnForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(masked))
    writers = ("generate", "serve", "to-recurrent --output_dir out")
    lines += [[*writer.split(), "--model_name_or_path", str(tmp_path)] for writer in writers]
    done = python(ANSWERS, lines + [[command, *given.split()] for command, given in WRONG.items()])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "head, causal, said",
    [("MaskedLM", False, "a masked"), ("SequenceClassification", True, "a classifier"), ("", False, "no causal")],
)
def test_models_that_continue_no_text(head, causal, said, tmp_path):
    config = {"model_type": "tnn", "causal": causal, "architectures": [f"TnnFor{head}"] if head else None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{tmp_path} is {said}.*: only a causal model, TnnForCausalLM"):
        check_model_path(tmp_path, causal=True)
    check_model_path(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "bert", "architectures": 3}))
    check_model_path(tmp_path, causal=True)


def test_a_name_of_the_hub_without_a_network(monkeypatch, capsys):
    """It is said what is tried, before anything slow, and the Hub is asked once: its client would for a minute."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: pytest.fail("it tries again"))
    try_hub.cache_clear()
    check_model_path("me/news")
    with importing():
        assert capsys.readouterr().err == "me/news is not a folder here: trying the Hub\n"
    with pytest.raises(UserError, match="me/news cannot be loaded"):
        load(AutoConfig, "me/news")
    assert "the Hub cannot be reached" in capsys.readouterr().err
    try_hub.cache_clear()


@pytest.mark.slow
def test_without_extras(tmp_path):
    """generate and push need none; the others name theirs; the demo needs none of the server."""
    needed = {"plan": "training", "synthetic": "training", "api": "api", "demo": "demo", "serve": "scripts,space"}
    options = {"synthetic": ["--recipe", "synthetic/small-copying"]}
    options |= dict.fromkeys(("api", "serve"), ["--model_name_or_path", "a/b"])
    model = ["--model_name_or_path", str(save_model(tmp_path, tno_type="rpe"))]
    lines = [["generate", *model, *given] for given in (["--chat"], ["--prompt", "The", "--max_new_tokens", "1"])]
    lines.append(["push", model[1], "--repo_id", "a/b", "--dry_run"])
    done = python(WITHOUT_EXTRAS, lines + [[command, *options.get(command, [])] for command in needed])
    assert done.returncode == 0 and "1 tokens in" in done.stdout, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for error, (command, extra) in zip(errors, needed.items(), strict=True):
        assert error.startswith(f"error: tnn {command} needs ")
        assert error.endswith(f': pip install "modeling-tnn[{extra}]"')


def test_a_package_that_would_be_imported_late(monkeypatch):
    """Is named before anything slow is imported."""
    monkeypatch.setattr(sys, "argv", ["tnn finetune-glue"])
    wanted = r'^tnn finetune-glue needs no_such_package: pip install "modeling-tnn\[training\]"$'
    with pytest.raises(ImportError, match=wanted), importing("training", "sys", "no_such_package"):
        pytest.fail("it began")


@pytest.mark.slow
def test_the_demo_needs_no_server():
    processes.run([sys.executable, "-c", WITHOUT_SERVER], check=True)


def test_ctrl_c_while_modules_are_imported():
    """Ours, and PyTorch, which is imported when the command line was read."""
    tried = "a/b is not a folder here: trying the Hub\n"
    for module, line, said in (
        ("tnn_programs.cli.parser", ["serve"], ""), ("torch", ["serve", "--model_name_or_path", "a/b"], tried),
    ):  # fmt: skip
        done = python(INTERRUPTED.replace("MODULE", module), line)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


def test_the_commands_of_tnn():
    for given in ([], ["-h"]):
        shown = run("tnn", *given).stdout
        assert shown.startswith("usage: tnn COMMAND [options]\n")
        assert all(f"  {command} " in shown for command in COMMANDS)
    assert run("tnn", "--version").stdout.startswith("modeling-tnn ")
    ended = run("tnn", "pretrian", check=False)
    assert ended.returncode == 2 and "pretrian is no command of tnn; did you mean pretrain?" in ended.stderr


def test_presets_are_listed():
    """All of them with kind, size, rate and minutes, and all recipes; before anything slow is imported (above)."""
    lines = {line.split()[0]: line.split()[1:] for line in run("presets").stdout.splitlines() if line[:2] == "  "}
    assert lines["tnn-small"] == ["causal", "5,367,936", "0.004", "measured", "25", "small-causal"]
    assert lines.keys() >= read_presets().keys() | presets.recipe_files().keys()


def test_a_preset_and_a_recipe_are_shown():
    """By any of their names, with a command that names what exists."""
    for name, preset in read_presets().items():
        shown = run("presets", name.rpartition("/")[2]).stdout
        assert f"preset {name}: {preset.kind}, {preset.parameters:,} parameters" in shown
        fields = json.loads((Path(find_config(name)) / "config.json").read_text())
        assert all(f'"{field}": ' in shown for field in fields)
        command = re.search(r"train it +(.*)", shown)[1]
        if preset.kind == "signals":
            assert "docs/guides/signals.md" in command and Path("docs/guides/signals.md").is_file()
            continue
        _, program, *options = shlex.split(command)
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert program in COMMANDS and given.keys() & {"--recipe", "--config_name"}
        recipe = yaml.safe_load(find_recipe(given["--recipe"]).read_text()) if "--recipe" in given else {}
        assert find_config(given.get("--config_name") or recipe["config_name"]) == find_config(name)
        assert float(given.get("--learning_rate") or recipe.get("learning_rate", 0)) == (preset.learning_rate or 0)
    shown = run("presets", "wikitext2").stdout
    assert "train by it    tnn pretrain --recipe wikitext2" in shown and "    config_name: tnn-tiny" in shown


# Of datasets, transformers and tqdm, as of our own training loop.
BARS = (r"\d+%\|.*\]", r"(Generating|Map|Loading|Writing|training)\b.*\]")
OURS = (
    r"[\d,]+ parameters(, operator rpe)?; \d+ training and \d+ validation blocks .*",
    r"validation perplexity: .*|learning rate .*, by the rule for a width of .*",
    r"saved in .*",
    r"the best model is in .*",
    r"next:|.*tnn (generate|serve|plot-kernels|push|finetune-glue) .*",
    r"The.*|",  # the prompt with one token more
    r"step \d+: validation loss .*",
    r"the last \d+ tokens of the \w+ text fill no block of \d+: left out",
    r"perplexity \(bits per byte\)|loss in nats of a token",
    r"\|.*\|",
    r"\{'.*\}",  # Trainer's figures
    r"\d+ tokens in .* tokens per second",
)


@pytest.mark.parametrize(
    "library", ["modeling_tnn", *slow("tnn_programs.cli.errors; import modeling_tnn")], ids=["package", "script"]
)
def test_import(library):
    """torchao is not a dependency. transformers imports it if it is installed; a script prints nothing even then."""
    hidden = "" if "errors" in library else "sys.modules['torchao'] = None; "
    code = f"import sys; {hidden}import {library}; modeling_tnn.TnnModel"
    done = processes.run([sys.executable, "-c", code])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def unexpected(*arguments) -> list[str]:
    """The lines of a program on stdout and stderr that are neither ours nor a progress bar."""
    done = processes.run(program(*arguments), check=True)
    lines = (line.strip() for line in re.split(r"[\r\n]", done.stdout + "\n" + done.stderr))
    return [line for line in lines if not any(re.fullmatch(known, line) for known in (*OURS, *BARS))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a model of `demo.py`, its options, and what that printed."""
    folder = tmp_path_factory.mktemp("noise")
    config, text = write_config(folder / "config", rpe_dim=16), write_text(folder / "text.txt")
    more = f"--max_steps 2 --output_dir {folder}/demo --prompt The --max_new_tokens 1"
    return folder, unexpected("demo", f"--config_name {config} --dataset_name {text}", more)


@pytest.mark.slow
def test_demo(trained):
    assert trained[1] == []


@pytest.mark.parametrize("program", slow("evaluate_lm", "pretrain", "generate"))
def test_programs(program, trained, tmp_path):
    text, model = trained[0] / "text.txt", f"--model_name_or_path {trained[0]}/demo"
    options = {
        "pretrain": f"--config_name {trained[0]}/config --train_file {text} --max_steps 2 --output_dir {tmp_path}",
        "generate": f"{model} --prompt The --max_new_tokens 1",
        "evaluate_lm": f"{model} --validation_file {text} --lengths 64 --output_dir {tmp_path}",
    }
    assert unexpected(program, options[program]) == []
