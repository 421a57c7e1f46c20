"""Publish a model on the Hub: weights, tokenizer, configuration, code and a card with the measurements.

The model is loaded and saved again. So the published model is complete, is in safetensors with shards of limited size,
and carries the code of this package. The upload is a single commit, so an interrupted push publishes nothing.

A Space is a page of a published model: its files name the model, which stays where it is, and pin what it runs with.
"""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tnn_programs.cli.errors import UserError

import torch
import transformers
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoUrl, SpaceCard, SpaceCardData
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import IMAGE_PROCESSOR_NAME

from modeling_tnn import __version__
from tnn_programs.cli.model_path import load
from tnn_programs.training import card_inputs
from tnn_programs.training.model_card import write_card

KEPT = {".gitattributes", "LICENSE"}
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
# The release that the page of a Space is tested with in a browser.
GRADIO = "6.31.0"
PACKAGE = f"modeling-tnn[scripts,space]=={__version__}"
APP = '''"""The page of {repo_id}: it continues texts, beside the kernels of its layers."""

from tnn_programs.serving.page import PageArguments, serve

serve(PageArguments("{repo_id}", host=None, port=None))  # the Space says where
'''
REQUIREMENTS = """# Without a GPU torch needs no CUDA packages.
--extra-index-url https://download.pytorch.org/whl/cpu
{package}
torch=={torch}
transformers=={transformers}
"""
SPACE = """# {name}

A page for [{repo_id}](https://huggingface.co/{repo_id}), a Toeplitz neural network. It continues texts, and shows the
kernels of its layers. Written by `tnn push --space`.

If the model is private, the Space needs a secret `HF_TOKEN` that may read it.
"""


class PublishingError(UserError):
    """The error for a failed upload. The files on this machine are unchanged."""


def stage(args: argparse.Namespace, target: Path):
    """Write all files of the repository of a model to `target`."""
    if args.card_dir is not None:
        card_inputs.check_folder(args.card_dir, args.folder)
    model = card_inputs.load(args.folder)
    if args.space and (name := type(model).__name__) != "TnnForCausalLM":
        raise ValueError(f"--space: {args.folder} holds a {name}: only a TnnForCausalLM has a page.")
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


def write_space(folder: Path, repo_id: str, args: argparse.Namespace) -> Path:
    """Write the files of the Space of the model `repo_id` to the new `folder`; return it."""
    folder.mkdir()
    name = repo_id.rpartition("/")[-1]
    about = {"title": name, "app_file": "app.py", "license": args.license, "models": [repo_id]}
    data = SpaceCardData(sdk="gradio", sdk_version=GRADIO, python_version="3.11", **about)
    versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    files = {
        "app.py": APP.format(repo_id=repo_id),
        "requirements.txt": REQUIREMENTS.format(package=args.package or PACKAGE, **versions),
        "README.md": str(SpaceCard(f"---\n{data.to_yaml()}\n---\n\n{SPACE.format(name=name, repo_id=repo_id)}")),
    }
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    return folder


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
    """Stage and publish; the addresses of repositories and Space. An error names the `command` to publish later."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        stage(args, model)
        with publishing_errors(args.folder, command, "Nothing was published"):
            urls = [publish(model, args.repo_id, args.private)]
        if args.space:
            page = write_space(Path(folder) / "space", urls[0].repo_id, args)
            with publishing_errors(args.folder, command, "The Space was not published"):
                urls.append(publish(page, urls[0].repo_id, args.private, "space"))
    return urls


def rehearse(args: argparse.Namespace) -> Iterator[str]:
    """Lines on what `run` would publish. Without contact to the Hub; `--output_dir`, a new folder, gets the files."""
    validate_repo_id(args.repo_id)
    if args.output_dir is not None and args.output_dir.exists() and any(args.output_dir.iterdir()):
        raise ValueError(f"--output_dir must be a new or an empty folder, got {args.output_dir}")
    seen = "private" if args.private else "public"
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        stage(args, model)
        staged = {f"model {args.repo_id}": model}
        if args.space:
            staged[f"Space {args.repo_id}"] = write_space(Path(folder) / "space", args.repo_id, args)
        if args.output_dir is not None:
            shutil.copytree(folder if args.space else model, args.output_dir, dirs_exist_ok=True)
        for what, root in staged.items():
            sizes = {path.relative_to(root): path.stat().st_size for path in sorted(root.rglob("*")) if path.is_file()}
            total = f"{len(sizes)} files, {sum(sizes.values()) / 1e6:,.2f} MB"
            yield f"would publish the {what} ({seen} if it is new): {total}"
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
