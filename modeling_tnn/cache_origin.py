"""The origin of a cached state: the configuration and the weights of the model that made it.

There are two checks, of different cost. Every call checks whether the weights of the model have changed since. This
check does not read the weights: it uses the identity of each parameter, PyTorch's count of the writes to it, and the
state of PEFT's adapters (active, merged, scaled). The first call of another model (a deep copy, or the same model in
another process) checks whether it has the same weights, by a hash of each parameter.

The checks miss writes that PyTorch does not count (through `.data`, or to tensors made in inference mode), and changes
of offloaded parameters (which are on the meta device between calls).
"""

from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .layer_types import FIELDS as LAYER_FIELDS
from .layer_types import has_attention
from .mixer_types import FIELDS as MIXER_FIELDS
from .mixer_types import GTU

VERSION = attrgetter("_version")

# Fields of the configuration that do not change a state, or that follow from the names of the weights.
OTHER_FIELDS = {
    "num_hidden_layers", "use_cache", "tno_implementation", "tno_class", "hidden_dropout_prob", "classifier_dropout",
    "initializer", "initializer_range", "converted_from", "tie_word_embeddings", "bos_token_id", "pad_token_id",
    "eos_token_id",
}  # fmt: skip

# Attributes of a PEFT layer that say what it does with its adapters.
ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class Origin:
    """The model that made a state, and a stamp of its weights at that time. It keeps the model alive.

    A pickled origin holds `identity` of the model instead, or None if the weights have changed since.
    """

    def __init__(self, model: nn.Module):
        self.model, self.stamp, self.saved = model, stamp(model), None
        self._census = census(model)

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self) -> dict:
        return {"model": None, "stamp": None, "saved": self.identity(), "_census": None}

    def is_unchanged(self) -> bool:
        """Whether the weights of the model are those of the stamp."""
        if self._census is not None and self._census.holds():
            return True
        return stamp(self.model) == self.stamp

    def identity(self) -> dict | None:
        """The configuration and the hashes of the weights, or None if the weights have changed since."""
        if self.model is None:
            return self.saved
        return identity(self.model) if self.is_unchanged() else None

    def is_that_of(self, other: "Origin") -> bool:
        """Whether both are the same model with the same weights."""
        return self.model is not None and (self.model, self.stamp) == (other.model, other.stamp)

    def fits(self, model: nn.Module) -> bool:
        """Whether `model` can continue the state: it has the same configuration and the same weights."""
        own, other = self.identity(), identity(model)
        if own is None or own["fields"] != other["fields"] or own["weights"].keys() != other["weights"].keys():
            return False
        pairs = zip(own["weights"].values(), other["weights"].values(), strict=True)
        return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)


def stamp(model: nn.Module) -> int:
    """A number that changes when the weights of a model change. The module docstring lists what it misses."""
    marks, modules = [], [model]
    for module in modules:  # the list grows during the loop: faster than model.modules()
        modules += [child for child in module._modules.values() if child is not None]
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_meta:
                marks += id(parameter), 0 if parameter.is_inference() else parameter._version
        own = vars(module)
        if "merged_adapters" in own:
            marks.append(repr([own.get(name) for name in ADAPTERS]))
    return hash(tuple(marks))


class Census(NamedTuple):
    """The modules and parameters of a model, listed, so that a decoded token need not walk through the model.

    Attributes:
        held: each non-empty dictionary of modules or of parameters, and the identities in it.
        parameters: all parameters.
        versions: PyTorch's count of the writes to each.
    """

    held: list[tuple[dict, list[int]]]
    parameters: list[nn.Parameter]
    versions: list[int]

    def holds(self) -> bool:
        """Whether the model has the same modules and parameters, and none has been written to."""
        for found, identities in self.held:
            if [*map(id, found.values())] != identities:
                return False
        return [*map(VERSION, self.parameters)] == self.versions


def census(model: nn.Module) -> Census | None:
    """The `Census` of a model, or None for one with adapters, or with parameters that are offloaded or uncounted."""
    modules = list(model.modules())
    parameters = [one for module in modules for one in module._parameters.values() if one is not None]
    if any(one.is_meta or one.is_inference() for one in parameters):
        return None
    if any("merged_adapters" in vars(module) for module in modules):
        return None
    groups = [group for module in modules for group in (module._modules, module._parameters) if group]
    held = [(group, [*map(id, group.values())]) for group in groups]
    return Census(held, parameters, [*map(VERSION, parameters)])


def identity(model: nn.Module) -> dict:
    """The fields of the configuration and a hash of each parameter by its name, which `Origin.fits` compares."""
    names = type(model.config).__annotations__.keys() - OTHER_FIELDS
    if not has_attention(model.config):
        names -= set(LAYER_FIELDS)  # which caches of version 0.1.0 do not have
    if model.config.toeplitz_mixer == GTU:
        names -= set(MIXER_FIELDS)  # nor these
    return {
        "fields": {name: getattr(model.config, name) for name in sorted(names)},
        "weights": {name: hash_values(parameter) for name, parameter in model.named_parameters()},
    }


def hash_values(parameter: nn.Parameter) -> int | None:
    """A hash of the values of a parameter, equal on all devices, or None for a parameter on the meta device.

    Of a parameter that is divided over processes, it is that of the part on this one.
    """
    if parameter.is_meta:
        return None
    values = parameter.detach()
    return torch.hash_tensor(values.to_local() if isinstance(values, DTensor) else values).item()
