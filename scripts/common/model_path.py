"""Check the path of a model or of data, before anything is imported that could load it.

A name that can only be a path must exist. The Hub would be asked for it otherwise, which takes a minute without a
network and ends with an advice to check the connection.
"""

import re
from pathlib import Path

from tnn_scripts.common.nearest import nearest

# A repository of the Hub.
HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
CONFIGS = ("config.json", "adapter_config.json")
# Patterns of the files that any tokenizer of transformers has one of.
TOKENIZERS = ("*token*.*", "vocab*.*", "*.model")


def is_only_a_path(name: str) -> bool:
    """Whether a name cannot be that of a repository, or lies in a folder that exists."""
    return not HUB_ID.fullmatch(name) or name.startswith("outputs/") or ("/" in name and Path(name).parent.is_dir())


def check_path(name: str, option: str):
    """Check that a name is a folder or a file here, or could be the id of a repository.

    Raises:
        ValueError: it is a path, and there is nothing.
    """
    path = Path(name)
    if name and (path.exists() or not is_only_a_path(name)):
        return
    beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = nearest(path.name, beside, name.removesuffix("/").removesuffix(path.name))
    raise ValueError(f"{option} must be a folder or a Hub id, got {name!r}, which is not a folder here{hint}")


def check_model_path(name: str | Path, option: str = "--model_name_or_path", tokenizer: bool = False):
    """Check that a name is a folder with a model, or could be the id of a repository.

    Args:
        option: what the user gave the name to.
        tokenizer: whether the program needs the tokenizer too.

    Raises:
        ValueError: it is another file or folder, or a path without any.
    """
    name = str(name)
    check_path(name, option)
    folder = Path(name)
    if folder.is_file():
        raise ValueError(f"{option} must be a folder or a Hub id, got the file {name}")
    if not folder.is_dir():
        return
    if not any((folder / file).is_file() for file in CONFIGS):
        inside = sorted(str(file.parent) for file in folder.glob(f"*/{CONFIGS[0]}"))
        hint = f"; did you mean {' or '.join(inside[:3])}?" if inside else "."
        raise ValueError(f"{option} must be a folder with a model, got {name} without {CONFIGS[0]}{hint}")
    if tokenizer and not any(file.is_file() for pattern in TOKENIZERS for file in folder.glob(pattern)):
        raise ValueError(f"{option} must be a folder with a tokenizer, got {name} without tokenizer.json.")
