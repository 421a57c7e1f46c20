"""Find presets and recipes by name, without an import of the models."""

from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from tnn_scripts.common.model_path import check_path
from tnn_scripts.common.nearest import nearest


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
    """The file of a recipe. `name` is that of a recipe, such as wikitext2 or lra/small-text, or a file.

    Raises:
        ValueError: there is no such recipe or file.
    """
    folder = configuration_folder() / "recipes"
    recipes = {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.yaml"))}
    if Path(name).is_file():
        return Path(name)
    if name not in recipes:
        raise ValueError(
            f"--recipe must be a recipe or a file, got {name}{nearest(name, recipes)} `tnn presets` lists them."
        )
    return recipes[name]
