"""An operator from outside the package, as the page on adding one has it: a sum of Gaussians of the lag.

    t_k = sum_g a_g exp(-(k / s_g)^2 / 2)

D channels, L length, G Gaussians (`config.num_gaussians`, 4 unless given), s_g = 2^g lags wide.
"""

import torch
from torch import nn
from transformers import initialization as init

from modeling_tnn import ToeplitzOperator, register_operator


class GaussianOperator(ToeplitzOperator):
    """A kernel without an end in sight, smooth at every lag."""

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.amplitudes = nn.Parameter(torch.empty(self.channels, getattr(config, "num_gaussians", 4)))  # (D, G)

    def reset_parameters(self):
        init.normal_(self.amplitudes, std=0.1)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        amplitudes = self.amplitudes.to(device or self.amplitudes.device)
        amplitudes = amplitudes.to(torch.promote_types(amplitudes.dtype, torch.float32))
        first = 0 if self.causal else 1 - length
        lags = torch.arange(first, length, device=amplitudes.device, dtype=amplitudes.dtype)  # (M,)
        widths = 2.0 ** torch.arange(amplitudes.shape[1], device=amplitudes.device)  # (G,)
        return amplitudes @ torch.exp(-0.5 * (lags / widths[:, None]) ** 2)  # (D, M)


NAME = "gaussian"
register_operator(NAME, GaussianOperator)
