"""The position encoder, from one number to one value per channel, and sinusoidal positions.

    z = W_in p + b_in
    z = W_k act(norm(z)) + b_k  (+ z if residual),    k = 1 .. rpe_layers
    out = W_out act(norm(z)) + b_out                                                                         (1)

D channels, M positions, w = rpe_dim. (1) is the relative position encoder of the TNN paper, whose p is a lag (`rpe`)
or a frequency (`fd`); the order of norm, activation and linear map is that of the released code. It runs in float32 or
float64, because bfloat16 cannot distinguish integer lags above 256.
"""

import math

import torch
from torch import nn

from .norms import NORM_TYPES
from .numerics import compute_dtype, is_exported, is_traced


class CastingLinear(nn.Module):
    """A linear map that computes in the dtype of its input, for parameters of any dtype.

    It has the parameters of `nn.Linear`, and is none: tools that quantize, adapt or prune these keep out of kernels.
    """

    reset_parameters = nn.Linear.reset_parameters

    def __init__(self, size_in: int, size_out: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))
        self.bias = nn.Parameter(torch.empty(size_out)) if bias else None
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, bias={self.bias is not None}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class OutputLinear(CastingLinear):
    """The output map of the encoder, after a linear operation A on the positions.

    A commutes with it, A (F W^T + 1 b^T) = (A F) W^T + (A 1) b^T. Before the map A acts on w columns, after it on D.
    """

    def forward(self, x: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
        """A F `(M, w)` and A 1 `(M,)` to `(M, D)`, channel-major in memory.

        Of several operations, A F `(P, M, w)` and A 1 `(P, M)`, each is for one of P groups of outputs: `(P, M, D/P)`.
        """
        weight, bias = (part.to(x.dtype).unflatten(0, (*x.shape[:-2], -1)) for part in (self.weight, self.bias))
        if is_traced() and not is_exported():  # joined under vmap, they would be a graph for one length
            return (weight @ x.mT + bias[..., None] * ones[..., None, :]).mT
        weight = torch.cat([weight, bias[..., None]], dim=-1)  # (P, D/P, w+1)
        return (weight @ torch.cat([x.mT, ones[..., None, :]], dim=-2)).mT


class RelativePositionLayer(nn.Module):
    """One layer of the encoder: norm, activation, linear map."""

    def __init__(self, size_in: int, size_out: int, act: str, norm_type: str, linear: type = CastingLinear):
        from transformers.activations import ACT2FN  # takes seconds to import, too long for the configuration

        super().__init__()
        self.norm = NORM_TYPES[norm_type](size_in)
        self.act = ACT2FN[act]
        self.linear = linear(size_in, size_out)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.linear(self.act(self.norm(z)))


class RelativePositionEncoder(nn.Module):
    """The relative position encoder, the MLP of (1), with D outputs `num_outputs`.

    The input projection `in_proj` `(M, 1)` to `(M, w)` is a linear map of the position unless given.
    """

    def __init__(self, config, num_outputs: int, act: str, in_proj: CastingLinear | None = None):
        super().__init__()
        size, given = config.rpe_dim, (act, config.encoder_norm_type)
        self.residual = config.rpe_residual
        self.in_proj = CastingLinear(1, size) if in_proj is None else in_proj
        self.in_proj.maps_zeros = True  # lag or frequency 0, to a row that a norm can divide by its length
        self.layers = nn.ModuleList([RelativePositionLayer(size, size, *given) for _ in range(config.rpe_layers)])
        if not config.rpe_hidden_norm:
            for layer in self.layers:
                layer.norm = nn.Identity()
        self.out = RelativePositionLayer(size, num_outputs, *given, OutputLinear)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the encoder computes in."""
        return compute_dtype(self.in_proj.weight.dtype)

    def features(self, positions: torch.Tensor) -> torch.Tensor:
        """The inputs `(M, w)` of the output map at the `positions` `(M,)`."""
        z = self.in_proj(positions.to(self.dtype)[:, None])  # (M, w)
        for layer in self.layers:
            z = layer(z) + z if self.residual else layer(z)  # (M, w)
        return self.out.act(self.out.norm(z))

    def emit(self, features: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
        """The output map of `features` A F `(M, w)` and `ones` A 1 `(M,)`, `(D, M)`; see `OutputLinear`."""
        return self.out.linear(features, ones).mT


def sinusoidal_embedding(positions: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The sines (even channels) and cosines (odd channels) of positions `(B, L)` at `size` / 2 rates, `(B, L, size)`.

    Channel c has the rate 10000^(-2 floor(c/2) / size) (Vaswani et al., 2017, section 3.5).
    """
    channel = torch.arange(size, device=positions.device)
    # In float32 whatever the default dtype is, which whole numbers times a float would have.
    rates = torch.exp(channel.div(2, rounding_mode="floor").float() * (-2 * math.log(10000.0) / size))  # (size,)
    angles = positions[..., None] * rates  # (B, L, size)
    return torch.where(channel % 2 == 0, angles.sin(), angles.cos()).to(dtype)
