"""Publish a model on the Hub: weights, tokenizer, configuration, code and a card with what was measured.

The model is loaded and saved anew, so that what is published is complete, in safetensors, in shards of limited size,
and carries the code of this package. Everything goes into one commit: a push that is interrupted publishes nothing.

Example:
    python scripts/push_to_hub.py outputs/demo --repo_id user/tnn-demo --private
    python scripts/push_to_hub.py outputs/wikitext --repo_id user/tnn-wikitext --evaluation outputs/lengths.json \\
        --kernels outputs/kernels --card_dir model_cards/tnn-wikitext
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import model_card
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoTokenizer

KEPT = {".gitattributes", "LICENSE"}
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_card.add_arguments(parser)
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file of weights")
    parser.add_argument("--card_dir", type=Path, help="keep the card and its inputs here, too")
    return parser


def stage(args: argparse.Namespace, target: Path):
    """Put everything that is to be published into `target`.

    Raises:
        ValueError: the folder holds no complete model, or a file of results cannot be read.
    """
    model = model_card.load(args.folder)
    model_card.collect(args, model, target)
    text = model_card.render(target)
    (target / "README.md").write_text(text, encoding="utf-8")
    if args.card_dir is not None:
        shutil.copytree(target, args.card_dir, dirs_exist_ok=True)
    model.save_pretrained(target, max_shard_size=args.max_shard_size)
    if any((args.folder / name).is_file() for name in TOKENIZER_FILES):
        AutoTokenizer.from_pretrained(args.folder).save_pretrained(target)


def publish(folder: Path, repo_id: str, private: bool) -> str:
    """Make the repository hold the files of `folder` and no others, by one commit; its address."""
    api = HfApi()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    url = api.create_repo(repo_id, private=private, exist_ok=True)
    stale = set(api.list_repo_files(url.repo_id)) - files.keys() - KEPT
    operations = [CommitOperationAdd(name, path) for name, path in sorted(files.items())]
    operations += [CommitOperationDelete(name) for name in sorted(stale)]
    # Not upload_folder: that makes several commits of a large folder.
    api.create_commit(url.repo_id, operations, commit_message="Upload model")
    return str(url)


def publish_model(folder: str, repo_id: str) -> str:
    """What this script does without options, for training scripts; the address of the repository.

    Raises:
        ValueError: the folder holds no complete model.
    """
    return run(build_parser().parse_args([folder, "--repo_id", repo_id]))


def run(args: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        stage(args, Path(folder))
        return publish(Path(folder), args.repo_id, args.private)


def main():
    try:
        url = run(build_parser().parse_args())
    except (ValueError, HfHubHTTPError) as error:
        raise SystemExit(f"error: {error}") from error
    sys.stdout.write(f"published at {url}\n")


if __name__ == "__main__":
    main()
