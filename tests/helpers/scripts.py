"""Running the training scripts on a small text, in this process or in others."""

import contextlib
import io
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

import torch
import transformers
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from helpers import processes
from helpers.models import lively_language_model
from modeling_tnn import TnnConfig

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
SENTENCES = ["The quick brown fox jumps over the lazy dog.", "Pack my box with five dozen jugs of liquor.", ""]


def write_text(path: Path, copies: int = 300) -> Path:
    path.write_text("\n".join(SENTENCES * copies))
    return path


def write_config(folder: Path, **fields) -> Path:
    """A config of a model that takes milliseconds, with dropout."""
    defaults = {
        "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 32, "rpe_dim": 16,
        "rpe_layers": 1, "rtf_state_size": 4, "gtu_expansion": 2,
    }  # fmt: skip
    TnnConfig(**defaults | fields).save_pretrained(folder)
    return folder


def words(*arguments) -> list[str]:
    """The arguments of a command line. One that begins with `--` is split as a shell does."""
    parts = map(str, arguments)
    return [word for part in parts for word in (shlex.split(part) if part.startswith("--") else [part])]


def run_script(name: str, *arguments):
    """Call the `main` of a script in this process; what ends it early is raised."""
    script, saved = import_module(f"tnn_programs.{name}"), sys.argv
    sys.argv = [name, *words(*arguments)]
    try:
        return script.main()
    finally:
        sys.argv = saved
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        transformers.utils.logging.enable_progress_bar()  # `pretrain` has none


def program(name: str, *arguments) -> list[str]:
    """The command that runs a program in a separate process."""
    return [sys.executable, str(SCRIPTS / f"{name}.py"), *words(*arguments)]


def start_script(name: str, *arguments, launcher: tuple = (), **options) -> subprocess.Popen:
    """Start a script in a process of its own, by `launcher` if there is one."""
    command = program(name, *arguments)
    command[:1] = launcher or command[:1]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    return subprocess.Popen(command, **pipes | options)


def free_port() -> int:
    """A free port below those of outgoing connections, one of which could take it before it is used."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", random.SystemRandom().randrange(20_000, 32_000)))
            return free.getsockname()[1]


def launch_environment(config: str, count: int, *options) -> list[dict[str, str]]:
    """The variables that `accelerate launch` sets for each of several processes on the CPU."""
    file = ROOT / "configuration" / "accelerate" / f"{config}.yaml"
    given = ["--config_file", file, "--num_processes", count, *options, "script.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args([str(part) for part in given]))
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    known = os.environ | prepare_multi_gpu_env(args) | shared
    return [known | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def run_ranks(name: str, *options, config: str = "cpu-gloo", count: int = 2, launcher: tuple = ()) -> list[tuple]:
    """Run a program, or code after `-c`, in several processes, as `accelerate launch` starts them, but forked.

    Returns:
        What each wrote on stdout and stderr.
    """
    command = [sys.executable, name, *options] if name == "-c" else program(name, *options)
    with contextlib.ExitStack() as running:
        environments = launch_environment(config, count, *launcher)
        ranks = [running.enter_context(processes.Process(command, env)) for env in environments]
        deadline = time.monotonic() + 300
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > deadline:
                for rank in ranks:
                    rank.write_stacks()
                raise AssertionError("\n".join(f"status {rank.poll()}: {rank.output()[1]}" for rank in ranks))
            time.sleep(0.05)
        # Where one process fails, the launcher ends the others, which may be waiting for it.
        failed = [rank.output()[1] for rank in ranks if rank.poll()]
        assert not failed, "\n".join(failed)
        return [rank.communicate() for rank in ranks]


def two_processes() -> list[str]:
    """The launcher of two processes on the CPU, on a port of their own: workers of xdist start them side by side."""
    file = ROOT / "configuration" / "accelerate" / "cpu-gloo.yaml"
    accelerate = Path(sys.executable).parent / "accelerate"
    return words(accelerate, "launch", f"--main_process_port {free_port()} --config_file {file}")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(first: Path, second: Path, tolerance: float = 0.0):
    first, second = weights(first), weights(second)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=tolerance)


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self):
        return Path.touch, (self.victim,)


def tree(folder: Path) -> dict[str, bytes]:
    """The contents of a folder without the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def at_call(monkeypatch, owner, name: str, call: int, action):
    """Do something in a certain call of a method."""
    original, calls = getattr(owner, name), []

    def wrapper(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            action()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


def pretrain_options(tmp_path, objective: str) -> list:
    """Dropout, masks, accumulation, evaluation, several epochs: all that a resumed run could get wrong."""
    text = write_text(tmp_path / "text.txt", copies=100)
    config = write_config(tmp_path / "config", causal=objective == "clm", hidden_dropout_prob=0.2)
    return words(f"--objective {objective} --config_name {config} --train_file {text} --max_steps 60 --eval_steps 7",
                 "--learning_rate 0.01 --per_device_train_batch_size 4 --gradient_accumulation_steps 2")  # fmt: skip


def read(folder: Path, name: str = "all_results") -> dict:
    """A JSON file that a program has written."""
    return json.loads((folder / f"{name}.json").read_text())


def figures(folder) -> dict:
    return {k: v for k, v in read(folder, "metrics").items() if "second" not in k}


def wait_until(holds, process, seconds: float = 600):
    deadline = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline
        time.sleep(0.0005)


TEXT = "The quick brown fox jumps over the lazy dog.\n" * 300


def run(script: str, *arguments, check: bool = True) -> subprocess.CompletedProcess:
    """In this process, for speed; what a program leaves with is its status and its last line on stderr."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            run_script(script.removesuffix(".py"), *arguments)
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else int(left.code is not None)
            err.write(left.code if isinstance(left.code, str) else "")
    assert not check or status == 0, err.getvalue()
    return subprocess.CompletedProcess([script], status, out.getvalue(), err.getvalue())


def save_model(folder: Path, **fields) -> Path:
    """An untrained model with a tokenizer of 99 tokens."""
    bpe = ByteLevelBPETokenizer()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    bpe.train_from_iterator([TEXT], vocab_size=260, special_tokens=list(special.values()))
    PreTrainedTokenizerFast(tokenizer_object=bpe, **special).save_pretrained(folder)
    lively_language_model(vocab_size=300, max_position_embeddings=32, **fields).float().save_pretrained(folder)
    return folder


def table_rows(text: str) -> list[list[str]]:
    """The cells of the Markdown tables in a text, headings included."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
