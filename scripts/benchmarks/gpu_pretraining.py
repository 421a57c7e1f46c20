"""`pretrain.py` on a device: one step in bfloat16, and two minutes of a recipe, on generated text."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from datasets import Dataset

from tnn_scripts.data.text import train_tokenizer

PROGRAM = Path(__file__).parents[1] / "pretrain.py"
RECIPE_SECONDS = 120

# The bar of the program: "training:  50%|..| 1/2 [00:00<00:00, 5.1step/s, loss 6.864, lr 1.2e-07, 25977 tokens/s]".
LOGGED = re.compile(r"(\d+)/\d+ \[.*, loss (\S+), lr \S+, (\d+) tokens/s\]")
TINY = "hidden_size=32,num_hidden_layers=1,intermediate_size=32,rpe_dim=8,gtu_expansion=2,vocab_size=600"


def generated_text(file: Path, lines: int, words: int) -> Path:
    """A text of words that are as frequent as in real ones (the n-th in proportion to 1/n), with headings."""
    draw, letters = np.random.default_rng(0), list("etaoinshrdlucmfw")
    names = np.array(["".join(draw.choice(letters, draw.integers(2, 10))) for _ in range(words)])
    weights = 1 / np.arange(1, words + 1)
    rows = [" ".join(row) + " .\n" for row in draw.choice(names, (lines, 60), p=weights / weights.sum())]
    rows[::40] = [f" = {' '.join(row.split()[:2])} = \n" for row in rows[::40]]
    file.write_text("".join(rows), encoding="utf-8")
    return file


def prepared(args) -> list:
    """The options for the data, in files of the output folder."""
    folder = args.output_dir
    text = generated_text(folder / "generated.txt", 400 if args.quick else 10000, 500 if args.quick else 30000)
    size = 600 if args.quick else 50265
    train_tokenizer(Dataset.from_text(str(text)), size).save_pretrained(folder / "tokenizer")
    return ["--tokenizer_name", folder / "tokenizer", *(["--use_cpu"] if args.device == "cpu" else [])]


def one_step(args) -> Iterator[dict]:
    """Two steps (the first one also compiles and allocates) of the preset of the paper."""
    options = ["--config_name", "tnn-causal", "--train_file", args.output_dir / "generated.txt"]
    options += ["--mixed_precision", "bf16", "--max_steps", 2, "--logging_steps", 1]
    yield from pretrain([*prepared(args), *options], "one-step", args, seconds=None)


def recipe(args) -> Iterator[dict]:
    """The recipe with its batch and its model, in bfloat16, ended by the signal that saves it."""
    options = ["--recipe", "wikitext103", "--dataset_name", args.output_dir / "generated.txt"]
    options += ["--mixed_precision", "bf16", "--logging_steps", 1]
    if args.quick:
        options += ["--max_steps", 2, "--gradient_accumulation_steps", 1]
    yield from pretrain([*prepared(args), *options], "recipe", args, None if args.quick else RECIPE_SECONDS)


def pretrain(options: list, name: str, args, seconds: float | None) -> Iterator[dict]:
    """The logged steps of a run.

    Raises:
        RuntimeError: it failed.
    """
    options += ["--output_dir", args.output_dir / name, "--overwrite_output_dir", "--max_eval_blocks", 4]
    options += ["--config_overrides", TINY, "--block_size", 64] if args.quick else []
    command = [str(part) for part in (sys.executable, PROGRAM, *options)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **output)  # noqa: S603 - the command is this program's own
    try:
        log, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        log, _ = process.communicate()
    sys.stdout.write(log)
    steps = {int(step): (loss, float(speed)) for step, loss, speed in LOGGED.findall(log)}
    # Few rows tell the course of the loss.
    for step in sorted({*list(steps)[:: max(1, len(steps) // 8)], *list(steps)[-1:]}):
        yield {"step": step, "loss": steps[step][0], "tokens_per_second": steps[step][1]}
    stopped = 128 + signal.SIGTERM if seconds is not None else 0
    if process.returncode not in (0, stopped):
        raise RuntimeError(f"pretrain.py ended with the status {process.returncode}: {log.strip().splitlines()[-1]}")
