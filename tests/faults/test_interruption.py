"""Runs that are killed: no folder is ever half written, and what is resumed ends where the unbroken run ended."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import processes
from helpers.scripts import assert_same_weights, figures, pretrain_options, program, read, run_script, tree, wait_until
from tnn_programs.cli.atomic import LOCK, claim, clean, new_files, new_folder
from tnn_programs.cli.runs import checkpoints, remove_others

STREAM = ["--streaming", "--num_shards", 1, "--max_eval_blocks", 10, "--dataloader_num_workers", 1]


@pytest.mark.slow
@pytest.mark.parametrize("data", [[], STREAM], ids=["file", "stream"])
def test_killed_at_any_moment(data, tmp_path):
    """Three times, twice while a checkpoint is being written; then to the end."""
    options = pretrain_options(tmp_path, "clm") + ["--checkpointing_steps", 5, *data]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_script("pretrain", *options, "--output_dir", whole)
    options += ["--output_dir", killed]
    randomness = random.Random(0)
    for moment in ("writing", "running", "writing"):
        resume = ["--resume_from_checkpoint", "latest"] if checkpoints(killed) else []
        done = len(checkpoints(killed))
        with processes.Process(program("pretrain", *options, *resume)) as process:
            wait_until(lambda done=done: len(checkpoints(killed)) > done, process)
            if moment == "writing":
                wait_until(lambda: any(killed.glob(".checkpoint-*.partial/model.safetensors")), process)
            else:
                time.sleep(randomness.random() * 0.2)
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert process.returncode == -signal.SIGKILL, "it had ended before"
        assert moment == "running" or any(killed.glob(".checkpoint-*")), "nothing was being written"
        for checkpoint in checkpoints(killed):
            AutoModelForCausalLM.from_pretrained(checkpoint)
            AutoTokenizer.from_pretrained(checkpoint)
            step = json.loads((checkpoint / "trainer_state.json").read_text())["state"]["step"]
            assert checkpoint.name == f"checkpoint-{step}"
            assert_same_weights(checkpoint, whole / checkpoint.name)
    run_script("pretrain", *options, "--resume_from_checkpoint", "latest")
    assert_same_weights(whole, killed)
    assert figures(whole) == figures(killed)
    assert {path.name for path in killed.glob(".*")} <= {LOCK}  # some releases of filelock remove it


def folder(path: Path, content: str):
    path.mkdir()
    (path / "file").write_text(content)


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


def test_clean_ends_what_was_begun(tmp_path):
    """Killed between the two renames, before the first, after the second, and while writing."""
    begun = {".best.old": "old", ".best.partial": "new", "checkpoint-3": "new", ".checkpoint-3.old": "old",
             ".checkpoint-4.partial": "half"}  # fmt: skip
    for name, content in begun.items():
        folder(tmp_path / name, content)
    clean(tmp_path)
    assert names(tmp_path) == ["best", "checkpoint-3"]
    assert [(tmp_path / name / "file").read_text() for name in names(tmp_path)] == ["old", "new"]


def test_files_of_the_user_stay(tmp_path):
    """Beside the folders and in them, whatever is replaced, finished or removed, and however alike their names are."""
    folder(tmp_path / "best", "old")
    folder(tmp_path / ".notes.old", "mine")
    beside = [".env.old", ".env", ".notes.partial", "model-mine.safetensors", "model.safetensors.bak", ".best.old.txt"]
    inside = ["notes.txt", "figure.png", ".hidden"]
    for name in (*beside, *(f"best/{name}" for name in inside)):
        (tmp_path / name).write_text("mine")
    before = tree(tmp_path) | {"best/file": b"new"}
    for replaced in (new_folder(tmp_path / "best"), new_folder(tmp_path / "best")):
        (tmp_path / "best" / "model-00001-of-00002.safetensors").write_text("old")
        with claim(tmp_path), replaced as written:
            (written / "file").write_text("new")
        assert tree(tmp_path) == before
    (tmp_path / "best").rename(tmp_path / ".best.old")  # killed between the two renames, then after them
    clean(tmp_path)
    (tmp_path / "best").rename(tmp_path / ".best.old")
    folder(tmp_path / "best", "new")
    with claim(tmp_path), new_files(tmp_path) as written:
        (written / "config.json").write_text("{}")
    assert tree(tmp_path) == before | {"config.json": b"{}"}


def test_a_run_goes_on_from_one_of_its_checkpoints(tmp_path):
    """Those behind it are gone: `latest` is none of them. A checkpoint of another run does not replace a model."""
    options = [*pretrain_options(tmp_path, "clm"), "--max_eval_blocks 4 --checkpointing_steps 2 --eval_steps 2"]
    whole, other = tmp_path / "whole", tmp_path / "other"
    run_script("pretrain", *options, "--max_steps", 6, "--output_dir", whole)
    first = ["--resume_from_checkpoint", whole / "checkpoint-2", "--max_steps", 3]
    run_script("pretrain", *options, *first, "--output_dir", whole)
    assert [path.name for path in checkpoints(whole)] == ["checkpoint-2"]
    # The best model of the first run was one of steps that are gone.
    assert figures(whole)["best_step"] == read(whole / "best", "metrics")["steps"] == 3
    assert_same_weights(whole, whole / "best")
    run_script("pretrain", *options, *first, "--max_steps", 1, "--output_dir", other)
    assert (other / "best").is_dir() and not checkpoints(other)
    assert figures(other)["steps"] == 2 and 3 * figures(other)["tokens"] == 2 * figures(whole)["tokens"]
    with pytest.raises(SystemExit, match="holds a model"):
        run_script("pretrain", *options, *first, "--output_dir", other)


def test_what_is_left_of_an_earlier_run(tmp_path):
    (tmp_path / "run").mkdir()
    for step in (2, 4, 6):
        folder(tmp_path / "run" / f"checkpoint-{step}", "")
        (tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoint-4")
    remove_others(tmp_path / "run", tmp_path / "link")
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]
    remove_others(tmp_path / "run", tmp_path / "checkpoint-4")
    assert names(tmp_path / "run") == []


def model_files(path: Path, shards: int):
    """A folder of empty files, named as those of a model in some shards."""
    for name in ["config.json", "tokenizer.json", *(f"model-{i}-of-{shards}.safetensors" for i in range(shards))]:
        (path / name).write_text(f"of {shards}")


def test_new_files_join_others(tmp_path):
    """Weights of the model that was there go, all else stays; what another process wrote and did not move goes."""
    model_files(tmp_path, 3)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".new.ready").mkdir()
    (tmp_path / ".new.ready" / "config.json").write_text("older")
    with new_files(tmp_path) as written:
        model_files(written, 2)
        assert (tmp_path / "config.json").read_text() == "of 3"
    shards = [f"model-{i}-of-2.safetensors" for i in range(2)]
    assert names(tmp_path) == ["config.json", *shards, "notes.txt", "tokenizer.json"]
    assert (tmp_path / "config.json").read_text() == "of 2" and (tmp_path / "notes.txt").read_text() == "mine"


class Killed(BaseException):
    """An exception that no code handles, like a killed process."""


def test_killed_while_files_are_moved(tmp_path, monkeypatch):
    """Before every rename and every removal: the old model, no model, or the new one; then `clean` ends it."""
    calls, whole = {"count": 0}, {"of 3": 3, "of 2": 2}

    def guard(action, die_at):
        def guarded(*args, **kwargs):
            calls["count"] += 1
            if calls["count"] == die_at:
                raise Killed
            return action(*args, **kwargs)

        return guarded

    for die_at in range(1, 13):
        target, calls["count"] = tmp_path / str(die_at), 0
        target.mkdir()
        model_files(target, 3)
        with monkeypatch.context() as patched:
            for owner, name in ((os, "replace"), (Path, "rename"), (Path, "unlink"), (Path, "rmdir")):
                patched.setattr(owner, name, guard(getattr(owner, name), die_at))
            with pytest.raises(Killed), new_files(target) as written:
                model_files(written, 2)
        if (target / "config.json").exists():
            content, shards = (target / "config.json").read_text(), list(target.glob("model*"))
            assert len(shards) == whole[content] and {path.read_text() for path in shards} == {content}
        clean(target)
        content = (target / "config.json").read_text()
        assert content == ("of 3" if die_at < 3 else "of 2") and len(list(target.glob("model*"))) == whole[content]
        assert not list(target.glob(".*"))
