"""One of several processes is killed, stands still, gets a signal or finds its disk full: all end, nothing is lost."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers import processes
from helpers.scripts import assert_same_weights, launch_environment, program, wait_until, write_config, write_text
from tnn_programs.cli.runs import checkpoints

pytestmark = pytest.mark.slow

# pretrain.py in which something happens to the last process at step 5.
WITH_A_FAULT = """
import os, signal, sys, time
from tnn_programs import pretrain
from tnn_programs.training import accelerate_loop
from tnn_programs.cli import atomic

def train_step(self, batches, original=accelerate_loop.Pretraining._train_step):
    if self.state.step == 5 and os.environ["RANK"] == "1":
        FAULT
    return original(self, batches)

accelerate_loop.Pretraining._train_step = train_step
sys.argv[0] = "pretrain"
pretrain.main()
"""
FAULTS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "stands still": "time.sleep(600)",
    "signal": "os.kill(os.getpid(), signal.SIGTERM)",
    # More than the output of the program, less than any state.
    "full disk": """import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))""",
}


@pytest.fixture
def options(tmp_path):
    config = write_config(tmp_path / "config", hidden_dropout_prob=0.1)
    return ["--config_name", config, "--train_file", write_text(tmp_path / "text.txt"), "--max_steps", 8,
            "--learning_rate", 0.01, "--per_device_train_batch_size", 3, "--checkpointing_steps", 4,
            "--max_eval_blocks", 4, "--ddp_timeout", 8]  # fmt: skip


def run_with(fault: str, *options, config: str) -> list[processes.Process]:
    """Two processes until both have ended, without a launcher that ends one after the other."""
    command = [sys.executable, "-c", WITH_A_FAULT.replace("FAULT", FAULTS[fault]), *options]
    with ExitStack() as running:
        ranks = [running.enter_context(processes.Process(command, env)) for env in launch_environment(config, 2)]
        if fault == "stands still":
            wait_until(lambda: ranks[0].poll() is not None, ranks[1], seconds=120)
            ranks[1].send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.communicate(timeout=120)
        return ranks


@pytest.mark.parametrize("config", ["cpu-gloo", "cpu-fsdp2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_process_fails(fault, config, options, tmp_path):
    out = tmp_path / "out"
    first, second = run_with(fault, *options, "--output_dir", out, config=config)
    errors = [rank.output()[1] for rank in (first, second)]
    assert not any("Traceback" in error for error in errors), errors
    if fault == "signal":
        assert (first.returncode, second.returncode) == (143, 143), errors
        assert "stopped by a signal at step 6. Continue with --resume_from_checkpoint latest." in errors[0]
        assert [path.name for path in checkpoints(out)] == ["checkpoint-4", "checkpoint-6"]
    else:
        assert first.returncode == 1, errors
        lost = "Another process of this run has ended, or has not answered within --ddp_timeout"
        shared = (fault, config) == ("full disk", "cpu-fsdp2")  # PyTorch tells all processes why one could not save
        assert ("could not be saved: process 1" if shared else lost) in errors[0]
        assert "Continue with --resume_from_checkpoint latest." in errors[0]
        assert [path.name for path in checkpoints(out)] == ["checkpoint-4"]
    if fault == "full disk":
        assert second.returncode == 1 and "could not be saved" in errors[1], errors
    assert not (out / "model.safetensors").exists()
    assert not list(out.glob(".*partial"))


def test_a_launcher_restarts(options, tmp_path):
    """One of four processes is killed: torchrun starts all again, and they end with the weights of an unbroken run."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    # Otherwise the restarted processes find the addresses of those that have ended.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # One restart is tested. The others are for ports: torchrun picks a free one, and where another process takes it
    # before the first rank listens, this rank ends with EADDRINUSE.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4",
                "--max_restarts", "3"]  # fmt: skip
    options = [*options, "--ddp_timeout", 60, "--resume_from_checkpoint", "auto"]
    for name in ("whole", "killed"):
        command = [*torchrun, *program("pretrain", *options, "--output_dir", tmp_path / name)[1:]]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as launcher:
            if name == "killed":
                wait_until(lambda: checkpoints(tmp_path / "killed"), launcher, seconds=300)
                children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
                os.kill(int(children[2]), signal.SIGKILL)
            errors = launcher.communicate(timeout=400)[1].decode()
        assert launcher.returncode == 0, errors
        assert ("resumed at step 4" in errors) == (name == "killed")
        ended = len(re.findall(r"failed \(exitcode", errors))
        assert ended <= errors.count("EADDRINUSE") + (name == "killed"), errors
    # DDP sends the gradients of its first step in other pieces, and the sums of four numbers depend on their order.
    assert_same_weights(tmp_path / "whole", tmp_path / "killed", tolerance=1e-6)
