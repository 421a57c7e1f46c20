"""Runs that are killed: no folder is ever half written, and what is resumed ends where the unbroken run ended."""

import json
import random
import shutil
import signal
import time

import pytest
from training_scripts import SCRIPTS, assert_same_weights, run_script, start_script, weights, write_config, write_text
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import checkpoints, clean, move_files, partial, prepare, prune, publish  # isort: skip

assert SCRIPTS.is_dir()


def options_for(tmp_path, objective: str) -> list:
    """Dropout, masks, accumulation, evaluation, several epochs: all that a resumed run could get wrong."""
    text = write_text(tmp_path / "text.txt", copies=100)
    config = write_config(tmp_path / "config", causal=objective == "clm", hidden_dropout_prob=0.2)
    return ["--objective", objective, "--config", config, "--train_file", text, "--max_steps", 60,
            "--learning_rate", 0.01, "--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2,
            "--eval_steps", 7]  # fmt: skip


def figures(folder) -> dict:
    return {k: v for k, v in json.loads((folder / "metrics.json").read_text()).items() if "second" not in k}


@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_resumed_is_unbroken(objective, tmp_path):
    options = options_for(tmp_path, objective)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_script("pretrain", *options, "--output_dir", whole, "--checkpointing_steps", 17)
    resumed.mkdir()
    shutil.copytree(whole / "checkpoint-34", resumed / "checkpoint-34")
    run_script("pretrain", *options, "--output_dir", resumed, "--resume_from_checkpoint", "latest")
    assert_same_weights(whole, resumed)
    assert_same_weights(whole / "best", resumed / "best")
    assert figures(whole) == figures(resumed)


def test_killed_at_any_moment(tmp_path):
    """Three times, twice while a checkpoint is being written; then to the end."""
    options = options_for(tmp_path, "clm") + ["--checkpointing_steps", 5]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_script("pretrain", *options, "--output_dir", whole)
    options += ["--output_dir", killed]
    randomness = random.Random(0)
    for moment in ("writing", "running", "writing"):
        resume = ["--resume_from_checkpoint", "latest"] if checkpoints(killed) else []
        done = len(checkpoints(killed))
        with start_script("pretrain", *options, *resume) as process:
            wait_until(lambda done=done: len(checkpoints(killed)) > done, process)
            if moment == "writing":
                wait_until(lambda: any(killed.glob(".checkpoint-*.partial/model.safetensors")), process)
            else:
                time.sleep(randomness.random() * 0.2)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL, "it had ended before"
        if moment == "writing":
            assert any(killed.glob(".checkpoint-*")), "nothing was being written"
        for checkpoint in checkpoints(killed):
            AutoModelForCausalLM.from_pretrained(checkpoint)
            AutoTokenizer.from_pretrained(checkpoint)
            step = json.loads((checkpoint / "trainer_state.json").read_text())["state"]["step"]
            assert checkpoint.name == f"checkpoint-{step}"
            assert_same_weights(checkpoint, whole / checkpoint.name)
    run_script("pretrain", *options, "--resume_from_checkpoint", "latest")
    assert_same_weights(whole, killed)
    assert figures(whole) == figures(killed)
    assert not list(killed.glob(".*"))
    assert weights(killed)


def wait_until(holds, process, seconds: float = 600):
    deadline = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def folder(path, content: str):
    path.mkdir()
    (path / "file").write_text(content)


def test_publish_replaces_a_folder(tmp_path):
    target = tmp_path / "best"
    folder(target, "old")
    prepare(target)
    (partial(target) / "file").write_text("new")
    assert (target / "file").read_text() == "old"
    publish(target)
    assert (target / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_clean_ends_what_was_begun(tmp_path):
    """Killed between the two renames, before the first, after the second, and while writing."""
    folder(tmp_path / ".best.old", "old")
    folder(tmp_path / ".best.partial", "new")
    folder(tmp_path / "checkpoint-3", "new")
    folder(tmp_path / ".checkpoint-3.old", "old")
    folder(tmp_path / ".checkpoint-4.partial", "half")
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "checkpoint-3"]
    assert (tmp_path / "best" / "file").read_text() == "old"
    assert (tmp_path / "checkpoint-3" / "file").read_text() == "new"


def test_prune(tmp_path):
    for step in (5, 10, 100, 20):
        folder(tmp_path / f"checkpoint-{step}", "")
    prune(tmp_path, None)
    assert len(checkpoints(tmp_path)) == 4
    prune(tmp_path, 2)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-20", "checkpoint-100"]
    assert len(list(tmp_path.iterdir())) == 2


def test_move_files(tmp_path):
    folder(tmp_path / "new", "new")
    (tmp_path / "file").write_text("old")
    move_files(tmp_path / "new", tmp_path)
    assert (tmp_path / "file").read_text() == "new" and not (tmp_path / "new").exists()
