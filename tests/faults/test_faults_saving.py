"""A full disk, a folder that cannot be written to, two writers, damaged checkpoints: what was complete stays so."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys

from tnn_programs.cli.errors import report_errors

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
    read,
    run_script,
    save_model,
    tree,
    weights,
    write_config,
    write_text,
)
from modeling_tnn import TnnForCausalLM
from modeling_tnn.data.dna import dna_tokenizer
from tnn_programs.cli.atomic import LOCK, SavingError, claim, new_folder, saving_errors, write_json
from tnn_programs.cli.runs import find_checkpoint, write_checksums
from tnn_programs.training.grouping_trainer import StopCallback
from tnn_programs.training.processes import StopRequest

RESUME = ["--resume_from_checkpoint", "latest"]


@pytest.fixture
def largest_file():
    """A function that limits the size of files: a write beyond it fails as on a full disk. Without a size, none."""

    def limit(size: int = resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def command(tmp_path):
    """A run into `out` with a checkpoint at every fourth step; later options override it."""
    config = write_config(tmp_path / "config")
    return ["pretrain", "--config_name", config, "--train_file", write_text(tmp_path / "text.txt"), "--output_dir",
            tmp_path / "out", "--max_steps", 8, "--learning_rate", 0.01, "--per_device_train_batch_size", 4,
            "--checkpointing_steps", 4]  # fmt: skip


def is_refused(command: list, message: str):
    with pytest.raises(SystemExit, match=message):
        run_script(*command)


def test_full_disk_in_pretraining(command, tmp_path, largest_file):
    """The checkpoint of step 4 stays, nothing of that of step 8 does; with room again, the run ends as unbroken.

    There is no room for the optimizer, then none for the weights.
    """
    run_script(*command)
    whole, out = tmp_path / "whole", tmp_path / "out"
    out.rename(whole)
    shutil.copytree(whole / "checkpoint-4", out / "checkpoint-4")
    before = tree(out)
    for size in (200_000, 100_000):
        largest_file(size)
        full = r"disk full: .*checkpoint-8 could not be saved: .* MB were free .*--resume_from_checkpoint"
        is_refused([*command, *RESUME], full)
        assert tree(out) == before
    largest_file()
    run_script(*command, *RESUME)
    assert_same_weights(whole, out)


def test_full_disk_at_the_last_model(command, tmp_path, largest_file, monkeypatch):
    """The checkpoint has the work; the folder holds no model, rather than half of one."""
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        at_call(patched, TnnForCausalLM, "save_pretrained", 1, lambda: largest_file(50_000))
        is_refused(command, "disk full: .*best could not be saved")
    largest_file()
    assert set(os.listdir(out)) - {LOCK} == {"checkpoint-4", "checkpoint-8", "tokenizer"}
    assert not list(out.rglob(".*.partial"))
    with pytest.raises(ValueError, match="Unrecognized model"):
        AutoModelForCausalLM.from_pretrained(out)
    run_script(*command, *RESUME)
    assert_same_weights(out, out / "checkpoint-8")


@pytest.mark.slow
def test_full_disk_in_finetuning(encoder, glue, tmp_path, largest_file):
    """The half checkpoint of step 8 goes, that of step 4 stays and leads to the end of the unbroken run."""
    given = ["--task_name", "sst2", "--dataset_path", glue, "--max_steps", 12, "--save_steps", 4]
    run_script("finetune_glue", *glue_options(encoder, tmp_path / "whole", *given))
    full = ["finetune_glue", *glue_options(encoder, tmp_path / "full", *given)]
    with pytest.MonkeyPatch.context() as patched:
        at_call(patched, Trainer, "_save_optimizer_and_scheduler", 2, lambda: largest_file(50_000))
        is_refused(full, "disk full: .*full could not be saved: .* Earlier files are unchanged")
    assert [path.name for path in (tmp_path / "full").glob("checkpoint-*")] == ["checkpoint-4"]
    largest_file()
    run_script(*full, *RESUME)
    assert_same_weights(tmp_path / "whole", tmp_path / "full")


@pytest.mark.parametrize("program", ["to_recurrent", "convert_original"])
def test_full_disk_in_a_conversion(program, tmp_path, largest_file, monkeypatch):
    """The model that was in the folder before stays whole."""
    output, text, given = tmp_path / "out", write_text(tmp_path / "text.txt"), tmp_path / "official.safetensors"
    save_file({"a": torch.zeros(1)}, given)  # whatever is converted is not the point here
    converted = seeded(TnnForCausalLM, tiny_config("rtf")), {"tensors": {}, "warnings": []}
    monkeypatch.setattr("tnn_programs.original.conversion.convert", lambda *options: converted)
    command = [program, given, output, "--architecture", "tnn_pytorch", "--overwrite_output_dir"]
    if program == "to_recurrent":
        model = save_model(tmp_path / "model", tno_type="rpe", decay=0.9)
        command = [program, "--model_name_or_path", model, "--output_dir", output, "--order", 4, "--dataset_name",
                   text, "--block_size", 64, "--rows", 2, "--overwrite_output_dir"]  # fmt: skip
    seeded(TnnForCausalLM, tiny_config()).save_pretrained(output)
    before = tree(output)
    largest_file(40_000)
    is_refused(command, "disk full: .*out could not be saved: .*Earlier files are unchanged")
    assert tree(output) == before
    largest_file()
    run_script(*command)
    assert AutoModelForCausalLM.from_pretrained(output).config.tno_type in ("modal", "rtf")


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 4609344 vs 4609236"),
    Exception("No space left on device (os error 28)"),  # of tokenizers
]


def test_errors_of_a_disk(tmp_path, largest_file):
    """A full one is said first, whichever library wrote, in a save and elsewhere; others stay what they are."""
    target, message = tmp_path / "model", r"^disk full: .*model could not be saved: .* MB were free there"
    for error in FULL:
        with pytest.raises(SavingError, match=message), saving_errors(target):
            raise error
        with pytest.raises(SystemExit, match="^error: disk full: "):
            report_errors(lambda error=error: (_ for _ in ()).throw(error))()
    with pytest.raises(SavingError, match="^[^ ]*model could not be saved: .*Permission"), saving_errors(target):
        raise PermissionError(errno.EACCES, "Permission denied")
    for error in (RuntimeError("a kernel failed"), ValueError("bad"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, new_folder(target):
            raise error
        assert raised.value is error and not target.exists()
        assert isinstance(error, KeyboardInterrupt) or not list(tmp_path.glob(".*"))
    results = tmp_path / "alone" / "results.json"
    results.parent.mkdir()
    write_json(results, {"score": 1})
    largest_file(1000)
    with pytest.raises(SavingError, match="disk full: .*results.json could not be saved: .*File too large"):
        write_json(results, {"scores": list(range(1000))})
    largest_file(40_000)  # more than what pytest captures
    tokenizer, message = dna_tokenizer(32), r"disk full: .*model could not be saved: .*\(os error"
    tokenizer.add_tokens([f"token {number}" for number in range(2000)])
    with pytest.raises(SavingError, match=message), new_folder(target) as new:
        tokenizer.save_pretrained(new)
    assert os.listdir(tmp_path) == ["alone"]
    assert os.listdir(results.parent) == ["results.json"] and json.loads(results.read_text()) == {"score": 1}


MODEL = ["--model_name_or_path", "nowhere"]
COMMANDS = [
    ["pretrain", "--config_name", "tnn-tiny"],
    ["finetune_glue", *MODEL, "--task_name", "sst2", "--do_train"],
    ["evaluate_lm", *MODEL, "--validation_file", SCRIPTS / "demo.py"],
    ["to_recurrent", *MODEL],
    ["plot_kernels", *MODEL],
    ["demo"],
    ["run_lra", "--task", "listops", "--config_name", "tnn-listops"],
    ["run_image_classification", "--config_name", "tnn-image-tiny", "--dataset_name", "nowhere"],
    ["run_ablation", "--variants", "a"],
    ["run_synthetic", "--recipe", SCRIPTS.parent / "configuration/recipes/synthetic/small-copying.yaml"],
]


def test_places_that_cannot_be_written_to(tmp_path, capsys):
    """Refused at once: the models that the options name do not even exist. Root may write nearly everywhere."""
    (tmp_path / "file").write_text("I am no folder.")
    for command in COMMANDS:
        for place in (tmp_path / "file" / "out", "/proc/out"):
            message = "output folder .*out cannot be written to: (Not a directory|No such file)"
            is_refused([*command, "--output_dir", place], message)
    for file, reason in {
        tmp_path / "file" / "results.json": "results.json cannot",
        tmp_path: ": it is a folder",
    }.items():
        with pytest.raises(SystemExit) as left:
            run_script("generate", *MODEL, "--prompt a --output_file", file)
        assert reason in str(left.value) + capsys.readouterr().err


HOLD = "import sys, time; from pathlib import Path; from tnn_programs.cli.atomic import claim\n"
HOLD += "with claim(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_two_writers(command, tmp_path):
    """The second is refused, touches nothing, and may write once the first is killed. Processes of one run are one."""
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", HOLD, out], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        (out / ".checkpoint-4.partial").mkdir()
        for second in (command, [*COMMANDS[1], "--output_dir", out]):
            is_refused(second, "out is in use by another process")
        assert (out / ".checkpoint-4.partial").exists()
        first.send_signal(signal.SIGKILL)
    run_script(*command)
    assert weights(out) and not (out / ".checkpoint-4.partial").exists()
    with claim(tmp_path), claim(tmp_path, main=False):
        pass


def damages(content: bytes):
    """A file with a changed bit, emptied, cut off, or of another kind; None if it is deleted."""
    for place in (0, len(content) // 2):  # a damaged brace, too, which the reader of a configuration would report
        yield content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    yield from (b"", content[: len(content) // 2], b"null", b"[]", b"{}", b'{"a": 3}', b'{"a":' * 10**5, None)


def test_damaged_checkpoint(command, tmp_path):
    """No resumption, but an error that names the file, and nothing is overwritten; an older checkpoint still does.

    Without checksums of each file a changed weight would go unnoticed. Notes that were added are not looked at.
    """
    run_script(*command)
    out = tmp_path / "out"
    checkpoint, expected, before = out / "checkpoint-8", weights(out), tree(out)
    for path in (path for path in sorted(checkpoint.iterdir()) if path.suffix != ".py"):
        content = path.read_bytes()
        for change in damages(content):
            path.unlink() if change is None else path.write_bytes(change)
            name = r"\S*" if path.name == "checksums.json" else path.name  # whose changed bit is that of any file
            with pytest.raises(ValueError, match=rf"checkpoint-8/{name} is (damaged|missing).* Resume from an"):
                find_checkpoint(out, "latest")
        path.write_bytes(content)
    (checkpoint / "trainer_state.json").unlink()
    (out / "checkpoint-4").rename(tmp_path / "checkpoint-4")
    for more in (["auto"], ["latest"], [checkpoint], ["auto", "--overwrite_output_dir"]):
        is_refused([*command, "--resume_from_checkpoint", *more], "checkpoint-8/trainer_state.json is missing")
    is_refused(command, "out holds checkpoints of a run")
    (tmp_path / "checkpoint-4").rename(out / "checkpoint-4")
    assert len(before) == len(tree(out)) + 1
    (out / "checkpoint-4" / "notes.txt").write_text("mine")
    run_script(*command, "--resume_from_checkpoint", out / "checkpoint-4")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(out).items())


def test_states_of_another_kind(command, tmp_path):
    """Whose checksums fit: one line."""
    run_script(*command)
    checkpoint = tmp_path / "out" / "checkpoint-8"
    state = read(checkpoint, "trainer_state")
    for changed in (None, [], {}, 3, state | {"fingerprint": [3]}):
        (checkpoint / "trainer_state.json").write_text(json.dumps(changed))
        write_checksums(checkpoint)
        is_refused([*command, *RESUME], r"trainer_state.json is damaged|checkpoint-8 cannot be read")


def test_checkpoints_of_trainer(tmp_path, caplog, monkeypatch):
    """One that was not written to its end is skipped with a word; a finished one has checksums, and may be damaged."""
    for step, content in ((3, "{}"), (7, "{}"), (12, '{"epoch": 1'), (15, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if content is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(content)
    assert find_checkpoint(tmp_path, "latest").name == "checkpoint-7"
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    state = TrainerState(global_step=7, is_world_process_zero=True)
    StopCallback(StopRequest(), {"seed": 3}).on_save(args, state, TrainerControl())
    sums = json.loads((tmp_path / "checkpoint-7" / "checksums.json").read_text())
    assert list(sums) == ["run.json", "trainer_state.json"]
    assert [f"checkpoint-{step} is skipped" in caplog.text for step in (3, 7, 12, 15)] == [False, False, True, True]
    for path in sorted((tmp_path / "checkpoint-7").iterdir()):
        content = path.read_text()
        path.unlink()
        with pytest.raises(ValueError, match=f"checkpoint-7/{path.name} is missing"):
            find_checkpoint(tmp_path, "auto")
        path.write_text(content)
    monkeypatch.setattr("tnn_programs.cli.runs._sha256", lambda path: exit("killed"))
    with pytest.raises(SystemExit):
        StopCallback(StopRequest(), {}).on_save(args, state, TrainerControl())
    (tmp_path / "checkpoint-7" / "checksums.json").unlink()
    assert find_checkpoint(tmp_path, "latest").name == "checkpoint-3"
