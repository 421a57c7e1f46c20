"""Checkpoints of a run: which are complete, which is the newest, and whether their files are still what was written.

`checkpoint-STEP` exists once everything in it does, see `outputs.py`. `checksums.json` in it has the SHA-256 of each
file: safetensors itself cannot tell that a value was changed on the disk.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

from outputs import partial, write_json

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
CHECKSUMS, STATE = "checksums.json", "trainer_state.json"


def checkpoints(output_dir: Path) -> list[Path]:
    """Complete checkpoints, the oldest first. Trainer writes its state last."""
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
    """The optimizer steps that a checkpoint stands behind."""
    return int(CHECKPOINT.fullmatch(checkpoint.name)[1])


def find_checkpoint(output_dir: Path, name: str) -> Path:
    """The folder meant by `latest` or by a path.

    Raises:
        ValueError: there is none, or it is no complete checkpoint.
    """
    if name == "latest":
        found = checkpoints(output_dir)
        if not found:
            raise ValueError(f"resume_from_checkpoint=latest: {output_dir} holds no complete checkpoint.")
        return found[-1]
    if not is_complete(Path(name)):
        raise ValueError(f"resume_from_checkpoint={name}: this is no folder of a complete checkpoint.")
    return Path(name)


def write_checksums(folder: Path):
    """The SHA-256 of each file of a folder, as `checksums.json` in it."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CHECKSUMS]
    write_json(folder / CHECKSUMS, {path.relative_to(folder).as_posix(): _sha256(path) for path in files})


def verify_checksums(folder: Path):
    """Compare the files of a folder with its `checksums.json`; without one, all is well.

    Raises:
        ValueError: a file is missing or other than it was, or the checksums cannot be read.
    """
    if not (folder / CHECKSUMS).is_file():
        return
    try:
        expected = dict(json.loads((folder / CHECKSUMS).read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CHECKSUMS} is damaged: {error}.") from error
    for name, checksum in expected.items():
        path = folder / name
        if not path.is_file() or _sha256(path) != checksum:
            what = "is damaged: it is not what was written" if path.is_file() else "is missing"
            raise ValueError(f"{path} {what}. Resume from an earlier checkpoint, by its path.")


def remove_incomplete(output_dir: Path):
    """Remove checkpoints that Trainer had not finished writing."""
    for folder in output_dir.glob("checkpoint-*"):
        if CHECKPOINT.fullmatch(folder.name) and not is_complete(folder):
            shutil.rmtree(folder)


def prune(output_dir: Path, limit: int | None):
    """Remove the oldest checkpoints beyond `limit`; None for no limit."""
    for checkpoint in checkpoints(output_dir)[: -limit if limit else 0]:
        # Under its own name a half removed checkpoint would look complete.
        hidden = partial(checkpoint)
        checkpoint.rename(hidden)
        shutil.rmtree(hidden)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
