"""Toeplitz coefficients from an MLP of the lag, times an exponential decay: the operator of the TNN paper.

    t_k = lambda^|k| RPE(k),    k = -(L-1) .. L-1   (causal: k = 0 .. L-1)

D channels, L length. lambda is `decay` for all channels or, with `learnable_decay`, one number per channel:
lambda_c = decay + (1 - decay) sigmoid(theta_c). The coefficient of a lag does not depend on L. With `rpe_window` W,
t_k = 0 for |k| >= W.
"""

import torch
from torch import nn
from transformers import initialization as init

from .numerics import is_exported, is_on_host
from .recurrence import LONG_PROMPT, FilterRecurrence
from .rpe import RelativePositionEncoder, build_rpe_input
from .tno import ToeplitzOperator, taps_above
from .toeplitz import fit_lags, fit_taps


class LateRecurrence(FilterRecurrence):
    """The decoding of a kernel whose number of taps follows from values of parameters.

    They are read when a text is continued. In the pass before, an accelerator would wait for them, also in training,
    where few passes are continued.
    """

    def __init__(self, operator):
        super().__init__(operator, None, operator.refill_phase)

    def settled(self) -> FilterRecurrence:
        return FilterRecurrence(self.operator, self.operator.effective_length(), self.operator.refill_phase)

    def is_early(self, prompt) -> bool:
        at_once = is_on_host(prompt.v) or (prompt.length > LONG_PROMPT and not prompt.v.is_meta)
        return at_once and self.settled().is_early(prompt)

    def start(self, state, prompt):
        state.recurrence = self.settled()
        state.recurrence.start(state, prompt)


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
        self.given_decay = None if config.learnable_decay else config.decay

    def channel_parameters(self) -> dict[str, int]:
        return {"rpe.out.linear.weight": 1, "rpe.out.linear.bias": 1, "decay_logit": 1}

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

    def kernel_length(self) -> int | None:
        return self._taps_until(self.given_decay)

    def effective_length(self) -> int | None:
        return self._taps_until(self._slowest_rate())

    def recurrence(self) -> FilterRecurrence:
        if self.decay_logit is None:
            return super().recurrence()
        self.require_causal()
        return LateRecurrence(self)

    def slowest_decay(self) -> float | None:
        # A kernel that ends at a window has no decay in the sense of this method.
        return None if self.window is not None else self._slowest_rate()

    def _taps_until(self, decay: float | None) -> int | None:
        taps = None if decay is None else taps_above(decay, torch.finfo(self.rpe.dtype).eps)
        return taps if self.window is None else min(self.window, taps or self.window)

    def _slowest_rate(self) -> float | None:
        if self.decay_logit is None or self.decay_logit.is_meta:  # without values, the lower bound of the rates
            return self.decay
        return self._decay_rate(self.rpe.dtype).max().item()

    def _decay_rate(self, dtype: torch.dtype) -> torch.Tensor | float:
        if self.decay_logit is None:
            return self.decay
        return self.decay + (1 - self.decay) * torch.sigmoid(self.decay_logit.to(dtype))[:, None]  # (D, 1)
