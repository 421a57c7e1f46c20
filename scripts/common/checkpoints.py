"""Checkpoints of a run: find the complete ones and the newest, and verify their files.

A folder `checkpoint-STEP` exists only when it is complete, see `atomic.py`. Its `checksums.json` has the SHA-256 of
each file, because safetensors cannot detect values that changed on the disk.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

from tnn_scripts.common.atomic import check_overwriting, partial, write_json

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
CHECKSUMS, STATE = "checksums.json", "trainer_state.json"


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints, the oldest first. Trainer writes its state last."""
    found = [path for path in output_dir.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name) and is_complete(path)]
    return sorted(found, key=step_of)


def is_complete(checkpoint: Path) -> bool:
    """Whether a folder is a checkpoint whose state can be read."""
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps before a checkpoint."""
    return int(CHECKPOINT.fullmatch(checkpoint.name)[1])


def find_checkpoint(output_dir: Path, name: str) -> Path:
    """The folder of a checkpoint. `name` is `latest` or a path.

    Raises:
        ValueError: there is no such checkpoint, or it is incomplete.
    """
    if name == "latest":
        found = checkpoints(output_dir)
        if not found:
            raise ValueError(f"--resume_from_checkpoint latest: {output_dir} holds no complete checkpoint.")
        return found[-1]
    if not is_complete(Path(name)):
        raise ValueError(
            f"--resume_from_checkpoint must be latest, auto or the folder of a complete checkpoint, got {name}"
        )
    return Path(name)


def settle(output_dir: Path, name: str | None) -> str | None:
    """What `--resume_from_checkpoint` means for a folder: `auto` is `latest` if there is a checkpoint, else None."""
    return ("latest" if checkpoints(output_dir) else None) if name == "auto" else name


def check_run(output_dir: Path, overwrite: bool, resumed: str | None, source: str | Path | None = None):
    """Refuse a run that would overwrite another one, unless it resumes it.

    Args:
        overwrite: whether `--overwrite_output_dir` was given.
        resumed: the checkpoint that the run resumes from.
        source: the folder of the model that the run starts from.

    Raises:
        ValueError: the folder holds checkpoints or a model, or is that of `source`.
    """
    resumed = settle(output_dir, resumed)
    if resumed is None and not overwrite and checkpoints(output_dir):
        raise ValueError(
            f"The output folder {output_dir} holds checkpoints of a run. Give --resume_from_checkpoint latest to "
            "continue it, --overwrite_output_dir to replace it, or another folder."
        )
    check_overwriting(output_dir, overwrite or resumed is not None, source)


def remove_checkpoints(output_dir: Path):
    """Remove the checkpoints of a run that is overwritten."""
    for checkpoint in checkpoints(output_dir):
        _remove(checkpoint)


def write_checksums(folder: Path):
    """Write the SHA-256 of each file of a folder to its `checksums.json`."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CHECKSUMS]
    write_json(folder / CHECKSUMS, {path.relative_to(folder).as_posix(): _sha256(path) for path in files})


def verify_checksums(folder: Path):
    """Compare the files of a folder with its `checksums.json`, if there is one.

    Raises:
        ValueError: a file is missing or has changed, or the checksums cannot be read.
    """
    if not (folder / CHECKSUMS).is_file():
        return
    try:
        expected = dict(json.loads((folder / CHECKSUMS).read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CHECKSUMS} is damaged: {error}. Resume from an earlier checkpoint.") from error
    for name, checksum in expected.items():
        path = folder / name
        if not path.is_file() or _sha256(path) != checksum:
            what = "is damaged: it has changed since it was written" if path.is_file() else "is missing"
            raise ValueError(f"{path} {what}. Resume from an earlier checkpoint, by its path.")


def remove_incomplete(output_dir: Path):
    """Remove checkpoints that Trainer has not finished writing."""
    for folder in output_dir.glob("checkpoint-*"):
        if CHECKPOINT.fullmatch(folder.name) and not is_complete(folder):
            shutil.rmtree(folder)


def prune(output_dir: Path, limit: int | None):
    """Remove the oldest checkpoints beyond `limit`; None for no limit."""
    for checkpoint in checkpoints(output_dir)[: -limit if limit else 0]:
        _remove(checkpoint)


def _remove(checkpoint: Path):
    # Under its own name a half-removed checkpoint would look complete.
    hidden = partial(checkpoint)
    checkpoint.rename(hidden)
    shutil.rmtree(hidden)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
