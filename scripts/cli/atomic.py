"""Output folders: one process at a time writes to a folder, and files are complete or absent.

A folder is written under a hidden name, flushed to disk and renamed. Files for an existing folder are written to a
hidden folder inside it and moved, `config.json` last, so that a model that loads is complete. `clean` finishes or
removes the hidden folders of a killed process. What is not named as a program names it is its user's, and stays.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tnn_programs.cli.errors import UserError, is_disk_full

from filelock import FileLock, Timeout
from safetensors import SafetensorError

if TYPE_CHECKING:
    from accelerate import Accelerator

LOCK = ".lock"
PARTIAL, OLD = ".partial", ".old"
# Names of a folder of new files: while it is written, when all are written, and when the replaced files are removed.
NEW, READY, MOVING = ".new" + PARTIAL, ".new.ready", ".new.moving"
# The folders that are written under hidden names.
HIDDEN = re.compile(r"\.(new|best|tokenizer|checkpoint-\d+|parts-\w+)\.(partial|old)")
# Texts of the errors of torch.save, RuntimeError, and of libraries in Rust, Exception.
WRITERS = ("inline_container", "PytorchStreamWriter", "cannot be opened", "Parent directory", "(os error ")
CONFIG, WEIGHTS = "config.json", "model*.safetensors*"
# Files of a model or a state that must not come to those of another.
STALE = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|.*\.(bin|pt|pth|pkl|distcp)")


class SavingError(UserError):
    """The error for a file or folder that could not be written. Earlier files are unchanged."""


@contextmanager
def claim(folder: Path, main: bool = True) -> Iterator[Path]:
    """Make, lock and clean `folder` until the block or the process ends, in a run's `main` process alone."""
    if not main:
        yield folder
        return
    lock, made = FileLock(folder / LOCK), not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        advice = "Wait for it, or give another folder."
        raise ValueError(f"The output folder {folder} is in use by another process. {advice}") from error
    except OSError as error:
        raise ValueError(f"The output folder {folder} cannot be written to: {error.strerror or error}.") from error
    try:
        clean(folder)
        yield folder
    finally:
        lock.release()
        # A run that was refused before it wrote anything leaves no trace.
        if made and [path.name for path in folder.iterdir()] in ([], [LOCK]):
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()


def new_folder(target: Path, accelerator: "Accelerator | None" = None) -> AbstractContextManager[Path]:
    """A hidden folder to write to. When the block ends, it replaces the folder `target`; see `_written`."""

    def publish(folder: Path):
        old = target.with_name(f".{target.name}{OLD}")
        if target.exists():
            target.rename(old)
        folder.rename(target)
        _flush(target.parent)
        _leave_behind(old, target)

    return _written(partial_path(target), target, accelerator, publish)


def new_files(target: Path, accelerator: "Accelerator | None" = None) -> AbstractContextManager[Path]:
    """A hidden folder to write a model to. When the block ends, its files move to `target`; see `_written`."""

    def publish(folder: Path):
        _move_files(target)  # of a process that was killed before
        folder.rename(target / READY)
        _move_files(target)

    return _written(target / NEW, target, accelerator, publish)


def check_writable(file: Path):
    """Check that a file can be written, before its contents are computed."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise ValueError(f"{file} cannot be written: it is a folder.")
        partial_path(file).touch()
        partial_path(file).unlink()
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror or error}.") from error


def check_overwriting(folder: Path, overwrite: bool, source: str | Path | None = None):
    """Refuse to write a model over another one, unless to `overwrite` it, and over the `source` that is read."""
    read = None if source is None else Path(source).resolve()
    if read is not None and (read == folder.resolve() or read in (path.resolve() for path in folder.glob(WEIGHTS))):
        raise ValueError(f"The output folder must not hold the model that is read, {source}, got {folder}")
    if not overwrite and ((folder / CONFIG).is_file() or any(folder.glob(WEIGHTS))):
        raise ValueError(f"{folder} holds a model. Give --overwrite_output_dir to replace it, or another folder.")


def partial_path(target: Path) -> Path:
    """The hidden name under which `target` is written."""
    return target.with_name(f".{target.name}{PARTIAL}")


def clean(folder: Path):
    """Finish the moves that a killed process has begun, and remove its incomplete files."""
    hidden = [path for path in folder.glob(".*") if HIDDEN.fullmatch(path.name) and path.is_dir()]
    for path in hidden:
        target = folder / path.name[1 : -len(OLD)]
        if path.suffix == OLD and not target.exists():
            path.rename(target)
        elif path.suffix == OLD:
            _leave_behind(path, target)
    _move_files(folder)
    for path in hidden:
        _remove(path)


def write_json(path: Path, values: dict | list):
    """Write a JSON file, as `write_text` does."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str):
    """Write a text file. It is complete or absent; after a SavingError as before."""
    with saving_errors(path, partial_path(path)):
        partial_path(path).write_text(text, encoding="utf-8")
        _flush(partial_path(path))
        os.replace(partial_path(path), path)


@contextmanager
def saving_errors(target: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Turn all errors of libraries about a full or missing disk into a SavingError, and remove `unfinished`."""
    try:
        yield
    except Exception as error:  # that of tokenizers is of no other type
        place = next(place for place in (target, *target.absolute().parents) if place.exists())
        free = shutil.disk_usage(place).free // 10**6
        if unfinished is not None:
            _remove(unfinished)
        of_disk = isinstance(error, OSError | SafetensorError) or any(text in str(error) for text in WRITERS)
        if isinstance(error, SavingError) or not of_disk:
            raise
        full = "disk full: " if is_disk_full(error) else ""
        raise SavingError(
            f"{full}{target} could not be saved: {error} ({free:,} MB were free there). Earlier files are unchanged."
        ) from error


@contextmanager
def _written(hidden: Path, target: Path, accelerator: "Accelerator | None", publish: Callable) -> Iterator[Path]:
    """A folder that all processes of an accelerator write to, and that the main one flushes to disk and publishes.

    If anything fails, it is removed; what has to do with the disk is a SavingError.
    """
    main = accelerator is None or accelerator.is_main_process
    wait = (lambda: None) if accelerator is None else accelerator.wait_for_everyone
    # Where one process fails, another may still be writing to the folder.
    with saving_errors(target, hidden if main else None):
        if main:
            _remove(hidden)
            hidden.mkdir(parents=True)
        wait()
        yield hidden
        wait()
        if main:
            for path in [*hidden.rglob("*"), hidden]:
                _flush(path)
            publish(hidden)
        wait()


def _move_files(folder: Path):
    """Move the files of `.new.ready` to `folder`, or finish such a move. Without `config.json` no model loads."""
    ready, moving = folder / READY, folder / MOVING
    if ready.is_dir():
        names = {path.name for path in ready.iterdir()}
        # A remaining old file of weights would be read instead of the new shards.
        stale = [path for path in folder.glob(WEIGHTS) if STALE.fullmatch(path.name) and path.name not in names]
        for path in [folder / CONFIG, *stale]:
            path.unlink(missing_ok=True)
        ready.rename(moving)
    if moving.is_dir():
        for path in sorted(moving.iterdir(), key=lambda path: path.name == CONFIG):
            os.replace(path, folder / path.name)
        _flush(folder)
        moving.rmdir()


def _leave_behind(old: Path, target: Path):
    """Remove a folder that was replaced; what the new one does not have is of the user, and moves there."""
    for path in old.iterdir() if old.is_dir() else ():
        if not STALE.fullmatch(path.name) and not (target / path.name).exists():
            path.rename(target / path.name)
    _remove(old)


def _remove(path: Path):
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(file: Path):
    """The contents of a JSON file; ValueError if the file is missing or not JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as a JSON file: {error}") from error
