"""Whose state a cache holds: the configuration and the weights of the model that has made it.

Two questions, of different cost. Whether the weights of one model have changed under a cache is asked at every call,
so it is answered without reading them: by the identity of each parameter, PyTorch's count of the writes to it, and
what PEFT says of its adapters (active, merged, scaled). Whether another model (a deep copy, the same model in another
process) has the same weights is asked once, and answered by a hash of each parameter.

Not noticed are writes that PyTorch does not count (through `.data`, or to tensors made in inference mode), and changes
of parameters that are offloaded (on the meta device between calls).
"""

import torch
from torch import nn

# Fields of the configuration that a state does not depend on, or that the names of the weights tell.
OTHER_FIELDS = {
    "num_hidden_layers", "use_cache", "tno_implementation", "tno_class", "hidden_dropout_prob", "classifier_dropout",
    "initializer", "initializer_range", "converted_from", "tie_word_embeddings", "bos_token_id", "pad_token_id",
    "eos_token_id",
}  # fmt: skip

# What a layer of PEFT does with its adapters.
ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class Origin:
    """The model that has made a state, with its weights as they were. It keeps the model alive.

    Pickled, it is what `identity` says of the model, or None where the weights have changed since.
    """

    def __init__(self, model: nn.Module):
        self.model, self.stamp, self.saved = model, stamp(model), None

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self) -> dict:
        return {"model": None, "stamp": None, "saved": self.identity()}

    def identity(self) -> dict | None:
        """Configuration and hashes of the weights; None where no model has them any more."""
        if self.model is None:
            return self.saved
        return identity(self.model) if stamp(self.model) == self.stamp else None

    def fits(self, model: nn.Module) -> bool:
        """Whether another model can go on with the state."""
        own, other = self.identity(), identity(model)
        if own is None or own["fields"] != other["fields"] or own["weights"].keys() != other["weights"].keys():
            return False
        pairs = zip(own["weights"].values(), other["weights"].values(), strict=True)
        return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)


def stamp(model: nn.Module) -> int:
    """A number that changes with the weights of a model, see above for what it sees."""
    marks, modules = [], [model]
    for module in modules:  # it grows while it is read: faster than model.modules()
        modules += [child for child in module._modules.values() if child is not None]
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_meta:
                marks += id(parameter), 0 if parameter.is_inference() else parameter._version
        own = vars(module)
        if "merged_adapters" in own:
            marks.append(repr([own.get(name) for name in ADAPTERS]))
    return hash(tuple(marks))


def identity(model: nn.Module) -> dict:
    """What `Origin.fits` compares: fields of the configuration, and a hash of each parameter by its name."""
    names = type(model.config).__annotations__.keys() - OTHER_FIELDS
    return {
        "fields": {name: getattr(model.config, name) for name in sorted(names)},
        "weights": {name: hash_values(parameter) for name, parameter in model.named_parameters()},
    }


def hash_values(parameter: nn.Parameter) -> int | None:
    """The same for the same values on any device; None where they are not at hand."""
    return None if parameter.is_meta else torch.hash_tensor(parameter.detach()).item()
