"""A Space: the page of a published model on the Hub.

Its files name the model and pin what it runs with. The model stays where it is; the Space loads it when it starts.
"""

import argparse
from pathlib import Path

import torch
import transformers
from huggingface_hub import SpaceCard, SpaceCardData

import modeling_tnn
from tnn_scripts.common.model_card import read_json

# The release that the page is tested with in a browser.
GRADIO = "6.31.0"
PACKAGE = f"modeling-tnn[scripts,space]=={modeling_tnn.__version__}"
APP = '''"""The page of {repo_id}: it continues texts, beside the kernels of its layers."""

from tnn_scripts.serving.page import PageArguments, serve

serve(PageArguments("{repo_id}", host=None, port=None))  # the Space says where
'''
REQUIREMENTS = """# Without a GPU torch needs no CUDA packages.
--extra-index-url https://download.pytorch.org/whl/cpu
{package}
torch=={torch}
transformers=={transformers}
"""
CARD = """# {name}

A page for [{repo_id}](https://huggingface.co/{repo_id}), a Toeplitz neural network. It continues texts, and shows the
kernels of its layers. Written by `tnn push --space`.

If the model is private, the Space needs a secret `HF_TOKEN` that may read it.
"""


def check_model(folder: Path):
    """Refuse a model that has no page, before anything is published; ValueError if it is no causal language model."""
    architectures = read_json(folder / "config.json").get("architectures") or ["TnnModel"]
    if architectures != ["TnnForCausalLM"]:
        raise ValueError(f"--space: {folder} holds a {architectures[0]}: only a TnnForCausalLM has a page.")


def write_space(folder: Path, repo_id: str, args: argparse.Namespace) -> Path:
    """Write the files of the Space of the model `repo_id` to the new `folder`; return it.

    Args:
        args: with the licence, and what pip installs this package from.
    """
    folder.mkdir()
    name = repo_id.rpartition("/")[-1]
    data = SpaceCardData(
        title=name, sdk="gradio", sdk_version=GRADIO, python_version="3.11", app_file="app.py", license=args.license,
        models=[repo_id],
    )  # fmt: skip
    versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    card = SpaceCard(f"---\n{data.to_yaml()}\n---\n\n{CARD.format(name=name, repo_id=repo_id)}")
    files = {
        "app.py": APP.format(repo_id=repo_id),
        "requirements.txt": REQUIREMENTS.format(package=args.package or PACKAGE, **versions),
        "README.md": str(card),
    }
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    return folder
