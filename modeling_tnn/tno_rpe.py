"""Toeplitz coefficients from an MLP of the lag, times an exponential decay: the operator of the TNN paper.

    t_k = lambda^|k| RPE(k),    k = -(L-1) .. L-1   (causal: k = 0 .. L-1)

D channels, L length. lambda is `decay` for all channels or, with `learnable_decay`, one number per channel:
lambda_c = decay + (1 - decay) sigmoid(theta_c). The lag enters the MLP as it is, so nothing depends on L.
With `rpe_window` W, t_k = 0 for |k| >= W.
"""

import torch
from torch import nn
from transformers import initialization as init

from .recurrence import taps_above_resolution
from .rpe import RelativePositionEncoder
from .rpe_input import build_rpe_input
from .tno import ToeplitzOperator
from .toeplitz import fit_lags, fit_taps
from .tracing import is_exported


class RpeOperator(ToeplitzOperator):
    """The operator of the TNN paper."""

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.rpe = RelativePositionEncoder(
            config.rpe_dim,
            self.channels,
            config.rpe_layers,
            config.rpe_act,
            config.encoder_norm_type,
            config.rpe_residual,
            config.rpe_hidden_norm,
            build_rpe_input(config),
        )
        self.decay, self.window = config.decay, config.rpe_window
        self.decay_logit = nn.Parameter(torch.empty(self.channels)) if config.learnable_decay else None

    def reset_parameters(self):
        if self.decay_logit is not None:
            init.normal_(self.decay_logit)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        if self.window is not None and (is_exported() or length > self.window):
            inside = self._unwindowed(self.window, device)
            return (fit_taps if self.causal else fit_lags)(inside, length)
        return self._unwindowed(length, device)

    def _unwindowed(self, length: int, device: torch.device | None) -> torch.Tensor:
        first = 0 if self.causal else 1 - length
        lags = torch.arange(first, length, device=device or self.rpe.device, dtype=self.rpe.dtype)  # (M,)
        features = self.rpe.features(lags)  # (M, w)
        if self.decay_logit is not None:
            return (
                self.rpe.emit(features, torch.ones_like(lags)) * self._decay_rate(lags.dtype) ** lags.abs()
            )  # (D, M)
        weights = torch.ones_like(lags) if self.decay is None else self.decay ** lags.abs()  # (M,)
        return self.rpe.emit(features * weights[:, None], weights)  # (D, M)

    def num_taps(self) -> int | None:
        slowest = self._slowest_rate()
        taps = None if slowest is None else taps_above_resolution(slowest, self.rpe.dtype)
        return taps if self.window is None else min(self.window, taps or self.window)

    def reach(self) -> int | None:
        # A learned decay is not read here: that would stall an accelerator at every pass.
        return self.window if self.decay_logit is not None else self.num_taps()

    def slowest_decay(self) -> float | None:
        # What ends at the window is not described by a decay.
        return None if self.window is not None else self._slowest_rate()

    def _slowest_rate(self) -> float | None:
        if self.decay_logit is None:
            return self.decay
        return self._decay_rate(self.rpe.dtype).max().item()

    def _decay_rate(self, dtype: torch.dtype) -> torch.Tensor | float:
        if self.decay_logit is None:
            return self.decay
        return self.decay + (1 - self.decay) * torch.sigmoid(self.decay_logit.to(dtype))[:, None]  # (D, 1)
