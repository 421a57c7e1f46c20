"""The blocks of a Toeplitz neural network: a gated Toeplitz unit and a gated linear unit.

    GTU:    y = W_o( u * TNO(v) ),  u = act(W_u x),  v = act(W_v x)                TNN paper, "token mixer"
    GLU:    y = W_down( act(W_gate x) * W_up x )
    block:  x = x + GTU(norm(x));  x = x + GLU(norm(x))                            (norm_position="pre")

B batch, L length, d hidden size, D = gtu_dim channels of the Toeplitz operator. Padding: v is zeroed at masked
positions after its projection and activation (both have a bias to add), so a Toeplitz product never sees them;
since it depends on differences of positions alone, the outputs at real positions are those of the bare text.
"""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .configuration_tnn import TnnConfig
from .gating import Gating, activated_product
from .inputs import first_real_token, roll
from .linear import ChannelMajorLinear
from .norms import LayerNorm, build_norm, with_mask
from .operators import build_tno


class TnnGatedToeplitzUnit(nn.Module):
    """The token mixer: a Toeplitz operator inside a gate."""

    def __init__(self, config: TnnConfig, layer_idx: int):
        super().__init__()
        self.u_proj = ChannelMajorLinear(config.hidden_size, config.gtu_dim)
        self.v_proj = ChannelMajorLinear(config.hidden_size, config.gtu_dim)
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
    ) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`, for a mask `(B, L)` and the state after earlier tokens."""
        u, v = self.u_proj(hidden_states), self.v_proj(hidden_states)  # (B, L, D) each
        gated = self._mix(v, Gating(u, self.act, attention_mask), past_key_values)  # (B, L, D)
        return self.o_proj(self.norm(gated))

    def _mix(self, v: torch.Tensor, gating: Gating, past_key_values: Cache | None) -> torch.Tensor:
        if gating.mask is None or self.tno.shift_invariant:
            return self.tno(v, past_key_values, gating)
        first = first_real_token(gating.mask)
        mixed = roll(self.tno(roll(gating.open(v), -first)), first)
        return gating.close(mixed, self.tno.product)


class TnnGatedLinearUnit(nn.Module):
    """The channel mixer."""

    def __init__(self, config: TnnConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.glu_dim)
        self.up_proj = nn.Linear(config.hidden_size, config.glu_dim)
        self.down_proj = nn.Linear(config.glu_dim, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]
        self.product = config.product

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)  # (B, L, glu_dim) each
        return self.down_proj(activated_product(gate, up, self.act, self.product))


def pre_norm(x, norm, sublayer):
    return x + sublayer(norm(x))


def post_norm(x, norm, sublayer):
    return norm(x + sublayer(x))


def res_post_norm(x, norm, sublayer):
    return x + norm(sublayer(x))


NORM_POSITIONS = {"pre": pre_norm, "post": post_norm, "res_post": res_post_norm}


class TnnBlock(GradientCheckpointingLayer):
    """One layer of the model."""

    def __init__(self, config: TnnConfig, layer_idx: int):
        super().__init__()
        self.gtu_norm = build_norm(config.norm_type, config.hidden_size)
        self.gtu = TnnGatedToeplitzUnit(config, layer_idx)
        self.glu_norm = build_norm(config.norm_type, config.hidden_size)
        self.glu = TnnGatedLinearUnit(config) if config.use_glu else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.add_residual = NORM_POSITIONS[config.norm_position]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """`(B, L, d)` to `(B, L, d)`."""

        def mix_tokens(x):
            return self.dropout(self.gtu(x, attention_mask, past_key_values))

        def mix_channels(x):
            return self.dropout(self.glu(x))

        gtu_norm, glu_norm = (with_mask(norm, attention_mask) for norm in (self.gtu_norm, self.glu_norm))
        hidden_states = self.add_residual(hidden_states, gtu_norm, mix_tokens)
        return hidden_states if self.glu is None else self.add_residual(hidden_states, glu_norm, mix_channels)


def build_final_norm(config: TnnConfig) -> nn.Module:
    """The norm after the last block of a pre-norm model."""
    if config.norm_position != "pre":
        return nn.Identity()
    if config.norm_type == "batchnorm":
        return build_norm(config.norm_type, config.hidden_size)
    return LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
