"""Presets: configurations by name, those of the papers and small ones.

They are the folders of `configuration/`, which an installed package contains. Programs execute this file without its
package to find them, before PyTorch and transformers are imported.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configuration_tnn import TnnConfig


def configuration_folder() -> Path:
    """The folder with presets and recipes: inside the installed package, or beside it in a clone."""
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


def load_preset(name: str, **fields: Any) -> "TnnConfig":
    """The configuration of a preset.

    Args:
        name: one of `list_presets()`, or its last part.
        fields: fields of `TnnConfig` to change. Derived fields follow from the new values.

    Raises:
        ValueError: the preset is unknown or belongs to another model, or a field has a value outside its limits.
    """
    from transformers import PreTrainedConfig

    from .configuration_tnn import TnnConfig

    folders = preset_folders()
    found = [folder for key, folder in folders.items() if name in (key, folder.name)]
    if not found:
        close = get_close_matches(name, folders, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(f"`name` must be a preset, got {name!r}{hint} `list_presets()` and `tnn presets` list them.")
    # Read the file: a built configuration has derived fields from the old values.
    saved, _ = PreTrainedConfig.get_config_dict(found[0])
    model_type = saved["model_type"]
    if model_type != TnnConfig.model_type:
        preset = found[0].relative_to(configuration_folder())
        call = f"AutoConfig.from_pretrained({str(found[0])!r})"
        raise ValueError(f"{preset} is a preset of {model_type}, not of {TnnConfig.model_type}. Load it with {call}.")
    return TnnConfig(**saved | fields)
