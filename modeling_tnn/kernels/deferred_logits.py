"""Outputs of language models whose logits are computed when they are read.

Most training steps need the loss alone, and the logits `(B, L, V)` are the largest tensor of one. But a `compute_loss`
of the user's own reads them. Until then a `DeferredLogits` is in their place, which passes through what only hands
outputs on: DistributedDataParallel, FSDP, and accelerate, which makes an output anew with the tensors in float32.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput

from ..extensions import extensions


class DeferredLogits:
    """The logits of hidden states `(B, L, d)` by a plain linear head, not computed yet."""

    def __init__(self, head: nn.Linear, hidden_states: torch.Tensor):
        self.head, self.hidden_states = head, hidden_states
        self.weight, self.version = head.weight, head.weight._version

    def compute(self) -> torch.Tensor:
        """The logits `(B, L, V)`.

        Raises:
            RuntimeError: the weights of the head have changed since the pass, or are gathered no longer.
        """
        if self.head.weight is not self.weight or self.weight._version != self.version:
            raise RuntimeError(
                "`logits` must be read before the optimizer's step, got other weights than those of the pass. Read "
                "them earlier, or call the model with skip_logits=False."
            )
        return self.head(self.hidden_states.to(self.weight.dtype))  # autocast may have given them another one


class DeferredOutput:
    """What the outputs below add to those of transformers: all ways to read a field give the logits themselves."""

    def __getattribute__(self, name: str):
        value = super().__getattribute__(name)
        if isinstance(value, DeferredLogits):
            value = self.logits = value.compute()
        return value

    def __getitem__(self, key):
        value = super().__getitem__(key)
        return self.logits if isinstance(value, DeferredLogits) else value

    def get(self, key, default=None):
        """The field `key`, or `default` if there is none."""
        return self[key] if key in self else default  # noqa: SIM401 - this is `get`

    def __reduce__(self):
        _ = self.logits  # a file holds tensors, not the head
        return super().__reduce__()


@dataclass
class DeferredCausalLMOutput(DeferredOutput, CausalLMOutputWithPast):
    """`CausalLMOutputWithPast` with logits that are computed when they are read."""


@dataclass
class DeferredMaskedLMOutput(DeferredOutput, MaskedLMOutput):
    """`MaskedLMOutput` with logits that are computed when they are read."""


DEFERRED_OUTPUTS = {CausalLMOutputWithPast: DeferredCausalLMOutput, MaskedLMOutput: DeferredMaskedLMOutput}


def deferred_output(cls: type, logits: DeferredLogits, **fields):
    """An output of the deferred variant of the class `cls`."""
    return DEFERRED_OUTPUTS[cls](logits=logits, **fields)


extensions.register(deferred_output=deferred_output)
