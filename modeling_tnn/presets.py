"""Configurations by name: those of the papers, and small ones.

They are the folders of `configuration/`, which an installed package carries inside.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from .configuration_tnn import TnnConfig


def configuration_folder() -> Path:
    """The folder with presets and recipes: inside an installed package, beside it in a clone."""
    package = Path(__file__).resolve().parent
    installed = package / "configuration"
    return installed if installed.is_dir() else package.parent / "configuration"


def preset_folders() -> dict[str, Path]:
    """The folder of each preset, by its name."""
    folder = configuration_folder()
    return {path.parent.relative_to(folder).as_posix(): path.parent for path in sorted(folder.glob("**/config.json"))}


def list_presets() -> list[str]:
    """The names that `load_preset` knows: `tnn-causal`, `lra/tnn-listops`, ..."""
    return list(preset_folders())


def load_preset(name: str, **fields: Any) -> TnnConfig:
    """The configuration of a preset.

    Args:
        name: one of `list_presets()`; the last part of it will do.
        fields: fields of `TnnConfig` to change. What follows from them follows from the new values.

    Raises:
        ValueError: there is no such preset, it is one of another model, or a field is not possible.
    """
    folders = preset_folders()
    found = [folder for key, folder in folders.items() if name in (key, folder.name)]
    if not found:
        close = get_close_matches(name, folders, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"preset={name!r} is not possible: it must be one of {', '.join(folders)}{hint}")
    # From the file: a configuration that is built has filled in what follows from the old values.
    saved, _ = PreTrainedConfig.get_config_dict(found[0])
    model_type = saved["model_type"]
    if model_type != TnnConfig.model_type:
        raise ValueError(f"{found[0].relative_to(configuration_folder())} is a preset of {model_type}: load it there.")
    return TnnConfig(**saved | fields)
