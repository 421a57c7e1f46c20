"""Output folders: of one process at a time, and complete or absent whenever it dies.

A folder is written under a hidden name, flushed to disk and renamed. Files that join others in a folder are written to
a hidden one beside them and moved, `config.json` last: what loads is complete. What a killed process left under hidden
names is brought to its end or removed by `clean`.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tnn_scripts.common.errors import UserError

from accelerate import Accelerator
from filelock import FileLock, Timeout
from safetensors import SafetensorError

LOCK = ".lock"
PARTIAL, OLD = ".partial", ".old"
# Files on their way into a folder: all written, then those that they replace removed.
NEW, READY, MOVING = ".new" + PARTIAL, ".new.ready", ".new.moving"
# What torch.save raises is a RuntimeError without a number.
TORCH_WRITER = ("inline_container", "PytorchStreamWriter", "cannot be opened", "Parent directory")
CONFIG, WEIGHTS = "config.json", "model*.safetensors*"


class SavingError(UserError):
    """Something could not be written; what was there before still is."""


@contextmanager
def claim(folder: Path, main: bool = True) -> Iterator[Path]:
    """`folder`, made if need be and cleaned, for this process alone until the block or the process ends.

    Of the processes of one run, the main one has it for all.

    Raises:
        ValueError: it cannot be written to, or another process has it.
    """
    if not main:
        yield folder
        return
    lock, made = FileLock(folder / LOCK), not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        raise ValueError(
            f"output_dir={folder} is being written to by another process: wait for it, or give another folder."
        ) from error
    except OSError as error:
        raise ValueError(f"output_dir={folder} cannot be written to: {error.strerror or error}.") from error
    try:
        clean(folder)
        yield folder
    finally:
        lock.release()
        # Refused before anything was written: no trace is left.
        if made and [path.name for path in folder.iterdir()] in ([], [LOCK]):
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()


@contextmanager
def new_folder(target: Path, accelerator: Accelerator | None = None) -> Iterator[Path]:
    """A hidden folder to write to, which gets the name `target` when the block ends, in place of one that was there.

    With an accelerator, all its processes write and the main one renames.

    Raises:
        SavingError: the block or the renaming failed; the hidden folder is gone.
    """
    with _written(partial(target), target, accelerator) as folder:
        yield folder
        _wait(accelerator)
        if _is_main(accelerator):
            _publish(target)


@contextmanager
def new_files(target: Path, accelerator: Accelerator | None = None) -> Iterator[Path]:
    """A hidden folder to write a model to, whose files go to the folder `target` when the block ends.

    With an accelerator, all its processes write and the main one moves.

    Raises:
        SavingError: as `new_folder`.
    """
    with _written(target / NEW, target, accelerator) as folder:
        yield folder
        _wait(accelerator)
        if _is_main(accelerator):
            _flush_all(folder)
            _move_files(target)  # of a process that was killed before
            folder.rename(target / READY)
            _move_files(target)


def check_writable(file: Path):
    """Refuse a file that could not be written, before time is spent on what goes into it.

    Raises:
        ValueError: its folder cannot be made or written to.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial(file).touch()
        partial(file).unlink()
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror or error}.") from error


def check_overwriting(folder: Path, overwrite: bool, source: str | Path | None = None):
    """Refuse to write a model over another one.

    Args:
        overwrite: whether `--overwrite_output_dir` was given.
        source: the folder or file that the new model is made from, which cannot be replaced in any case.

    Raises:
        ValueError: the folder holds the source, or a model.
    """
    read = None if source is None else Path(source).resolve()
    if read is not None and (read == folder.resolve() or read in (path.resolve() for path in folder.glob(WEIGHTS))):
        raise ValueError(f"output_dir={folder} holds what is read, {source}: give another folder.")
    if not overwrite and holds_model(folder):
        raise ValueError(
            f"output_dir={folder} holds a model: give --overwrite_output_dir to replace it, or another folder."
        )


def holds_model(folder: Path) -> bool:
    """Whether there is a model that a run would write over."""
    return (folder / CONFIG).is_file() or any(folder.glob(WEIGHTS))


def partial(target: Path) -> Path:
    """Where to write what will be `target`."""
    return target.with_name(f".{target.name}{PARTIAL}")


def clean(folder: Path):
    """End what a killed process had begun to put in its place, and remove what it had not finished writing."""
    for old in folder.glob(f".*{OLD}"):
        target = folder / old.name[1 : -len(OLD)]
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)
    _move_files(folder)
    for path in folder.glob(f".*{PARTIAL}"):
        _remove(path)


def write_json(path: Path, values: dict | list):
    """A JSON file, complete or absent.

    Raises:
        SavingError: it could not be written.
    """
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str):
    """A text file, complete or absent.

    Raises:
        SavingError: it could not be written.
    """
    unfinished = partial(path)
    with saving_errors(path, unfinished):
        unfinished.write_text(text, encoding="utf-8")
        _flush(unfinished)
        os.replace(unfinished, path)


@contextmanager
def saving_errors(target: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Make one error of all that libraries raise when a disk is full or gone, and remove what is unfinished.

    Raises:
        SavingError: one of them was raised.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        free = _free_megabytes(target)
        if unfinished is not None:
            _remove(unfinished)
        of_torch = any(text in str(error) for text in TORCH_WRITER)
        if isinstance(error, SavingError) or (isinstance(error, RuntimeError) and not of_torch):
            raise
        raise SavingError(
            f"{target} could not be saved: {error} ({free:,} MB were free there). What was saved before is as it was."
        ) from error


@contextmanager
def _written(hidden: Path, target: Path, accelerator: Accelerator | None) -> Iterator[Path]:
    with saving_errors(target, hidden):
        if _is_main(accelerator):
            _remove(hidden)
            hidden.mkdir(parents=True)
        _wait(accelerator)
        yield hidden
        _wait(accelerator)


def _is_main(accelerator: Accelerator | None) -> bool:
    return accelerator is None or accelerator.is_main_process


def _wait(accelerator: Accelerator | None):
    if accelerator is not None:
        accelerator.wait_for_everyone()


def _publish(target: Path):
    written, old = partial(target), target.with_name(f".{target.name}{OLD}")
    _flush_all(written)
    if target.exists():
        target.rename(old)
    written.rename(target)
    _flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _move_files(folder: Path):
    """Put the files of `.new.ready` beside it, or go on with that; without `config.json` the folder does not load."""
    ready, moving = folder / READY, folder / MOVING
    if ready.is_dir():
        names = {path.name for path in ready.iterdir()}
        # A file of weights that stays would be read instead of the new shards.
        stale = [path for path in folder.glob(WEIGHTS) if path.name not in names]
        for path in [folder / CONFIG, *stale]:
            path.unlink(missing_ok=True)
        ready.rename(moving)
    if moving.is_dir():
        for path in sorted(moving.iterdir(), key=lambda path: path.name == CONFIG):
            os.replace(path, folder / path.name)
        _flush(folder)
        moving.rmdir()


def _remove(path: Path):
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _free_megabytes(path: Path) -> int:
    place = next(place for place in (path, *path.absolute().parents) if place.exists())
    return shutil.disk_usage(place).free // 10**6


def _flush_all(folder: Path):
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def _flush(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
