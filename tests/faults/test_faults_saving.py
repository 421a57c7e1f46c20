"""A full disk, a folder that cannot be written to, two writers, damaged checkpoints: what was complete stays so."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tnn_scripts.common.errors import report_errors

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Trainer, TrainerControl, TrainerState, TrainingArguments

from helpers.glue import glue_options
from helpers.models import seeded, tiny_config
from helpers.scripts import (
    SCRIPTS,
    assert_same_weights,
    at_call,
    run_script,
    save_model,
    tree,
    weights,
    write_config,
    write_text,
)
from modeling_tnn import TnnForCausalLM
from tnn_scripts.common.atomic import LOCK, SavingError, claim, new_files, new_folder, saving_errors, write_json
from tnn_scripts.common.checkpoints import find_checkpoint, verify_checksums, write_checksums
from tnn_scripts.common.grouping_trainer import StopCallback
from tnn_scripts.common.processes import StopRequest


@pytest.fixture
def largest_file():
    """A function that limits the size of files: a write beyond it fails as on a full disk."""

    def limit(size: int):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def options(tmp_path):
    """The options of a run with a checkpoint at every fourth step; later options override them."""
    config = write_config(tmp_path / "config")
    return ["--config_name", config, "--train_file", write_text(tmp_path / "text.txt"), "--output_dir",
            tmp_path / "out",
            "--max_steps", 8, "--learning_rate", 0.01, "--per_device_train_batch_size", 4,
            "--checkpointing_steps", 4]  # fmt: skip


@pytest.mark.parametrize("size", [200_000, 100_000], ids=["optimizer", "weights"])
def test_full_disk_in_pretraining(size, options, tmp_path, largest_file):
    """The checkpoint of step 4 stays, nothing of that of step 8 does; with room again, the run ends as unbroken."""
    run_script("pretrain", *options)
    whole, out = tmp_path / "whole", tmp_path / "out"
    out.rename(whole)
    out.mkdir()
    shutil.copytree(whole / "checkpoint-4", out / "checkpoint-4")
    before = tree(out)
    largest_file(size)
    with pytest.raises(
        SystemExit, match=r"disk full: .*checkpoint-8 could not be saved: .* MB were free .*--resume_from_checkpoint"
    ):
        run_script("pretrain", *options, "--resume_from_checkpoint", "latest")
    assert tree(out) == before
    largest_file(resource.RLIM_INFINITY)
    run_script("pretrain", *options, "--resume_from_checkpoint", "latest")
    assert_same_weights(whole, out)


def test_full_disk_at_the_last_model(options, tmp_path, largest_file, monkeypatch):
    """The checkpoint has the work; the folder holds no model, rather than half of one."""
    out = tmp_path / "out"
    saved = []

    def fill(self, folder, **kwargs):
        saved.append(folder)
        largest_file(50_000)
        return original(self, folder, **kwargs)

    original = TnnForCausalLM.save_pretrained
    monkeypatch.setattr(TnnForCausalLM, "save_pretrained", fill)
    with pytest.raises(SystemExit, match="disk full: .*best could not be saved"):
        run_script("pretrain", *options)
    largest_file(resource.RLIM_INFINITY)
    assert len(saved) == 1 and set(os.listdir(out)) - {LOCK} == {"checkpoint-4", "checkpoint-8", "tokenizer"}
    assert not list(out.rglob(".*.partial"))
    with pytest.raises(ValueError, match="Unrecognized model"):
        AutoModelForCausalLM.from_pretrained(out)
    monkeypatch.undo()
    run_script("pretrain", *options, "--resume_from_checkpoint", "latest")
    assert_same_weights(out, out / "checkpoint-8")


def test_full_disk_in_finetuning(encoder, glue, tmp_path, largest_file, monkeypatch):
    """The half checkpoint of step 8 goes, that of step 4 stays and leads to the end of the unbroken run."""
    given = ["--task_name", "sst2", "--dataset_path", glue, "--max_steps", 12, "--save_steps", 4]
    run_script("finetune_glue", *glue_options(encoder, tmp_path / "whole", *given))
    full = glue_options(encoder, tmp_path / "full", *given)
    with monkeypatch.context() as patched:
        at_call(patched, Trainer, "_save_optimizer_and_scheduler", 2, lambda: largest_file(50_000))
        with pytest.raises(SystemExit, match="disk full: .*full could not be saved: .* Earlier files are unchanged"):
            run_script("finetune_glue", *full)
    assert [path.name for path in (tmp_path / "full").glob("checkpoint-*")] == ["checkpoint-4"]
    largest_file(resource.RLIM_INFINITY)
    run_script("finetune_glue", *full, "--resume_from_checkpoint", "latest")
    assert_same_weights(tmp_path / "whole", tmp_path / "full")


def to_recurrent(folder: Path, output: Path) -> list:
    text = write_text(folder.parent / "text.txt")
    return ["to_recurrent", "--model_name_or_path", folder, "--output_dir", output, "--order", 4, "--dataset_name",
            text, "--block_size", 64,
            "--rows", 2]  # fmt: skip


def convert_original(folder: Path, output: Path) -> list:
    # Whatever is converted is not the point here.
    save_file({"a": torch.zeros(1)}, folder.parent / "official.safetensors")
    return ["convert_original", folder.parent / "official.safetensors", output, "--architecture", "rtf"]


@pytest.mark.parametrize("arguments", [to_recurrent, convert_original], ids=lambda arguments: arguments.__name__)
def test_full_disk_in_a_conversion(arguments, tmp_path, largest_file, monkeypatch):
    """The model that was in the folder before stays whole."""
    folder, output = save_model(tmp_path / "model", tno_type="rpe", decay=0.9), tmp_path / "out"
    converted = seeded(TnnForCausalLM, tiny_config("rtf"))
    report = {"tensors": {}, "warnings": []}
    monkeypatch.setattr("tnn_scripts.runs.convert_original.convert", lambda *options: (converted, report))
    seeded(TnnForCausalLM, tiny_config()).save_pretrained(output)
    before, command = tree(output), [*arguments(folder, output), "--overwrite_output_dir"]
    largest_file(40_000)
    with pytest.raises(SystemExit, match="disk full: .*out could not be saved: .*Earlier files are unchanged"):
        run_script(*command)
    assert tree(output) == before
    largest_file(resource.RLIM_INFINITY)
    run_script(*command)
    assert AutoModelForCausalLM.from_pretrained(output).config.tno_type in ("modal", "rtf")


def test_full_disk_and_a_json_file(tmp_path, largest_file):
    write_json(tmp_path / "results.json", {"score": 1})
    largest_file(1000)
    with pytest.raises(SavingError, match="disk full: .*results.json could not be saved: .*File too large"):
        write_json(tmp_path / "results.json", {"scores": list(range(1000))})
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert json.loads((tmp_path / "results.json").read_text()) == {"score": 1}


def test_errors_that_are_none_of_a_disk_stay_what_they_are(tmp_path):
    for error in (RuntimeError("a kernel failed"), ValueError("bad"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, new_folder(tmp_path / "model"):
            raise error
        assert raised.value is error and not (tmp_path / "model").exists()


# Root may write everywhere, but not below a file, nor to /proc.
UNWRITABLE = ["file/out", "/proc/out"]
COMMANDS = {
    "pretrain": ["--config_name", "tnn-tiny"],
    "finetune_glue": ["--model_name_or_path", "nowhere", "--task_name", "sst2", "--do_train"],
    "evaluate_lm": ["--model_name_or_path", "nowhere", "--validation_file", "FILE"],
    "to_recurrent": ["--model_name_or_path", "nowhere"],
    "plot_kernels": ["--model_name_or_path", "nowhere"],
    "demo": [],
    "run_lra": ["--task", "listops", "--config_name", "tnn-listops"],
    "run_image_classification": ["--config_name", "tnn-image-tiny", "--dataset_name", "nowhere"],
    "run_ablation": ["--variants", "a"],
    "run_synthetic": ["--recipe", SCRIPTS.parent / "configuration/recipes/synthetic/small-copying.yaml"],
}


@pytest.mark.parametrize("place", UNWRITABLE)
@pytest.mark.parametrize("script", COMMANDS)
def test_folder_that_cannot_be_written_to(script, place, tmp_path):
    """Refused at once: the models that the options name do not even exist."""
    (tmp_path / "file").write_text("I am no folder.")
    given = [tmp_path / "file" if option == "FILE" else option for option in COMMANDS[script]]
    with pytest.raises(SystemExit, match="output folder .*out cannot be written to: (Not a directory|No such file)"):
        run_script(script, *given, "--output_dir", tmp_path / place)


FILES = [
    ["generate", "--model_name_or_path", "nowhere", "--prompt", "a", "--output_file"],
    ["benchmark", "products", "--output_file"],
]


@pytest.mark.parametrize("command", FILES, ids=lambda command: command[0])
def test_file_that_cannot_be_written(command, tmp_path, capsys):
    (tmp_path / "file").write_text("I am no folder.")
    with pytest.raises(SystemExit) as left:
        run_script(*command, tmp_path / "file" / "results.json")
    assert "results.json cannot be written: " in str(left.value) + capsys.readouterr().err


HOLD = "import sys, time; from pathlib import Path; from tnn_scripts.common.atomic import claim\n"
HOLD += "with claim(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_two_writers(options, tmp_path):
    """The second is refused, touches nothing, and may write once the first is killed."""
    out = tmp_path / "out"
    command = [sys.executable, "-c", HOLD, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        (out / ".checkpoint-4.partial").mkdir()
        for script, given in (
            ("pretrain", options),
            ("finetune_glue", [*COMMANDS["finetune_glue"], "--output_dir", out]),
        ):
            with pytest.raises(SystemExit, match="out is in use by another process"):
                run_script(script, *given)
        assert (out / ".checkpoint-4.partial").exists()
        first.send_signal(signal.SIGKILL)
    run_script("pretrain", *options)
    assert weights(out) and not (out / ".checkpoint-4.partial").exists()


def test_other_processes_of_a_run_do_not_claim(tmp_path):
    with claim(tmp_path), claim(tmp_path, main=False):
        pass


def test_damaged_checkpoint(options, tmp_path):
    """A bit of any file: no resumption, but an error that names it; an older checkpoint still does."""
    run_script("pretrain", *options)
    out = tmp_path / "out"
    checkpoint = out / "checkpoint-8"
    for name in ("model.safetensors", "optimizer.bin", "random_states_0.pkl", "config.json"):
        content = (checkpoint / name).read_bytes()
        middle = len(content) // 2
        for place in (0, middle):  # a damaged brace, too, which the reader of a configuration would report
            (checkpoint / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(SystemExit, match=rf"{name} is damaged: .*Resume from an earlier checkpoint"):
                run_script("pretrain", *options, "--resume_from_checkpoint", "latest")
        (checkpoint / name).unlink()
        with pytest.raises(SystemExit, match=f"{name} is missing"):
            run_script("pretrain", *options, "--resume_from_checkpoint", "latest")
        (checkpoint / name).write_bytes(content)
    expected = weights(out)
    (checkpoint / "model.safetensors").unlink()
    run_script("pretrain", *options, "--resume_from_checkpoint", out / "checkpoint-4")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(out).items())


def test_checksums(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("content")
    verify_checksums(tmp_path)
    write_checksums(tmp_path)
    verify_checksums(tmp_path)
    (tmp_path / "new").write_text("What was not there is not looked at.")
    verify_checksums(tmp_path)
    for damaged in ("{", "3", '["ab", "c"]'):
        (tmp_path / "checksums.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"checksums.json is damaged|is missing"):
            verify_checksums(tmp_path)


def test_checkpoints_of_trainer(tmp_path):
    """One whose state was not written is not resumed; a finished one has checksums."""
    state = TrainerState(global_step=7, is_world_process_zero=True)
    for step, content in ((3, "{}"), (7, "{}"), (12, '{"epoch": 1'), (15, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if content is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(content)
    assert find_checkpoint(tmp_path, "latest").name == "checkpoint-7"
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    StopCallback(StopRequest(), {"seed": 3}).on_save(args, state, TrainerControl())
    sums = json.loads((tmp_path / "checkpoint-7" / "checksums.json").read_text())
    assert list(sums) == ["run.json", "trainer_state.json"]


def test_new_files_after_a_killed_move(tmp_path):
    """New files replace those that another process has written but not moved."""
    (tmp_path / ".new.ready").mkdir()
    (tmp_path / ".new.ready" / "config.json").write_text("older")
    with new_files(tmp_path) as written:
        (written / "config.json").write_text("newer")
    assert (tmp_path / "config.json").read_text() == "newer" and os.listdir(tmp_path) == ["config.json"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 4609344 vs 4609236"),
    ],
    ids=["space", "quota", "safetensors", "torch"],
)
def test_a_full_disk_is_said_first(error, tmp_path, capsys):
    """Whichever library wrote, in a save and elsewhere."""
    target, full = tmp_path / "model", r"^disk full: .*model could not be saved: .* MB were free there"
    with pytest.raises(SavingError, match=full), saving_errors(target):
        raise error
    if isinstance(error, OSError):
        with pytest.raises(SystemExit, match="^error: disk full: "):
            report_errors(lambda: (_ for _ in ()).throw(error))()
    with pytest.raises(SavingError, match="^[^ ]*model could not be saved: .*Permission"), saving_errors(target):
        raise PermissionError(errno.EACCES, "Permission denied")
