"""Errors of programs: one line for errors that a user can solve, 130 for Ctrl-C, a traceback for a mistake."""

import re
import signal
import sys
import time
from importlib import import_module

from tnn_scripts.common.errors import report_errors

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from helpers import processes
from helpers.scripts import SCRIPTS, run_script, save_model, wait_until, write_config, write_text

PROGRAMS = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("__init__", "tnn"))
UTF8 = r"error: The file bad.txt is not text in UTF-8: 'utf-8' codec can't decode byte 0xff"
REFUSED = {
    "prompt of nothing": (
        ["generate", "--model_name_or_path", "tnn", "--prompt", ""],
        2,
        "error: --prompt must have at least one token, got ''",
    ),
    "model that is not there": (
        ["generate", "--model_name_or_path", "./nowhere", "--prompt", "a"],
        2,
        "error: --model_name_or_path must be a folder or a Hub id, got './nowhere', which is not a folder here",
    ),
    "model that is nearly there": (
        ["evaluate_lm", "--model_name_or_path", "./gtp2", "--validation_file", "good.txt"],
        2,
        "which is not a folder here; did you mean ./gpt2[?]",
    ),
    "folder above the models": (
        ["plot_kernels", "--model_name_or_path", "."],
        2,
        "error: --model_name_or_path must be a folder with a model, got . without config.json; did you mean config or",
    ),
    "model without a tokenizer": (
        ["finetune_glue", "--model_name_or_path", "config", "--task_name", "sst2"],
        2,
        "error: --model_name_or_path must be a folder with a tokenizer, got config without tokenizer.json",
    ),
    "file for a model": (
        ["to_recurrent", "--model_name_or_path", "good.txt"],
        2,
        "error: --model_name_or_path must be a folder or a Hub id, got the file good.txt",
    ),
    "model of the page that is not there": (
        ["serve", "--model_name_or_path", "outputs/a"],
        2,
        "'outputs/a', which is",
    ),
    "model of the API that is not there": (["api", "--model_name_or_path", "config/a"], 2, "'config/a', which is not"),
    "text that is not there": (
        ["pretrain", "--config_name", "config", "--dataset_name", "config/text"],
        2,
        "error: --dataset_name must be a folder or a Hub id, got 'config/text', which is not a folder here",
    ),
    "preset that is nearly one": (
        ["plan", "--config_name", "tnn-cuasal"],
        2,
        "error: --config_name must be a preset, a folder or a Hub id, got tnn-cuasal; did you mean tnn-causal[?] ",
    ),
    "prompts in another encoding": (["generate", "--model_name_or_path", "tnn", "--prompt_file", "bad.txt"], 2, UTF8),
    "prompts that are not there": (
        ["generate", "--model_name_or_path", "tnn", "--prompt_file", "no.txt"],
        2,
        "error: The file no.txt does not exist",
    ),
    "results over prompts": (
        ["generate", "--model_name_or_path", "tnn", "--prompt_file", "good.txt", "--output_file", "good.txt"],
        2,
        "error: --output_file must not be the file with the prompts, got good.txt",
    ),
    "no such device": (
        ["generate", "--model_name_or_path", "tnn", "--prompt", "a", "--device", "x"],
        2,
        "error: --device must be a device of this machine, got x: ",
    ),
    "no such dtype": (
        ["generate", "--model_name_or_path", "tnn", "--prompt", "a", "--dtype", "x"],
        2,
        "error: --dtype must be auto or a dtype of torch",
    ),
    "texts in another encoding": (
        ["evaluate_lm", "--model_name_or_path", "tnn", "--validation_file", "bad.txt"],
        2,
        UTF8,
    ),
    "texts that are damaged": (
        ["evaluate_lm", "--model_name_or_path", "tnn", "--validation_file", "bad.jsonl"],
        2,
        "error: The file bad.jsonl has no rows that can be read: JSON parse error",
    ),
    "no network": (
        ["evaluate_lm", "--model_name_or_path", "tnn", "--dataset_name", "user/none"],
        1,
        "error: .*'user/none'",
    ),
    "training text in another encoding": (["pretrain", "--config_name", "config", "--train_file", "bad.txt"], 2, UTF8),
    "kernels of another model": (
        ["plot_kernels", "--model_name_or_path", "gpt2"],
        2,
        "error: --model_name_or_path must be a TNN, got gpt2 of gpt2",
    ),
    "recurrence of another model": (
        ["to_recurrent", "--model_name_or_path", "gpt2", "--dataset_name", "good.txt"],
        2,
        "error: --model_name_or_path must be a TNN, got gpt2 of gpt2",
    ),
    "broken recipe": (["pretrain", "--recipe", "bad.yaml"], 2, "error: --recipe bad.yaml cannot be read: while pars"),
    "recipe in another encoding": (
        ["run_lra", "--recipe", "bad.txt"],
        2,
        "error: --recipe bad.txt cannot be read",
    ),
    "broken overrides": (
        ["pretrain", "--config_name", "config", "--train_file", "good.txt", "--config_overrides", "decay=[1"],
        2,
        r"error: --config_overrides must have the form name=value,name=value, got decay=\[1: while parsing",
    ),
    "prompt of other bytes": (  # as Python reads them from a command line
        ["generate", "--model_name_or_path", "tnn", "--prompt", "a\udcff"],
        2,
        r"error: --prompt must be text in UTF-8, got 'a\\udcff'",
    ),
    "one token of a text": (
        ["evaluate_lm", "--model_name_or_path", "tnn", "--validation_file", "good.txt", "--max_tokens", "1"],
        2,
        "error: The text must have at least 2 tokens, got 1",
    ),
    "no tokens of a text": (
        ["evaluate_lm", "--model_name_or_path", "tnn", "--validation_file", "good.txt", "--max_tokens", "0"],
        2,
        "error: --max_tokens must be at least 1, got 0",
    ),
    "no texts in a batch": (
        ["generate", "--model_name_or_path", "tnn", "--prompt", "a", "--batch_size", "0"],
        2,
        "error: --batch_size must be at least 1, got 0",
    ),
    "no processes": (["plan", "--config_name", "tnn-tiny", "--processes", "0"], 2, "error: --processes must be at"),
    "no tokens of a sample": (
        ["run_lra", "--recipe", "lra/small-listops", "--max_length", "0"],
        2,
        "error: --max_length must be at least 1, got 0",
    ),
    "no pictures": (
        ["run_image_classification", "--recipe", "images/small-cifar10", "--max_eval_samples", "-1"],
        2,
        "error: --max_eval_samples must be at least 1, got -1",
    ),
    "a demo of another model": (
        ["demo", "--config_name", "gpt2"],
        2,
        "error: --config_name must be a TNN, got gpt2 of gpt2",
    ),
    "operator of the demo": (
        ["demo", "--tno_type", "ski"],
        2,
        "error: `causal` must be False with tno_type='ski', got True",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save_model(folder / "tnn", tno_type="rpe", decay=0.9)
    save_model(folder / "gpt2")
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=300)).save_pretrained(
        folder / "gpt2"
    )
    write_config(folder / "config")
    write_text(folder / "good.txt")
    (folder / "bad.txt").write_bytes(b"a: b\n\xff\xfe\n")
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "bad.yaml").write_text("a: [1\nb: }")
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_one_line(case, folder, tmp_path, monkeypatch, capsys):
    """No exception but the one that ends the process, and nothing is written."""
    (program, *given), status, message = REFUSED[case]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = sorted(folder.rglob("*"))
    output = (
        []
        if program in ("generate", "plan", "serve", "api") or "--recipe" in given
        else ["--output_dir", tmp_path / "out"]
    )
    with pytest.raises(SystemExit) as left:
        run_script(program, *given, *output)
    *_, line = capsys.readouterr().err.splitlines()
    assert left.value.code == status and re.search(message, line)
    assert sorted(folder.rglob("*")) == before and not list(tmp_path.iterdir())
    assert {path.name for path in tmp_path.glob("out/*")} <= {".lock"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_reports(program, monkeypatch):
    """Nothing starts a program but a `main` with `report_errors`."""
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    module = import_module(f"tnn_scripts.{program}")
    assert module.main.__wrapped__.__name__ == "main"


@pytest.mark.parametrize("mistake", [TypeError, AttributeError, KeyError, RuntimeError])
def test_mistakes_of_a_program_are_seen(mistake):
    @report_errors
    def main():
        raise mistake("a mistake")

    with pytest.raises(mistake):
        main()


def test_ctrl_c_in_a_destructor(monkeypatch):
    """Python loses what a `__del__` raises."""

    class Deaf:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    @report_errors
    def main():
        Deaf()
        for _ in range(600):
            time.sleep(0.1)

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    # A shell without job control starts what runs in the background with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.code == 130


@pytest.mark.parametrize("program", ["generate", "evaluate_lm"])
def test_ctrl_c(program, folder, tmp_path):
    """In the middle of a long computation."""
    long = ["--prompt", "The", "--max_new_tokens", "100000", "--eos_token_id", "null"]
    if program == "evaluate_lm":
        write_text(tmp_path / "long.txt", copies=4_000)
        long = [
            "--validation_file",
            tmp_path / "long.txt",
            "--lengths",
            "64",
            "--stride",
            "1",
            "--tokens_per_pass",
            "64",
        ]
        long += ["--output_dir", tmp_path / "out"]
    command = [sys.executable, SCRIPTS / f"{program}.py", "--model_name_or_path", folder / "tnn", *long]
    command = [str(part) for part in command]
    with processes.Process(command) as process:
        wait_until(lambda: "100%" in process.output()[1], process)  # the weights are loaded
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors and "Ctrl-C" not in errors
