"""Fields of a configuration from a command line."""

import yaml
from recipes import find_config
from transformers import AutoConfig, PreTrainedConfig

import modeling_tnn


def parse_overrides(text: str | None, known: PreTrainedConfig | None = None) -> dict:
    """`name=value,name=value` as a dictionary; values are read as YAML.

    Raises:
        ValueError: a value cannot be read, or a name is no field of the configuration `known` (of a TNN unless given).
    """
    known = known or modeling_tnn.TnnConfig()
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair.strip()]
    try:
        fields = {name.strip(): yaml.safe_load(value) for name, _, value in pairs}
    except yaml.YAMLError as error:
        raise ValueError(f"{text} cannot be read as name=value,name=value: {' '.join(str(error).split())}") from error
    if unknown := [name for name in fields if not hasattr(known, name)]:
        raise ValueError(f"a {type(known).__name__} has no field {', '.join(unknown)}: see its docstring.")
    return fields


def load_config(name: str, *overrides: dict) -> PreTrainedConfig:
    """A preset, folder or Hub id with other fields; what follows from the fields follows from the new ones."""
    # From the file: a configuration that is built has filled in what follows from the old ones.
    fields, _ = PreTrainedConfig.get_config_dict(find_config(name))
    for changed in overrides:
        fields |= changed
    return AutoConfig.for_model(**fields)
