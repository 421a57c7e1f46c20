"""Signals and exhausted memory in training and evaluation: the work is saved, and resuming gives the same result."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from helpers import processes
from helpers.glue import glue_options
from helpers.scripts import (
    assert_same_weights,
    at_call,
    figures,
    pretrain_options,
    run_script,
    start_script,
    two_processes,
    wait_until,
    write_config,
    write_text,
)
from tnn_scripts.common.accelerate_loop import Pretraining
from tnn_scripts.common.checkpoints import checkpoints
from tnn_scripts.common.devices import MemoryExceededError, suggest_smaller
from tnn_scripts.common.processes import StopRequest


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Options of a run with dropout, accumulation, evaluations at every seventh step, and what it ends with."""
    folder = tmp_path_factory.mktemp("unbroken")
    options = [*pretrain_options(folder, "clm"), "--max_steps", 16]
    run_script("pretrain", *options, "--output_dir", folder / "out")
    return options, folder / "out"


def send(number: int):
    return lambda: os.kill(os.getpid(), number)


STOPS = {
    "in a step": ("_train_step", 5, signal.SIGTERM, 5),
    "in a step with an evaluation": ("_train_step", 7, signal.SIGINT, 7),
    "while it saves the best model": ("_save_best", 1, signal.SIGTERM, 8),
    "in an evaluation": ("_evaluate", 2, signal.SIGTERM, 7),
    "in the last evaluation": ("_evaluate", 4, signal.SIGTERM, 16),
}


@pytest.mark.parametrize("moment", STOPS)
def test_stopped_is_unbroken(moment, unbroken, tmp_path, monkeypatch, capsys, caplog):
    """By a signal, with its status, after the step that was being computed; resumed, it ends as if there was none."""
    name, call, number, step = STOPS[moment]
    options, whole = unbroken
    options = [*options, "--output_dir", tmp_path]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patched:
        at_call(patched, Pretraining, name, call, send(number))
        with pytest.raises(SystemExit) as left:
            run_script("pretrain", *options)
    assert left.value.code == 128 + number
    assert f"stopped by a signal at step {step}. Continue with --resume_from_checkpoint latest" in caplog.text
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{step}"]
    assert not (tmp_path / "metrics.json").exists()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    run_script("pretrain", *options, "--resume_from_checkpoint", "latest")
    assert_same_weights(whole, tmp_path)
    assert_same_weights(whole / "best", tmp_path / "best")
    assert figures(whole) == figures(tmp_path)


def test_stopped_before_the_first_step(unbroken, tmp_path, monkeypatch, caplog):
    at_call(monkeypatch, Pretraining, "_evaluate", 1, send(signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        run_script("pretrain", *unbroken[0], "--output_dir", tmp_path)
    assert left.value.code == 143 and "stopped by a signal at step 0." in caplog.text
    assert not checkpoints(tmp_path)


def test_second_interrupt(monkeypatch):
    """A second Ctrl-C ends a single process; with several processes, launchers repeat the first one."""
    for count, ends in ((1, True), (2, False)):
        monkeypatch.setenv("WORLD_SIZE", str(count))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of xdist ignore it
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                assert not ends
            except KeyboardInterrupt:
                assert ends
        signal.signal(signal.SIGINT, before)
        assert stop.status == 130


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the processes")
def test_two_processes_stop_at_one_step(tmp_path):
    """One of them gets the signal; both stop after the same step, and the resumed run continues from it."""
    config = write_config(tmp_path / "config", hidden_dropout_prob=0.2)
    options = ["--config_name", config, "--train_file", write_text(tmp_path / "text.txt"), "--output_dir",
               tmp_path / "out",
               "--max_steps", 100_000, "--per_device_train_batch_size", 2, "--checkpointing_steps", 5]  # fmt: skip
    with start_script("pretrain", *options, launcher=two_processes()) as process:
        wait_until(lambda: checkpoints(tmp_path / "out"), process)
        workers = [child for child in children(process.pid) if "pretrain.py" in command_of(child)]
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    newest = checkpoints(tmp_path / "out")[-1]
    assert f"stopped by a signal at step {newest.name.removeprefix('checkpoint-')}." in output
    assert "exitcode  : 143" in output and not list((tmp_path / "out").glob(".*.partial"))
    assert {f"random_states_{rank}.pkl" for rank in range(2)} < set(os.listdir(newest))


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


@pytest.mark.slow
def test_finetuning_stops_and_goes_on(encoder, glue, tmp_path, monkeypatch, caplog):
    given = ["--task_name", "sst2", "--dataset_path", glue, "--save_strategy", "no", "--max_steps", 12]
    run_script("finetune_glue", *glue_options(encoder, tmp_path / "whole", *given))
    stopped = glue_options(encoder, tmp_path / "stopped", *given)
    with monkeypatch.context() as patched:
        at_call(patched, Trainer, "training_step", 5, send(signal.SIGTERM))
        with pytest.raises(SystemExit) as left:
            run_script("finetune_glue", *stopped)
    assert left.value.code == 143 and "stopped by a signal; step 5 is saved." in caplog.text
    assert not (tmp_path / "stopped" / "all_results.json").exists()
    damaged = tmp_path / "stopped" / "checkpoint-5" / "optimizer.pt"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + b"?")
    with pytest.raises(SystemExit, match=r"optimizer.pt is damaged"):
        run_script("finetune_glue", *stopped, "--resume_from_checkpoint", "latest")
    damaged.write_bytes(content)
    run_script("finetune_glue", *stopped, "--resume_from_checkpoint", "latest")
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")


LISTOPS = ["--task", "listops", "--config_name", "tnn-listops", "--max_train_samples", 50, "--save_strategy", "no",
           "--config_overrides",
           "hidden_size=8,num_hidden_layers=1,intermediate_size=8,rpe_dim=4,hidden_dropout_prob=0.2",
           "--max_steps", 6, "--per_device_train_batch_size", 2, "--report_to", "none"]  # fmt: skip


def test_long_range_training_stops_and_goes_on(tmp_path, monkeypatch, caplog):
    run_script("run_lra", *LISTOPS, "--output_dir", tmp_path / "whole")
    stopped = [*LISTOPS, "--output_dir", tmp_path / "stopped"]
    with monkeypatch.context() as patched:
        at_call(patched, Trainer, "training_step", 3, send(signal.SIGTERM))
        with pytest.raises(SystemExit) as left:
            run_script("run_lra", *stopped)
    assert left.value.code == 143 and "stopped by a signal; step 3 is saved." in caplog.text
    assert not (tmp_path / "stopped" / "all_results.json").exists()
    run_script("run_lra", *stopped, "--resume_from_checkpoint", "latest")
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run on ListOps of 3 steps, with its checkpoint."""
    folder = tmp_path_factory.mktemp("half")
    run_script("run_lra", *LISTOPS, "--output_dir", folder, "--max_steps", 3, "--save_strategy", "steps",
               "--save_steps", 3)  # fmt: skip
    return folder


OTHER_RUNS = {
    "rate": (["--learning_rate", "1e-3"], "learning_rate must be 5e-05, got 0.001"),
    "rate of the operators": (["--operator_learning_rate", "1e-3"], "groups must be {}, got"),
    "data": (["--max_train_samples", "40"], r"rows must be 50, got 40\n  labels must be"),
    "model": (["--config_overrides", "decay=0.9"], "config.decay must be 1.0, got 0.9"),
    "batch": (["--gradient_accumulation_steps", "2"], "batch must be 2, got 4"),
}


@pytest.mark.parametrize("case", OTHER_RUNS)
def test_trainer_resumes_no_other_run(case, half, tmp_path):
    """Every difference has a line. The same data, model and optimisation are resumed, to a later end too."""
    given, message = OTHER_RUNS[case]
    shutil.copytree(half, tmp_path / "out")
    resume = [*LISTOPS, "--output_dir", tmp_path / "out", "--resume_from_checkpoint", "latest"]
    with pytest.raises(SystemExit, match=rf"checkpoint-3 is a checkpoint of another run.\n  {message}"):
        run_script("run_lra", *resume, *given)


def test_trainer_resumes_what_has_no_description(half, tmp_path):
    """Checkpoints of version 0.1.0 say nothing of their run."""
    shutil.copytree(half, tmp_path / "out")
    checkpoint = tmp_path / "out" / "checkpoint-3"
    (checkpoint / "run.json").unlink()
    (checkpoint / "checksums.json").unlink()
    resume = ["--output_dir", tmp_path / "out", "--resume_from_checkpoint", "latest", "--learning_rate", "1e-3"]
    run_script("run_lra", *LISTOPS, *resume)
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["steps"] == 6


def test_finetuning_refuses_to_resume_a_sweep(encoder, tmp_path):
    with pytest.raises(SystemExit, match="--sweep must be given without --resume_from_checkpoint"):
        run_script("finetune_glue", *glue_options(encoder, tmp_path, "--task_name", "sst2", "--sweep",
                                                  "--resume_from_checkpoint", "latest"))  # fmt: skip


def exhaust():
    """Raise the error of PyTorch for a failed allocation."""
    torch.empty(2**55)


def test_evaluation_that_does_not_fit(unbroken, tmp_path, monkeypatch):
    """The training so far is saved, and a run with a smaller batch continues to the same end."""
    options, whole = unbroken
    options = [*options, "--output_dir", tmp_path]
    with monkeypatch.context() as patched:
        at_call(patched, Pretraining, "_evaluate", 3, exhaust)
        with pytest.raises(SystemExit, match="not enough memory for evaluation: give a --per_device_eval_batch"):
            run_script("pretrain", *options)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-14"]
    run_script("pretrain", *options, "--resume_from_checkpoint", "latest", "--per_device_eval_batch_size", 3)
    assert_same_weights(whole, tmp_path)
    expected, found = (json.loads((folder / "metrics.json").read_text())["loss"] for folder in (whole, tmp_path))
    assert found == pytest.approx(expected, rel=1e-6)


def test_step_that_does_not_fit(unbroken, tmp_path, monkeypatch):
    at_call(monkeypatch, Pretraining, "_train_step", 4, exhaust)
    with pytest.raises(SystemExit, match="for a training step: give a smaller --per_device_train_batch_size .*latest"):
        run_script("pretrain", *unbroken[0], "--output_dir", tmp_path, "--checkpointing_steps", 2)


@pytest.mark.parametrize("call, option", [("train", "train_batch_size"), ("evaluate", "eval_batch_size")])
def test_finetuning_that_does_not_fit(call, option, encoder, glue, tmp_path, monkeypatch):
    at_call(monkeypatch, Trainer, call, 1, exhaust)
    given = ["--task_name", "sst2", "--dataset_path", glue, "--save_strategy", "no", "--max_steps", 1]
    with pytest.raises(SystemExit, match=f"not enough memory for .*give a smaller --per_device_{option}"):
        run_script("finetune_glue", *glue_options(encoder, tmp_path, *given))
    assert (tmp_path / "model.safetensors").exists() == (call == "evaluate"), "what was trained is kept"


@pytest.mark.parametrize("call, option", [("train", "train_batch_size"), ("evaluate", "eval_batch_size")])
def test_long_range_training_that_does_not_fit(call, option, tmp_path, monkeypatch):
    at_call(monkeypatch, Trainer, call, 1, exhaust)
    with pytest.raises(SystemExit, match=f"not enough memory for .*give a smaller --per_device_{option}"):
        run_script("run_lra", *LISTOPS, "--output_dir", tmp_path)
    assert (tmp_path / "model.safetensors").exists() == (call == "evaluate"), "what was trained is kept"


def test_evaluation_by_length_that_does_not_fit(unbroken, tmp_path, monkeypatch):
    monkeypatch.setattr("tnn_scripts.common.scoring.score_rows", lambda *_: exhaust())
    with pytest.raises(SystemExit, match="at length 32: give a smaller --tokens_per_pass than 4096"):
        run_script("evaluate_lm", "--model_name_or_path", unbroken[1], "--validation_file",
                   write_text(tmp_path / "text.txt"), "--lengths", 32,
                   "--output_dir", tmp_path / "lengths")  # fmt: skip


LIMITED = """
import resource, sys
import torch
from tnn_scripts.common.devices import MemoryExceededError, suggest_smaller
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
attempts = {
    "tensor": lambda: torch.ones(2**28), "transform": lambda: torch.fft.rfft(torch.ones(1, 2**25), n=2**26),
    "bytes": lambda: bytearray(2**30), "array": lambda: torch.ones(2**20).numpy().repeat(2**10),
}
for name, attempt in attempts.items():
    try:
        with suggest_smaller(name, "try less"):
            attempt()
        print(name, "fits")
    except MemoryExceededError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are those of Linux")
def test_errors_of_a_machine_without_memory():
    """The real errors, with a limit on the memory of a process."""
    command = [sys.executable, "-c", LIMITED, str(Path(__file__).parents[2] / "scripts")]
    run = processes.run(command, check=True)
    for name in ("tensor", "transform", "bytes", "array"):
        assert f"There is not enough memory for {name}: try less (" in run.stdout, run.stdout


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB."), MemoryError()])
def test_errors_of_memory(error):
    with pytest.raises(MemoryExceededError, match=r"for it: try \((CUDA|MemoryError)"), suggest_smaller("it", "try"):
        raise error
    with pytest.raises(RuntimeError, match="^something else$"), suggest_smaller("it", "try less"):
        raise RuntimeError("something else")
