"""The checkpoints of a run: which are complete, which may be resumed, and whether their files are those written.

A checkpoint's `checksums.json` has the SHA-256 of each of its files, because safetensors cannot detect values that
changed on the disk. It is written last: a folder with it is damaged, and not unfinished, if a file cannot be read. A
damaged checkpoint is named and stays, an unfinished one is skipped.
"""

import hashlib
import json
import logging
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tnn_programs.cli.atomic import check_overwriting, partial_path, read_json, write_json
from tnn_programs.cli.model_path import fault_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger("runs")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# `run.json` is written by Trainer's programs alone: `pretrain.py` has the same in its state.
CHECKSUMS, STATE, RUN = "checksums.json", "trainer_state.json", "run.json"
UNFINISHED = ".unfinished"  # is there while the other two are written
# The files that a resumption reads end with one of these. Others, such as notes, may be added to a checkpoint.
READ = (".json", ".safetensors", ".bin", ".pt", ".pth", ".pkl", ".distcp")
ADVICE = "Resume from an earlier checkpoint, by its path, or begin again with --overwrite_output_dir."
# The options that change the weights: of both engines, of Trainer, and of `pretrain.py`. The end of a run may change,
# and where and how its steps are computed.
COMPARED = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim", "optim_args", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm", "seed",
    "label_smoothing_factor", "neftune_noise_alpha", "data_seed", "train_sampling_strategy", "bf16", "fp16",
    "objective", "do_lower_case", "documents", "mlm_probability", "max_pole_radius", "mixed_precision",
    "operator_learning_rate", "operator_weight_decay", "parameter_groups",
)  # fmt: skip
NOT_COMPARED = {"transformers_version", "_name_or_path"}


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints, the oldest first."""
    return [path for path in _folders(output_dir) if is_complete(path)]


def _folders(output_dir: Path) -> list[Path]:
    found = [path for path in output_dir.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(CHECKPOINT.fullmatch(path.name)[1]))


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end; one of Trainer alone, of an older version, ends with its state."""
    if (checkpoint / UNFINISHED).exists():
        return False
    return any((checkpoint / name).exists() for name in (CHECKSUMS, RUN)) or not fault_of(checkpoint / STATE)


def read_object(file: Path) -> dict:
    """The JSON object in a file of a checkpoint; ValueError if there is none."""
    if fault := fault_of(file):
        raise ValueError(f"{file} is damaged: {fault}. {ADVICE}")
    return read_json(file)


def find_checkpoint(output_dir: Path, name: str | None) -> Path | None:
    """The folder that `--resume_from_checkpoint` names: latest, auto or a path. None for auto without a checkpoint."""
    if name is None:
        return None
    if name in ("latest", "auto"):
        found = checkpoints(output_dir)
        for folder in _folders(output_dir):
            if folder not in found:
                logger.warning("%s is skipped: it was not written to its end", folder)
        if not found and name == "latest":
            raise ValueError(f"--resume_from_checkpoint latest: {output_dir} holds no complete checkpoint.")
        if not found:
            return None
        name = found[-1]
    if not is_complete(Path(name)):
        raise ValueError(f"--resume_from_checkpoint must be latest, auto or a complete checkpoint, got {name}")
    verify_checksums(Path(name))
    return Path(name)


def check_run(output_dir: Path, overwrite: bool, resumed: str | None = None, source: str | Path | None = None):
    """Refuse a run that would overwrite another one, unless it resumes it, or the model `source` it begins with."""
    found = checkpoints(output_dir)
    resumes = bool(found) if resumed == "auto" else resumed == "latest" or continues(output_dir, resumed)
    if not resumes and not overwrite and found:
        raise ValueError(
            f"The output folder {output_dir} holds checkpoints of a run. Give --resume_from_checkpoint latest to "
            "continue it, --overwrite_output_dir to replace it, or another folder."
        )
    check_overwriting(output_dir, overwrite or resumes, source)


def continues(output_dir: Path, checkpoint: str | Path | None) -> bool:
    """Whether a checkpoint is one of the run in this folder, and not of another run, which goes on in it."""
    return checkpoint is not None and Path(checkpoint).resolve().parent == output_dir.resolve()


def describe_run(options: dict, config: "PreTrainedConfig", **further) -> dict:
    """Return the run identity of a checkpoint: options that change the weights, the model, and `further`."""
    compared = {name: options[name] for name in COMPARED if name in options}
    model = {f"config.{name}": value for name, value in config.to_dict().items() if name not in NOT_COMPARED}
    return json.loads(json.dumps(compared | further | model))


def check_same_run(checkpoint: Path, saved: dict, run: dict):
    """Refuse a checkpoint of another run. What one of an older version does not describe is not compared."""
    differing = [f"{n} must be {saved[n]}, got {v}" for n, v in run.items() if n in saved and saved[n] != v]
    if differing:
        raise ValueError("\n  ".join([f"{checkpoint} is a checkpoint of another run.", *differing]))


def write_checksums(folder: Path, run: dict | None = None):
    """Write `run` to the `run.json` of a folder, and the SHA-256 of each file to its `checksums.json`."""
    (folder / UNFINISHED).touch()
    if run is not None:
        write_json(folder / RUN, run)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in (CHECKSUMS, UNFINISHED)]
    write_json(folder / CHECKSUMS, {path.relative_to(folder).as_posix(): _sha256(path) for path in files})
    (folder / UNFINISHED).unlink()


def verify_checksums(folder: Path):
    """Compare the files of a checkpoint with its `checksums.json`. One of an older version may have none."""
    named, state = folder / CHECKSUMS, folder / STATE
    if not named.exists() and not (folder / RUN).exists() and "fingerprint" not in read_object(state):
        return
    expected = read_object(named) if named.exists() else {CHECKSUMS: None}
    for name, checksum in expected.items():
        path = folder / name
        if not path.is_file() or _sha256(path) != checksum:
            what = "is damaged: it has changed since it was written" if path.is_file() else "is missing"
            raise ValueError(f"{path} {what}. {ADVICE}")
    for path in sorted(folder.rglob("*")):
        if path.suffix in READ and path != named and path.relative_to(folder).as_posix() not in expected:
            raise ValueError(f"{named} is damaged: it does not name {path.name}. {ADVICE}")
    read_object(state)


def remove_incomplete(output_dir: Path):
    """Remove checkpoints that Trainer has not finished writing."""
    for folder in _folders(output_dir):
        if not is_complete(folder):
            shutil.rmtree(folder)


def prune(output_dir: Path, limit: int | None):
    """Remove the oldest checkpoints beyond `limit`; None for no limit."""
    found = checkpoints(output_dir)
    _remove(found[: 0 if limit is None else max(len(found) - limit, 0)])


def remove_others(output_dir: Path, resumed: Path | None):
    """Remove the checkpoints of an overwritten run, or those behind the `resumed` one, which would count as newer."""
    found = checkpoints(output_dir)
    if continues(output_dir, resumed):  # perhaps by a link or a copy of another name, which has no place among them
        places = [path.resolve() for path in found]
        found = found[places.index(resumed.resolve()) + 1 :] if resumed.resolve() in places else []
    _remove(found)


def _remove(found: list[Path]):
    for checkpoint in found:
        hidden = partial_path(checkpoint)  # under its own name a half-removed checkpoint would look complete
        checkpoint.rename(hidden)
        shutil.rmtree(hidden)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
