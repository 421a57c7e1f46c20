"""Publish a model on the Hub: weights, tokenizer, configuration, code and a card with the measurements.

The model is loaded and saved again. So the published model is complete, is in safetensors with shards of limited size,
and carries the code of this package. The upload is a single commit, so an interrupted push publishes nothing.
"""

import argparse
import logging
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tnn_scripts.common.errors import UserError

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoUrl, create_repo, upload_folder
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import IMAGE_PROCESSOR_NAME

from tnn_scripts.common import model_card, space
from tnn_scripts.common.atomic import write_json
from tnn_scripts.common.loading import load
from tnn_scripts.options.card import build_publishing_parser

logger = logging.getLogger("push_to_hub")
KEPT = {".gitattributes", "LICENSE"}
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
# Files in the folder of a training that are not published.
NOT_UPLOADED = ["checkpoint-*", "best/*", "tokenizer/*", ".*", "training_args.bin"]


class PublishingError(UserError):
    """The error for a failed upload. The files on this machine are unchanged."""


def stage(args: argparse.Namespace, target: Path):
    """Write all files of the repository to `target`.

    Raises:
        ValueError: the folder holds no complete model, or a file of results cannot be read.
    """
    if args.card_dir is not None:
        model_card.check_folder(args.card_dir, args.folder)
    model = model_card.load(args.folder)
    model_card.collect(args, model, target)
    text = model_card.render(target)
    (target / "README.md").write_text(text, encoding="utf-8")
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


def stage_cards(args: argparse.Namespace, target: Path) -> dict[str, Path]:
    """Write the models of finished cards to folders in `target`; the names of their repositories, and the folders.

    Raises:
        ValueError: a model is missing or incomplete, or its training has other figures than its card.
    """
    cards = sorted(path.parent for path in args.cards.glob(f"*/{model_card.INPUTS['card']}"))
    if not cards:
        raise ValueError(f"--cards must be a folder of cards, got {args.cards}")
    if missing := [card.name for card in cards if not (args.folder / card.name).is_dir()]:
        raise ValueError(f"{args.folder} must have a model for each card, got none for {', '.join(missing)}")
    return dict(stage_card(card, args.folder / card.name, target / card.name, args.max_shard_size) for card in cards)


def stage_card(card: Path, folder: Path, target: Path, max_shard_size: str) -> tuple[str, Path]:
    """Write the model in `folder` with its finished card to `target`; the name of its repository, and `target`."""
    model = model_card.load(folder)
    figures = model_card.read_json(card / model_card.INPUTS["metrics"])
    found = model_card.read_metrics(model_card.read_json(model_card.metrics_file(folder)))
    if found != figures:
        different = sorted(name for name in found | figures if found.get(name) != figures.get(name))
        raise ValueError(f"The model in {folder} is not that of {card}: their {', '.join(different)} differ")
    shutil.copytree(card, target)
    settings = model_card.read_json(card / model_card.INPUTS["card"])
    write_json(target / model_card.INPUTS["card"], settings | {"published": True})
    (target / "README.md").write_text(model_card.render(target), encoding="utf-8")
    save(model, folder, target, max_shard_size)
    return settings["repo_id"], target


def publish(folder: Path, repo_id: str, private: bool, repo_type: str = "model") -> RepoUrl:
    """Replace the files of the repository by those of `folder` in one commit; the address of the repository."""
    api = HfApi()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    sdk = "gradio" if repo_type == "space" else None
    url = api.create_repo(repo_id, private=private, exist_ok=True, repo_type=repo_type, space_sdk=sdk)
    stale = set(api.list_repo_files(url.repo_id, repo_type=repo_type)) - files.keys() - KEPT
    operations = [CommitOperationAdd(name, path) for name, path in sorted(files.items())]
    operations += [CommitOperationDelete(name) for name in sorted(stale)]
    # Not upload_folder: that makes several commits of a large folder.
    api.create_commit(url.repo_id, operations, commit_message=f"Upload {repo_type}", repo_type=repo_type)
    return url


def run(args: argparse.Namespace, command: str) -> list[RepoUrl]:
    """Stage and publish a model; the addresses of the repository and, with `--space`, of its Space.

    Args:
        command: what publishes it later if this fails.

    Raises:
        ValueError: the folder holds no complete model, or no causal one for a Space, or a file of results cannot be
            read.
        PublishingError: the upload failed.
    """
    if args.cards is not None:
        return _run_cards(args, command)
    if args.space:
        space.check_model(args.folder)
    with tempfile.TemporaryDirectory() as folder:
        stage(args, Path(folder))
        with publishing_errors(args.folder, command):
            model = publish(Path(folder), args.repo_id, args.private)
    if not args.space:
        return [model]
    with tempfile.TemporaryDirectory() as folder:
        space.write_space(Path(folder), model.repo_id, args.license, args.package or space.PACKAGE)
        with publishing_errors(args.folder, command, lost="The Space was not published"):
            return [model, publish(Path(folder), model.repo_id, args.private, "space")]


def _run_cards(args: argparse.Namespace, command: str) -> list[RepoUrl]:
    """Stage the models of all cards, then publish one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        staged = stage_cards(args, Path(folder))
        with publishing_errors(args.folder, command, lost="Not all models were published"):
            return [publish(path, repo_id, args.private) for repo_id, path in staged.items()]


def rehearse(args: argparse.Namespace) -> Iterator[str]:
    """Lines on what `run` would publish. Without contact to the Hub; `--output_dir` gets the files.

    Raises:
        ValueError: as for `run`, or the repository has no valid name, or the output folder has files.
    """
    if args.cards is None:
        validate_repo_id(args.repo_id)
    if args.space:
        space.check_model(args.folder)
    if args.output_dir is not None and args.output_dir.exists() and any(args.output_dir.iterdir()):
        raise ValueError(f"--output_dir must be a new or an empty folder, got {args.output_dir}")
    with tempfile.TemporaryDirectory() as folder:
        model, page = Path(folder) / "model", Path(folder) / "space"
        staged = {args.repo_id: model}
        if args.cards is None:
            stage(args, model)
        else:
            staged = stage_cards(args, model)
        if args.space:
            page.mkdir()
            space.write_space(page, args.repo_id, args.license, args.package or space.PACKAGE)
        if args.output_dir is not None:
            shutil.copytree(folder if args.space else model, args.output_dir, dirs_exist_ok=True)
        for repo_id, root in staged.items():
            yield from _listing(f"model {repo_id}", root, args.private)
        if args.space:
            yield from _listing(f"Space {args.repo_id}", page, args.private)


def _listing(what: str, folder: Path, private: bool) -> Iterator[str]:
    """Lines on a repository that would have the files of `folder`."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*"))
             if path.is_file()}  # fmt: skip
    seen = "private" if private else "public"
    yield f"would publish the {what} ({seen} if it is new): {len(sizes)} files, {sum(sizes.values()) / 1e6:,.2f} MB"
    yield from (f"  {name}  {size:,} bytes" for name, size in sizes.items())


@contextmanager
def publishing_errors(folder: str | Path, command: str, lost: str = "Nothing was published") -> Iterator[None]:
    """Turn all errors of an upload to the Hub into one that says what is `lost`.

    Raises:
        PublishingError: the block raised such an error.
    """
    try:
        yield
    # HTTPError is that of the library that the client uses.
    except (HTTPError, OSError, RuntimeError) as error:
        raise PublishingError(
            f"{lost}: {type(error).__name__}: {error}. The model in {folder} is unchanged. To publish "
            f"it later:\n  {command}"
        ) from error


def open_repository(name: str | None, folder: str, private: bool | None) -> str:
    """Create or find the repository for a model, so that errors appear before the training.

    Raises:
        PublishingError: the Hub cannot be reached, or refuses the request.
    """
    try:
        return create_repo(name or Path(folder).resolve().name, private=private, exist_ok=True).repo_id
    except (HTTPError, OSError, RuntimeError) as error:
        raise PublishingError(f"The repository cannot be opened for --push_to_hub: {error}") from error


def upload(folder: str, repository: str, model_type: str):
    """Publish a trained model: a TNN with its code and a card, another model as it was saved.

    Raises:
        PublishingError: the upload failed.
    """
    if model_type == "tnn":
        given = [str(folder), "--repo_id", repository]
        run(build_publishing_parser().parse_args(given), shlex.join(["tnn", "push", *given]))
    else:
        with publishing_errors(folder, f"hf upload {repository} {folder}"):
            upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=NOT_UPLOADED)
    logger.info("uploaded to %s", repository)
