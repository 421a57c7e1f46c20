"""Unwanted output: an import prints nothing, and a program prints nothing of other libraries."""

import re
import subprocess
import sys

import pytest

from helpers import processes
from helpers.models import exhaustive
from helpers.scripts import program, write_config, write_text

# Of datasets, transformers and tqdm, as of our own training loop.
BARS = (r"\d+%\|.*\]", r"(Generating|Map|Loading|Writing|training)\b.*\]")
OURS = (
    r"[\d,]+ parameters(, operator rpe)?; \d+ training and \d+ validation blocks .*",
    r"validation perplexity: .*",
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


@pytest.mark.parametrize("library", ["modeling_tnn", "tnn_cli.errors; import modeling_tnn"], ids=["package", "script"])
def test_import(library):
    """torchao is not a dependency. transformers imports it if it is installed; a script prints nothing even then."""
    hidden = "" if "errors" in library else "sys.modules['torchao'] = None; "
    code = f"import sys; {hidden}import {library}; modeling_tnn.TnnModel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
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


def test_demo(trained):
    assert trained[1] == []


@pytest.mark.parametrize("program", exhaustive("evaluate_lm", "pretrain", "generate"))
def test_programs(program, trained, tmp_path):
    text, model = trained[0] / "text.txt", f"--model_name_or_path {trained[0]}/demo"
    options = {
        "pretrain": f"--config_name {trained[0]}/config --train_file {text} --max_steps 2 --output_dir {tmp_path}",
        "generate": f"{model} --prompt The --max_new_tokens 1",
        "evaluate_lm": f"{model} --validation_file {text} --lengths 64 --output_dir {tmp_path}",
    }
    assert unexpected(program, options[program]) == []
