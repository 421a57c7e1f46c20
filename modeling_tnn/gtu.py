"""The gated Toeplitz unit (GTU): the token mixer of the TNN paper.

    y = W_o( u * TNO(v) ),  u = act(W_u x),  v = act(W_v x)                TNN paper, "token mixer"

B batch, L length, d hidden size, D = gtu_dim channels of the Toeplitz operator.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from .gating import Gate
from .linear import apply_channel_major, apply_linear, apply_together
from .norms import build_norm
from .packing import Documents
from .padding import first_real_token, roll
from .tno import ToeplitzOperator
from .tno_auto import build_tno


class TnnGatedToeplitzUnit(nn.Module):
    """The token mixer: a Toeplitz operator inside a gate."""

    # Whether the inputs of its operator are those of a linear layer.
    projects_inputs = True

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.u_proj = nn.Linear(config.hidden_size, config.gtu_dim)
        self.v_proj = nn.Linear(config.hidden_size, config.gtu_dim)
        self.o_proj = nn.Linear(config.gtu_dim, config.hidden_size)
        for projection in (self.u_proj, self.v_proj, self.o_proj):
            projection.is_gtu_projection = True  # transformers initialises linear layers without their parent
        self.act = ACT2FN[config.hidden_act]
        self.tno = build_tno(config, layer_idx)
        self.norm = build_norm(config.norm_type, config.gtu_dim) if config.gtu_norm else nn.Identity()

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        kernel: torch.Tensor | tuple | None = None,
    ) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`, with a mask `(B, L)` and a cache that holds the state after earlier tokens.

        `kernel` is that of the operator for L positions, if it is known already.
        """
        u, v = apply_together(apply_channel_major, (self.u_proj, self.v_proj), hidden_states)  # (B, L, D) each
        gated = mix_tokens(self.tno, v, Gate(u, self.act, attention_mask), past_key_values, kernel)  # (B, L, D)
        return apply_linear(self.o_proj, self.norm(gated))


def mix_tokens(
    operator: ToeplitzOperator, v: torch.Tensor, gate: Gate, past_key_values: Cache | None, kernel
) -> torch.Tensor:
    """The gated product of an operator with `v` `(B, L, D)`, the first real token of a row being its first one."""
    if gate.mask is None or operator.shift_invariant or isinstance(kernel, Documents):
        return operator(v, past_key_values, gate, kernel)
    first = first_real_token(gate.mask)
    mixed = roll(operator(roll(gate.inputs(v), -first), kernel=kernel), first)
    return gate.apply(mixed, operator.implementation)
