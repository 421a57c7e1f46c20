"""What the relative position encoder reads of a lag k (TNN paper, table 9).

    lag           k
    normalized    k / P
    sinusoidal    sines and cosines of k at w/2 rates

M lags, w = `rpe_dim`, P = `rpe_input_length`. The released code divides by the length of the input less one, so
that a longer text changes all coefficients; a fixed number keeps causal kernels prefix-consistent.
"""

import torch
from torch import nn

from .positions import sinusoidal_embedding
from .rpe import CastingLinear


class NormalizedInput(CastingLinear):
    """The input projection of k / P."""

    def __init__(self, config):
        super().__init__(1, config.rpe_dim)
        self.longest = config.rpe_input_length

    def forward(self, lags: torch.Tensor) -> torch.Tensor:
        """`(M, 1)` to `(M, w)`."""
        return super().forward(lags / self.longest)


class SinusoidalInput(CastingLinear):
    """The input projection of sines and cosines."""

    def __init__(self, config):
        super().__init__(config.rpe_dim, config.rpe_dim)

    def forward(self, lags: torch.Tensor) -> torch.Tensor:
        """`(M, 1)` to `(M, w)`."""
        return super().forward(sinusoidal_embedding(lags.t(), self.in_features, lags.dtype)[0])


RPE_INPUTS = {
    "lag": lambda config: CastingLinear(1, config.rpe_dim),
    "normalized": NormalizedInput,
    "sinusoidal": SinusoidalInput,
}


def build_rpe_input(config) -> nn.Linear:
    """The input projection that `config.rpe_input` names.

    Raises:
        ValueError: there is no such input.
    """
    if config.rpe_input not in RPE_INPUTS:
        raise ValueError(f"rpe_input={config.rpe_input!r} is not possible: it must be one of {', '.join(RPE_INPUTS)}.")
    return RPE_INPUTS[config.rpe_input](config)
