"""Signals and exhausted memory in training and evaluation: the work is saved, and resuming gives the same result."""

import os
import signal
import sys
from pathlib import Path

from tnn_programs.cli.errors import MemoryExceededError, suggest_smaller

import pytest
import torch
from transformers import Trainer

from helpers import processes
from helpers.glue import glue_options
from helpers.models import slow
from helpers.scripts import (
    assert_same_weights,
    at_call,
    figures,
    pretrain_options,
    read,
    run_script,
    start_script,
    two_processes,
    wait_until,
    write_config,
    write_text,
)
from tnn_programs.cli.runs import checkpoints
from tnn_programs.training.accelerate_loop import Pretraining
from tnn_programs.training.processes import StopRequest


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Options of a run with dropout, accumulation, evaluations at every seventh step, and what it ends with."""
    folder = tmp_path_factory.mktemp("unbroken")
    options = [*pretrain_options(folder, "clm"), "--max_steps", 16]
    run_script("pretrain", *options, "--output_dir", folder / "out")
    return options, folder / "out"


def send(number: int):
    return lambda: os.kill(os.getpid(), number)


def exhaust():
    """Raise the error of PyTorch for a failed allocation."""
    torch.empty(2**55)


def ends(owner, name: str, call: int, action, *command) -> SystemExit:
    """What a program leaves by, in which something happens in a certain call of a method."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as left:
        at_call(patched, owner, name, call, action)
        run_script(*command)
    return left.value


STOPS = {
    "in a step": ("_train_step", 5, signal.SIGTERM, 5),
    "in a step with an evaluation": ("_train_step", 7, signal.SIGINT, 7),
    "while it saves the best model": ("save_model", 1, signal.SIGTERM, 8),
    "in an evaluation": ("_evaluate", 2, signal.SIGTERM, 7),
    "in the last evaluation": ("_evaluate", 4, signal.SIGTERM, 16),
}


@pytest.mark.parametrize("moment", ["in a step", *slow(*list(STOPS)[1:])])
def test_stopped_is_unbroken(moment, unbroken, tmp_path, caplog):
    """By a signal, with its status, after the step that was being computed; resumed, it ends as if there was none."""
    name, call, number, step = STOPS[moment]
    options, whole = unbroken
    command = ["pretrain", *options, "--output_dir", tmp_path]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert ends(Pretraining, name, call, send(number), *command).code == 128 + number
    assert f"stopped by a signal at step {step}. Continue with --resume_from_checkpoint latest" in caplog.text
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{step}"]
    assert not (tmp_path / "metrics.json").exists()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    run_script(*command, "--resume_from_checkpoint", "latest")
    for name in ("", "best"):
        assert_same_weights(whole / name, tmp_path / name)
    assert figures(whole) == figures(tmp_path)


def test_stopped_before_the_first_step(unbroken, tmp_path, caplog):
    command = ["pretrain", *unbroken[0], "--output_dir", tmp_path]
    assert ends(Pretraining, "_evaluate", 1, send(signal.SIGTERM), *command).code == 143
    assert "stopped by a signal at step 0." in caplog.text and not checkpoints(tmp_path)


def test_second_interrupt(monkeypatch):
    """A second Ctrl-C ends a single process; with several processes, launchers repeat the first one."""
    for count, expected in ((1, True), (2, False)):
        monkeypatch.setenv("WORLD_SIZE", str(count))
        before, ended = signal.signal(signal.SIGINT, signal.default_int_handler), False  # workers of xdist ignore it
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                ended = True
        signal.signal(signal.SIGINT, before)
        assert stop.status == 130 and ended == expected


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the processes")
def test_two_processes_stop_at_one_step(tmp_path):
    """One of them gets the signal; both stop after the same step, and the resumed run continues from it."""
    config, out = write_config(tmp_path / "config", hidden_dropout_prob=0.2), tmp_path / "out"
    options = ["--config_name", config, "--train_file", write_text(tmp_path / "text.txt"), "--output_dir", out,
               "--max_steps", 100_000, "--per_device_train_batch_size", 2, "--checkpointing_steps", 5]  # fmt: skip
    with start_script("pretrain", *options, launcher=two_processes()) as process:
        wait_until(lambda: checkpoints(out), process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [child for child in children if b"pretrain.py" in Path(f"/proc/{child}/cmdline").read_bytes()]
        assert len(workers) == 2
        os.kill(int(workers[1]), signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    newest = checkpoints(out)[-1]
    assert f"stopped by a signal at step {newest.name.removeprefix('checkpoint-')}." in output
    assert "exitcode  : 143" in output and not list(out.glob(".*.partial"))
    assert {f"random_states_{rank}.pkl" for rank in range(2)} < set(os.listdir(newest))


LISTOPS = ["--task", "listops", "--config_name", "tnn-listops", "--max_train_samples", 50, "--save_strategy", "no",
           "--config_overrides",
           "hidden_size=8,num_hidden_layers=1,intermediate_size=8,rpe_dim=4,hidden_dropout_prob=0.2",
           "--max_steps", 6, "--per_device_train_batch_size", 2, "--report_to", "none"]  # fmt: skip


def long_range(request, out: Path) -> list:
    return ["run_lra", *LISTOPS, "--output_dir", out]


def fine_tuning(request, out: Path) -> list:
    data = ["--task_name", "sst2", "--dataset_path", request.getfixturevalue("glue")]
    model = request.getfixturevalue("encoder")
    return ["finetune_glue", *glue_options(model, out, *data, "--save_strategy", "no", "--max_steps", 6)]


OF_TRAINER = pytest.mark.parametrize("program", [long_range, fine_tuning], ids=lambda program: program.__name__)


@pytest.mark.parametrize("program", [long_range, pytest.param(fine_tuning, marks=pytest.mark.slow)])
def test_programs_of_trainer_stop_and_go_on(program, request, tmp_path, caplog):
    run_script(*program(request, tmp_path / "whole"))
    stopped = program(request, tmp_path / "stopped")
    assert ends(Trainer, "training_step", 3, send(signal.SIGTERM), *stopped).code == 143
    assert "stopped by a signal; step 3 is saved." in caplog.text
    assert not (tmp_path / "stopped" / "all_results.json").exists()
    damaged = tmp_path / "stopped" / "checkpoint-3" / "optimizer.pt"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + b"?")
    with pytest.raises(SystemExit, match=r"optimizer.pt is damaged"):
        run_script(*stopped, "--resume_from_checkpoint", "auto")
    damaged.write_bytes(content)
    run_script(*stopped, "--resume_from_checkpoint", "latest")
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")


OTHER_RUNS = {
    "--learning_rate 1e-3": "learning_rate must be 5e-05, got 0.001",
    "--operator_learning_rate 1e-3": "groups must be {}, got",
    "--max_train_samples 40": r"rows must be 50, got 40\n  labels must be",
    "--config_overrides decay=0.9": "config.decay must be 1.0, got 0.9",
    "--gradient_accumulation_steps 2": "batch must be 2, got 4",
}


def test_trainer_resumes_no_other_run(tmp_path):
    """Every difference has a line. What says nothing of its run, as in version 0.1.0, is resumed, to a later end."""
    command = [*long_range(None, tmp_path), "--save_strategy", "steps", "--save_steps", 3]
    run_script(*command, "--max_steps", 3)
    resume = [*command, "--resume_from_checkpoint", "latest"]
    for given, message in OTHER_RUNS.items():
        with pytest.raises(SystemExit, match=rf"checkpoint-3 is a checkpoint of another run.\n  {message}"):
            run_script(*resume, given)
    for name in ("run.json", "checksums.json"):
        (tmp_path / "checkpoint-3" / name).unlink()
    run_script(*resume, "--learning_rate", "1e-3")
    assert read(tmp_path)["steps"] == 6


def test_evaluation_that_does_not_fit(unbroken, tmp_path):
    """The training so far is saved, and a run with a smaller batch continues to the same end."""
    options, whole = unbroken
    command = ["pretrain", *options, "--output_dir", tmp_path]
    message = str(ends(Pretraining, "_evaluate", 3, exhaust, *command))
    assert "not enough memory for evaluation: give a --per_device_eval_batch" in message
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-14"]
    run_script(*command, "--resume_from_checkpoint", "latest", "--per_device_eval_batch_size", 3)
    assert_same_weights(whole, tmp_path)
    assert read(tmp_path, "metrics")["loss"] == pytest.approx(read(whole, "metrics")["loss"], rel=1e-6)


def test_step_or_length_that_does_not_fit(unbroken, tmp_path, monkeypatch):
    command = ["pretrain", *unbroken[0], "--output_dir", tmp_path, "--checkpointing_steps", 2]
    message = str(ends(Pretraining, "_train_step", 4, exhaust, *command))
    assert "for a training step: give a smaller --per_device_train_batch_size" in message and "latest" in message
    monkeypatch.setattr("modeling_tnn.tools.comparing.score_rows", lambda *_: exhaust())
    with pytest.raises(SystemExit, match="at length 32: give a smaller --tokens_per_pass than 4096"):
        run_script("evaluate_lm", "--model_name_or_path", unbroken[1], "--validation_file",
                   write_text(tmp_path / "text.txt"), "--lengths", 32, "--output_dir", tmp_path / "out")  # fmt: skip


@OF_TRAINER
@pytest.mark.parametrize("call, option", [("train", "train_batch_size"), ("evaluate", "eval_batch_size")])
def test_programs_of_trainer_that_do_not_fit(program, call, option, request, tmp_path):
    message = str(ends(Trainer, call, 1, exhaust, *program(request, tmp_path)))
    assert "not enough memory for " in message and f"give a smaller --per_device_{option}" in message
    assert (tmp_path / "model.safetensors").exists() == (call == "evaluate"), "what was trained is kept"


LIMITED = """
import resource, sys
import torch
from tnn_programs.cli.errors import MemoryExceededError, suggest_smaller
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are those of Linux")
def test_errors_of_a_machine_without_memory():
    """The real errors, with a limit on the memory of a process; those of CUDA; and no others."""
    said = processes.run([sys.executable, "-c", LIMITED], check=True).stdout
    for name in ("tensor", "transform", "bytes", "array"):
        assert f"There is not enough memory for {name}: try less (" in said, said
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB."), MemoryError()):
        with pytest.raises(MemoryExceededError, match=r"it: try \((CUDA|MemoryError)"), suggest_smaller("it", "try"):
            raise error
    with pytest.raises(RuntimeError, match="^something else$"), suggest_smaller("it", "try less"):
        raise RuntimeError("something else")
