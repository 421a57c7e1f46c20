"""Registration of the models with transformers' Auto classes. The code of a model is imported on first use.

The models need `transformers.modeling_utils`, which takes two seconds to import. A configuration, a preset or the help
of a program does not need it.
"""

from importlib import import_module

import transformers

from .configuration_tnn import TnnConfig
from .hub import AUTO_MAP


class _Models(dict):
    """A table from configuration class to model class. The text "module.Class" stands for a class not yet imported."""

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if isinstance(found, str):
            module, name = found.split(".")
            self[key] = found = getattr(import_module(f"{__package__}.{module}"), name)
        return found

    def __iter__(self):  # without this method, `dict(self)` copies the texts
        return super().__iter__()

    def values(self):
        return [self[key] for key in self]

    def items(self):
        return [(key, self[key]) for key in self]


def register():
    """Register `TnnConfig` and the models with the Auto classes.

    transformers has no public way to register a class that is not imported yet. If its mapping does not have the
    expected attribute, the models are imported and registered as usual.
    """
    transformers.AutoConfig.register(TnnConfig.model_type, TnnConfig, exist_ok=True)
    for auto_class, place in AUTO_MAP.items():
        if auto_class == "AutoConfig":
            continue
        mapping = getattr(transformers, auto_class)._model_mapping
        if isinstance(getattr(mapping, "_extra_content", None), dict):
            mapping._extra_content = _Models(mapping._extra_content)
            mapping._extra_content[TnnConfig] = place
        else:
            module, name = place.split(".")
            model = getattr(import_module(f"{__package__}.{module}"), name)
            getattr(transformers, auto_class).register(TnnConfig, model, exist_ok=True)
