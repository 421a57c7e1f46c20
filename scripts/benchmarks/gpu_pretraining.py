"""`pretrain.py` on a device: some minutes of a recipe in bfloat16, on generated text."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import numpy as np
from datasets import Dataset

from tnn_scripts.data.text import train_tokenizer

PROGRAM = Path(__file__).parents[1] / "pretrain.py"

# The bar of the program: "training:  50%|..| 1/2 [00:00<00:00, 5.1step/s, loss 6.864, lr 1.2e-07, 25977 tokens/s]".
LOGGED = re.compile(r"(\d+)/\d+ \[.*, loss (\S+), lr \S+, (\d+) tokens/s")


def generated_text(file: Path, lines: int, words: int) -> Path:
    """A text of words that are as frequent as in real ones (the n-th in proportion to 1/n), with headings."""
    draw, letters = np.random.default_rng(0), list("etaoinshrdlucmfw")
    names = np.array(["".join(draw.choice(letters, draw.integers(2, 10))) for _ in range(words)])
    weights = 1 / np.arange(1, words + 1)
    rows = [" ".join(row) + " .\n" for row in draw.choice(names, (lines, 60), p=weights / weights.sum())]
    rows[::40] = [f" = {' '.join(row.split()[:2])} = \n" for row in rows[::40]]
    file.write_text("".join(rows), encoding="utf-8")
    return file


def options_of(args) -> list:
    """The options of the program, for data in files of the output folder."""
    text = generated_text(args.output_dir / "generated.txt", args.lines, args.words)
    train_tokenizer(Dataset.from_text(str(text)), args.vocab_size).save_pretrained(args.output_dir / "tokenizer")
    options = ["--recipe", "wikitext103", "--dataset_name", text, "--tokenizer_name", args.output_dir / "tokenizer"]
    options += ["--output_dir", args.output_dir / "recipe", "--overwrite_output_dir", "--max_eval_blocks", 4]
    options += ["--mixed_precision", "bf16", "--logging_steps", 1, *args.recipe_options.split()]
    return [*options, *(["--use_cpu"] if args.device == "cpu" else [])]


def recipe(args) -> Iterator[dict]:
    """The logged steps of the recipe with its batch and its model, ended by the signal that saves it.

    Raises:
        RuntimeError: it failed.
    """
    command = [str(part) for part in (sys.executable, PROGRAM, *options_of(args))]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process, row, last = subprocess.Popen(command, **output), {}, ""  # noqa: S603 - the command is this program's own
    end = Timer(args.recipe_seconds, process.terminate)
    end.start()
    for line in process.stdout:
        sys.stdout.write(line)
        last = line if line.strip() else last
        for step, loss, speed in LOGGED.findall(line):
            is_new = int(step) > row.get("step", 0)  # a bar is drawn again and again
            row = {"step": int(step), "loss": loss, "tokens_per_second": float(speed)}
            if is_new and row["step"].bit_count() == 1:  # few rows tell the course of the loss
                yield row
    end.cancel()
    if row and row["step"].bit_count() > 1:
        yield row
    if process.wait() not in (0, 128 + signal.SIGTERM):
        raise RuntimeError(f"pretrain.py ended with the status {process.returncode}: {last.strip()}")
