"""Pipeline parallelism: models of which this process has some of the layers, and identities in place of the others.

transformers (`DistributedConfig(pp_size=2)`) gives the first stage the ids. Each other stage gets the hidden states of
the stage before it as `inputs_embeds`, which are no embeddings: they must not be scaled again.
"""

from collections.abc import Sequence

from torch import nn

# What each part of a `TnnModel`, and the head of a language model, takes and gives.
PLAN = {
    "embed_tokens": (["input_ids"], ["inputs_embeds"]),
    "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
    "norm": (["hidden_states"], ["hidden_states"]),
}

HEAD_PLAN = {"lm_head": (["hidden_states"], ["logits"])}


def is_elsewhere(layer: nn.Module) -> bool:
    """Whether a layer lies on another stage."""
    return isinstance(layer, nn.Identity)


def first_layer(layers: Sequence[nn.Module]) -> int:
    """The index of the first layer of this stage.

    Raises:
        ValueError: it has none.
    """
    for index, layer in enumerate(layers):
        if not is_elsewhere(layer):
            return index
    raise ValueError(f"A pipeline must have at most as many stages as layers, got a stage with none of {len(layers)}")
