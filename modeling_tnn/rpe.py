"""The relative position encoder: an MLP from one number (a lag, a frequency) to one value per channel.

    z = W_in p + b_in
    z = W_k act(norm(z)) + b_k  (+ z if residual),    k = 1 .. rpe_layers
    out = W_out act(norm(z)) + b_out

M positions, w = rpe_dim, D outputs. (TNN paper, "relative position encoder"; the order of norm, activation and
linear map is that of the released code.) It runs in float32 at least: bfloat16 cannot tell integer lags above 256
apart.
"""

import torch
from torch import nn
from transformers.activations import ACT2FN

from .norms import build_norm
from .toeplitz import transform_dtype


class CastingLinear(nn.Linear):
    """A linear map in the precision of its input, whatever the dtype of its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class OutputLinear(CastingLinear):
    """A `CastingLinear` that can follow a linear operation on its rows, see `RelativePositionEncoder.emit`."""

    def forward(self, x: torch.Tensor, ones: torch.Tensor | None = None) -> torch.Tensor:
        """`(M, w)` to `(M, D)`: x W^T + ones b^T, for `ones` `(M,)`; as any linear map without them."""
        if ones is None:
            return super().forward(x)
        weight = torch.cat([self.weight, self.bias[:, None]], dim=1).to(x.dtype)  # (D, w+1)
        return (weight @ torch.cat([x.t(), ones[None]])).t()  # a view of (D, M)


class RelativePositionLayer(nn.Module):
    """norm, activation, linear map."""

    def __init__(self, size_in: int, size_out: int, act: str, norm_type: str, linear: type[nn.Linear] = CastingLinear):
        super().__init__()
        self.norm = build_norm(norm_type, size_in)
        self.act = ACT2FN[act]
        self.linear = linear(size_in, size_out)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.linear(self.act(self.norm(z)))


class RelativePositionEncoder(nn.Module):
    """The MLP above.

    Args:
        size: width w of the hidden layers.
        num_outputs: D.
        num_layers: hidden layers besides the input and the output projection, from 0.
        act: name of the activation.
        norm_type: name of the norm, see `norms.py`.
        residual: whether hidden layers have a residual connection.
        hidden_norm: whether hidden layers have the norm, as the output layer has.
    """

    def __init__(
        self,
        size: int,
        num_outputs: int,
        num_layers: int,
        act: str,
        norm_type: str,
        residual: bool,
        hidden_norm: bool = True,
    ):
        super().__init__()
        self.residual = residual
        self.in_proj = CastingLinear(1, size)
        self.layers = nn.ModuleList([RelativePositionLayer(size, size, act, norm_type) for _ in range(num_layers)])
        if not hidden_norm:
            for layer in self.layers:
                layer.norm = nn.Identity()
        self.out = RelativePositionLayer(size, num_outputs, act, norm_type, OutputLinear)

    @property
    def dtype(self) -> torch.dtype:
        """The precision it computes in."""
        return transform_dtype(self.in_proj.weight.dtype)

    @property
    def device(self) -> torch.device:
        return self.in_proj.weight.device

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """`(M,)` numbers to `(M, D)` values."""
        return self.out.linear(self.features(positions))

    def features(self, positions: torch.Tensor) -> torch.Tensor:
        """`(M,)` numbers to what the output map is applied to, `(M, w)`."""
        z = self.in_proj(positions.to(self.dtype)[:, None])  # (M, w)
        for layer in self.layers:
            z = layer(z) + z if self.residual else layer(z)  # (M, w)
        return self.out.act(self.out.norm(z))

    def emit(self, features: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
        """The output map `(M, w)` to `(D, M)` after a linear operation on the positions M, in channel-major memory.

        An operation A on positions commutes with a map of features, A (F W^T + 1 b^T) = (A F) W^T + (A 1) b^T, and
        costs w columns instead of D.

        Args:
            features: A F, `(M, w)`.
            ones: A 1, `(M,)`.
        """
        return self.out.linear(features, ones).t()
