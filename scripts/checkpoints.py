"""Folders that are complete or absent, whenever the process dies.

A folder is written under a hidden name, flushed to disk and renamed. Readers see only whole ones: `checkpoint-STEP`
exists once everything in it does. What a killed process left under hidden names is removed by `clean`.
"""

import json
import os
import re
import shutil
from pathlib import Path

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
PARTIAL, OLD = ".partial", ".old"


def checkpoints(output_dir: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.is_dir() and CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=step_of)


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
    path = Path(name)
    if not (path / "trainer_state.json").is_file():
        raise ValueError(f"resume_from_checkpoint={name}: this is no folder of a complete checkpoint.")
    return path


def partial(target: Path) -> Path:
    """Where to write what will be `target`."""
    return target.with_name(f".{target.name}{PARTIAL}")


def publish(target: Path):
    """Give the folder `partial(target)` its name, in place of one that may be there."""
    written, old = partial(target), target.with_name(f".{target.name}{OLD}")
    for path in written.rglob("*"):
        _flush(path)
    _flush(written)
    if target.exists():
        target.rename(old)
    written.rename(target)
    _flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def prepare(target: Path):
    """An empty folder `partial(target)`."""
    shutil.rmtree(partial(target), ignore_errors=True)
    partial(target).mkdir(parents=True)


def move_files(source: Path, target: Path):
    """The files of one folder into another, each complete or absent; `source` disappears."""
    for path in sorted(source.iterdir()):
        _flush(path)
        os.replace(path, target / path.name)
    source.rmdir()
    _flush(target)


def prune(output_dir: Path, limit: int | None):
    """Remove the oldest checkpoints beyond `limit`; None for no limit."""
    for checkpoint in checkpoints(output_dir)[: -limit if limit else 0]:
        _remove(checkpoint)


def clean(output_dir: Path):
    """Remove what a killed process left, and put back a folder that it was about to replace."""
    for old in output_dir.glob(f".*{OLD}"):
        target = output_dir / old.name[1 : -len(OLD)]
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)
    for path in output_dir.glob(f".*{PARTIAL}"):
        shutil.rmtree(path)


def write_json(path: Path, values: dict | list):
    """A JSON file, complete or absent."""
    unfinished = partial(path)
    unfinished.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _remove(folder: Path):
    # Under its own name a half removed checkpoint would look complete.
    hidden = partial(folder)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _flush(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
