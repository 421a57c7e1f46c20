"""What a name on a command line means: a preset, a recipe, a folder, or a repository of the Hub.

Nothing is imported that could load it. A name that can only be a path must exist: the Hub would be asked for it
otherwise, which takes a minute without a network and ends with an advice to check the connection.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

# A repository of the Hub.
HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
CONFIGS = ("config.json", "adapter_config.json")
# Patterns of the files that any tokenizer of transformers has one of.
TOKENIZERS = ("*token*.*", "vocab*.*", "*.model")


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message: `; did you mean ...?` with the nearest known name, or a full stop."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else "."


def configuration_folder() -> Path:
    """The folder with presets and recipes, as `modeling_tnn.presets` finds it."""
    package = Path(find_spec("modeling_tnn").origin).resolve().parent
    installed = package / "configuration"
    return installed if installed.is_dir() else package.parent / "configuration"


def preset_folders() -> dict[str, Path]:
    """The folder of each preset by its names: `lra/tnn-listops`, and its last part alone."""
    folder = configuration_folder()
    found = [file.parent for file in sorted(folder.glob("**/config.json"))]
    return {path.name: path for path in found} | {path.relative_to(folder).as_posix(): path for path in found}


def recipe_files() -> dict[str, Path]:
    """The file of each recipe by its name: `wikitext2`, `lra/small-text`."""
    folder = configuration_folder() / "recipes"
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.yaml"))}


def find_config(name: str, option: str = "--config_name") -> str:
    """The folder of the preset called `name`; any other `name` is returned as a folder or a Hub id.

    Raises:
        ValueError: the name is a path without a folder, or is like that of a preset and none.
    """
    presets = preset_folders()
    if name and Path(name).exists():
        return name
    if name in presets:
        return str(presets[name])
    folders = {preset.partition("/")[0] for preset in presets if "/" in preset}
    # Other names are those of the Hub, even if one is a little like that of a preset: t5-small.
    close = "/" not in name and get_close_matches(name, presets, 1, cutoff=0.9)
    if close or name.startswith("tnn-") or name.partition("/")[0] in folders:
        hint = nearest(name, presets)
        raise ValueError(
            f"{option} must be a preset, a folder or a Hub id, got {name}{hint} `tnn presets` lists them."
        )
    check_path(name, option)
    return name


def find_recipe(name: str) -> Path:
    """The file of a recipe. `name` is that of a recipe, or a file.

    Raises:
        ValueError: there is no such recipe or file.
    """
    recipes = recipe_files()
    if not Path(name).is_file() and name not in recipes:
        hint = nearest(name, recipes)
        raise ValueError(f"--recipe must be a recipe or a file, got {name}{hint} `tnn presets` lists them.")
    return Path(name) if Path(name).is_file() else recipes[name]


def check_path(name: str, option: str):
    """Check that a name is a folder or a file here, or could be the id of a repository.

    Raises:
        ValueError: it is a path, and there is nothing.
    """
    path = Path(name)
    is_path = not HUB_ID.fullmatch(name) or name.startswith("outputs/") or ("/" in name and path.parent.is_dir())
    if name and (path.exists() or not is_path):
        return
    siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = nearest(path.name, siblings, name.removesuffix("/").removesuffix(path.name))
    raise ValueError(f"{option} must be a folder or a Hub id, got {name!r}, which is not a folder here{hint}")


def check_model_path(name: str | Path, option: str = "--model_name_or_path", tokenizer: bool = False):
    """Check that a name is a folder with a model, and with a `tokenizer`, or could be the id of a repository.

    Raises:
        ValueError: it is another file or folder, or a path without any.
    """
    name, folder = str(name), Path(name)
    check_path(name, option)
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
