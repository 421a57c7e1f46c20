"""Running the training scripts on a small text, in this process or in others."""

import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from modeling_tnn import TnnConfig

ROOT = Path(__file__).parent.parent
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


def run_script(name: str, *arguments):
    """Call the `main` of a script in this process; what ends it early is raised."""
    script, saved = import_module(f"tnn_scripts.{name}"), sys.argv
    sys.argv = [name, *map(str, arguments)]
    try:
        return script.main()
    finally:
        sys.argv = saved
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def start_script(name: str, *arguments, launcher: tuple = (), **options) -> subprocess.Popen:
    """Start a script in a process of its own, by `launcher` if there is one."""
    command = [*(launcher or (sys.executable,)), str(SCRIPTS / f"{name}.py"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    return subprocess.Popen(command, **pipes | options)


def two_processes() -> list[str]:
    """The launcher of two processes on the CPU, on a port of their own: workers of xdist start them side by side."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    file = ROOT / "configuration" / "accelerate" / "cpu-gloo.yaml"
    command = [
        Path(sys.executable).parent / "accelerate",
        "launch",
        "--main_process_port",
        port,
        "--config_file",
        file,
    ]
    return [str(part) for part in command]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(first: Path, second: Path, tolerance: float = 0.0):
    first, second = weights(first), weights(second)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=tolerance)
