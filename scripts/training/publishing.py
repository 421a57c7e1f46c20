"""Publish a model on the Hub: weights, tokenizer, configuration, code and a card with the measurements.

The model is loaded and saved again. So the published model is complete, is in safetensors with shards of limited size,
and carries the code of this package. The upload is a single commit, so an interrupted push publishes nothing.
"""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tnn_programs.cli.errors import UserError

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoUrl
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import IMAGE_PROCESSOR_NAME

from tnn_programs.cli.model_path import load
from tnn_programs.training import card_inputs
from tnn_programs.training.model_card import write_card

KEPT = {".gitattributes", "LICENSE"}
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


class PublishingError(UserError):
    """The error for a failed upload. The files on this machine are unchanged."""


def stage(args: argparse.Namespace, target: Path):
    """Write all files of the repository of a model to `target`."""
    if args.card_dir is not None:
        card_inputs.check_folder(args.card_dir, args.folder)
    model = card_inputs.load(args.folder)
    card_inputs.collect(args, model, target)
    write_card(target)
    if args.card_dir is not None:
        shutil.copytree(target, args.card_dir, dirs_exist_ok=True)
    save(model, args.folder, target, args.max_shard_size)


def save(model: PreTrainedModel, folder: Path, target: Path, max_shard_size: str):
    """Write the model from `folder` to `target`, with its tokenizer or image processor."""
    model.save_pretrained(target, max_shard_size=max_shard_size)
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        load(AutoTokenizer, folder).save_pretrained(target)
    # The file is copied, because transformers 5.17 needs torchvision to load it.
    if (folder / IMAGE_PROCESSOR_NAME).is_file():
        shutil.copyfile(folder / IMAGE_PROCESSOR_NAME, target / IMAGE_PROCESSOR_NAME)


def publish(folder: Path, repo_id: str, private: bool) -> RepoUrl:
    """Replace the files of the repository by those of `folder` in one commit; the address of the repository."""
    api = HfApi()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    url = api.create_repo(repo_id, private=private, exist_ok=True)
    stale = set(api.list_repo_files(url.repo_id)) - files.keys() - KEPT
    operations = [CommitOperationAdd(name, path) for name, path in sorted(files.items())]
    operations += [CommitOperationDelete(name) for name in sorted(stale)]
    # Not upload_folder: that makes several commits of a large folder.
    api.create_commit(url.repo_id, operations, commit_message="Upload model")
    return url


def run(args: argparse.Namespace, command: str) -> RepoUrl:
    """Stage and publish; the address of the repository. An error names the `command` to publish later."""
    with tempfile.TemporaryDirectory() as folder:
        stage(args, Path(folder))
        with publishing_errors(args.folder, command, "Nothing was published"):
            return publish(Path(folder), args.repo_id, args.private)


def rehearse(args: argparse.Namespace) -> Iterator[str]:
    """Lines on what `run` would publish. Without contact to the Hub; `--output_dir`, a new folder, gets the files."""
    validate_repo_id(args.repo_id)
    if args.output_dir is not None and args.output_dir.exists() and any(args.output_dir.iterdir()):
        raise ValueError(f"--output_dir must be a new or an empty folder, got {args.output_dir}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        stage(args, root)
        if args.output_dir is not None:
            shutil.copytree(root, args.output_dir, dirs_exist_ok=True)
        sizes = {path.relative_to(root): path.stat().st_size for path in sorted(root.rglob("*")) if path.is_file()}
        seen, total = "private" if args.private else "public", sum(sizes.values()) / 1e6
        yield f"would publish the model {args.repo_id} ({seen} if it is new): {len(sizes)} files, {total:,.2f} MB"
        yield from (f"  {name.as_posix()}  {size:,} bytes" for name, size in sizes.items())


@contextmanager
def publishing_errors(folder: str | Path, command: str, lost: str) -> Iterator[None]:
    """Turn all errors of an upload to the Hub into a PublishingError that says what is `lost`."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:  # HTTPError is that of the library that the client uses
        raise PublishingError(
            f"{lost}: {type(error).__name__}: {error}. The model in {folder} is unchanged. To publish "
            f"it later:\n  {command}"
        ) from error
