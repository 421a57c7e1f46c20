"""Toeplitz coefficients as free parameters, one for each lag: the baseline of the RPE (TNN paper, table 9).

    t_k = lambda^|k| theta_k,    |k| < P;    t_k = 0 beyond

D channels, L length, P = `explicit_length`, lambda = `decay` (1 if there is none). The kernel ends at the lag P, so
positions further apart do not see each other.
"""

import torch
from torch import nn
from transformers import initialization as init

from .numerics import compute_dtype
from .tno import ToeplitzOperator
from .toeplitz import fit_lags, fit_taps


class ExplicitOperator(ToeplitzOperator):
    """The operator with explicit coefficients, without a position encoder."""

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.longest, self.decay = config.explicit_length, config.decay
        self.given_decay = config.decay
        sides = 1 if self.causal else 2
        self.taps = nn.Parameter(torch.empty(self.channels, sides * self.longest - (sides - 1)))

    def channel_parameters(self) -> dict[str, int]:
        return {"taps": 1}

    def reset_parameters(self):
        init.normal_(self.taps, std=self.longest**-0.5)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        dtype = compute_dtype(self.taps.dtype)
        first = 0 if self.causal else 1 - self.longest
        lags = torch.arange(first, self.longest, device=device or self.taps.device, dtype=dtype)
        taps = (
            self.taps.to(device, dtype) * (1.0 if self.decay is None else self.decay) ** lags.abs()
        )  # (D, P) or (D, 2P-1)
        return (fit_taps if self.causal else fit_lags)(taps, length)

    def kernel_length(self) -> int:
        return self.longest
