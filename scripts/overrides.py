"""Fields of a TNN configuration from a command line."""

import yaml
from recipes import find_config
from transformers import AutoConfig

from modeling_tnn import TnnConfig


def parse_overrides(text: str | None) -> dict:
    """`name=value,name=value` as a dictionary; values are read as YAML.

    Raises:
        ValueError: a name is no field of the configuration.
    """
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair.strip()]
    fields = {name.strip(): yaml.safe_load(value) for name, _, value in pairs}
    known = TnnConfig()
    unknown = [name for name in fields if not hasattr(known, name)]
    if unknown:
        raise ValueError(f"a TnnConfig has no field {', '.join(unknown)}: see its docstring.")
    return fields


def load_config(name: str, *overrides: dict) -> TnnConfig:
    """A preset, folder or Hub id with other fields; what follows from the fields follows from the new ones."""
    fields, _ = TnnConfig.get_config_dict(find_config(name))
    for changed in overrides:
        fields |= changed
    return AutoConfig.for_model(**fields)
