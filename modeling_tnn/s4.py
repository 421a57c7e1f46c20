"""The mixer of S4's blocks, in which the RTF paper measured its operator (appendix C.2.1).

    y = GLU( W act(TNO(x)) ),      GLU(a, b) = a * sigmoid(b)

B batch, L length, d hidden size. The operator has the d channels of its input; there is no gate before it. Norm,
residual connection and dropout are those of the block, which has no channel mixer in the models of the Long Range
Arena and of Copying (`use_glu=False`). `act` is `hidden_act`, GELU in the paper. S4 has dropout after the activation
too; here it is after the mixer alone.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from .gating import Gate
from .gtu import mix_tokens
from .linear import apply_linear
from .tno_auto import build_tno


class TnnS4Mixer(nn.Module):
    """The token mixer of the equation above. Its operator is at `tno`, as in the gated Toeplitz unit."""

    # Whether the inputs of its operator are those of a linear layer.
    projects_inputs = False

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.tno = build_tno(config, layer_idx)
        self.act = ACT2FN[config.hidden_act]
        self.o_proj = nn.Linear(config.gtu_dim, 2 * config.hidden_size)
        self.o_proj.is_gtu_projection = True  # transformers initialises linear layers without their parent

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        kernel: torch.Tensor | tuple | None = None,
    ) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`, with the arguments of the gated Toeplitz unit."""
        mixed = mix_tokens(self.tno, hidden_states, Gate(mask=attention_mask), past_key_values, kernel)
        return nn.functional.glu(apply_linear(self.o_proj, self.act(mixed)))
