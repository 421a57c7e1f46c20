"""Compute Toeplitz coefficients from an MLP of the lag, or take them as parameters, with an exponential decay.

    t_k = lambda^|k| RPE(k),      k = -(L-1) .. L-1   (causal: k = 0 .. L-1)                                 (1)
    t_k = lambda^|k| theta_k,     |k| < P, and 0 beyond                                                      (2)

D channels, L length, M positions, w = rpe_dim. lambda is `decay` for all channels (1 if there is none) or, with
`learnable_decay`, one number per channel: lambda_c = decay + (1 - decay) sigmoid(theta_c). The coefficient of a lag
does not depend on L.

(1) is the operator of the TNN paper. With `rpe_window` W, t_k = 0 for |k| >= W. RPE is the position encoder. Its input
for a lag k (TNN paper, table 8; `rpe_input`) is k itself, k / P with P = `rpe_input_length` ("normalized"), or the
sines and cosines of k at w/2 rates. (2) is the baseline of the RPE (TNN paper, table 9), with P = `explicit_length`.
"""

import math

import torch
from torch import nn
from transformers import initialization as init

from .numerics import compute_dtype, is_exported, is_on_host
from .position_encoder import CastingLinear, RelativePositionEncoder, sinusoidal_embedding
from .recurrence import LONG_PROMPT, DecodingState, FilterRecurrence, Prompt
from .tno import ToeplitzOperator, require_causal
from .toeplitz import fit_lags, fit_taps

# The share of the sum of all |taps| that products in half precision leave out: a sixteenth of a rounding of bfloat16.
NEGLIGIBLE = 2**-12


# From lags `(M, 1)`, P and w to what the encoder reads, `(M, 1)` or `(M, w)`.
RPE_INPUTS = {
    "lag": lambda lags, longest, size: lags,
    "normalized": lambda lags, longest, size: lags / longest,
    "sinusoidal": lambda lags, longest, size: sinusoidal_embedding(lags.t(), size, lags.dtype)[0],
}


class LagInput(CastingLinear):
    """The input projection of a lag."""

    def __init__(self, config):
        super().__init__(config.rpe_dim if config.rpe_input == "sinusoidal" else 1, config.rpe_dim)
        self.kind, self.longest = config.rpe_input, config.rpe_input_length

    def forward(self, lags: torch.Tensor) -> torch.Tensor:
        """`(M, 1)` to `(M, w)`."""
        return super().forward(RPE_INPUTS[self.kind](lags, self.longest, len(self.weight)))


def fading(decay: float | None, lags: torch.Tensor) -> torch.Tensor:
    """decay^|k| at the lags k `(M,)`, not as a power of the decay, which would be rounded: 1% at a million lags."""
    return torch.exp(lags.abs() * (0.0 if decay is None else math.log(decay)))


def taps_above(decay: float | None, share: float) -> int | None:
    """The number of taps decay^k, ln(share) / ln(decay), beyond which others hold less than `share` of their sum."""
    if decay is None or decay >= 1:
        return None
    return max(1, math.ceil(math.log(share) / math.log(decay)))


class LateRecurrence(FilterRecurrence):
    """Decode a kernel whose number of taps follows from parameters, which are read when a sequence is continued."""

    def resolve(self) -> "LateRecurrence":
        """The recurrence with its number of taps."""
        taps = self.operator.kernel_length(exact=True)  # a device sync: not in each pass, of which few are continued
        FilterRecurrence.__init__(self, self.operator, taps, self.operator.refill_phase)
        return self

    def builds_state_in_prefill(self, prompt: Prompt) -> bool:
        at_once = is_on_host(prompt.v) or (prompt.length > LONG_PROMPT and not prompt.v.is_meta)
        return at_once and FilterRecurrence.builds_state_in_prefill(self.resolve(), prompt)

    def prefill(self, state: DecodingState, prompt: Prompt):
        FilterRecurrence.prefill(self.resolve(), state, prompt)


class RpeOperator(ToeplitzOperator):
    """The operator of the TNN paper, equation (1)."""

    channel_parameters = {"rpe.out.linear.weight": 1, "rpe.out.linear.bias": 1, "decay_logit": 1}

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.rpe = RelativePositionEncoder(config, self.channels, config.rpe_act, LagInput(config))
        self.decay, self.window = config.decay, config.rpe_window
        self.decay_logit = nn.Parameter(torch.empty(self.channels)) if config.learnable_decay else None
        self.half_lags = None if config.learnable_decay else taps_above(config.decay, NEGLIGIBLE)

    def reset_parameters(self):
        if self.decay_logit is not None:
            init.normal_(self.decay_logit)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        ends = self.window is not None and (is_exported() or length > self.window)
        reach = self.window if ends else length
        first = 0 if self.causal else 1 - reach
        device = device or self.rpe.in_proj.weight.device
        lags = torch.arange(first, reach, device=device, dtype=self.rpe.dtype)  # (M,)
        features = self.rpe.features(lags)  # (M, w)
        if self.decay_logit is None:
            weights = fading(self.decay, lags)  # (M,)
            kernel = self.rpe.emit(features * weights[:, None], weights)  # (D, M)
        else:
            kernel = self.rpe.emit(features, torch.ones_like(lags))  # (D, M)
            lost = (1 - self.decay) * torch.sigmoid(-self.decay_logit.to(lags.dtype))[:, None]  # (D, 1), 1 - lambda
            kernel = kernel * torch.exp(torch.log1p(-lost) * lags.abs())
        return (fit_taps if self.causal else fit_lags)(kernel, length) if ends else kernel

    def kernel_length(self, exact: bool = False) -> int | None:
        known = exact or self.decay_logit is None
        taps = taps_above(self.slowest_decay(), torch.finfo(self.rpe.dtype).eps) if known else None
        return taps if self.window is None else min(self.window, taps or self.window)

    def recurrence(self) -> FilterRecurrence:
        if self.decay_logit is None:
            return super().recurrence()
        require_causal(self)
        return LateRecurrence(self, None, self.refill_phase)

    def slowest_decay(self) -> float | None:
        """The largest lambda of all channels, or None without a decay."""
        if self.decay_logit is None or self.decay_logit.is_meta:  # without values, the lower bound of the rates
            return self.decay
        rates = self.decay + (1 - self.decay) * torch.sigmoid(self.decay_logit.to(self.rpe.dtype))  # (D,)
        return rates.max().item()


class ExplicitOperator(ToeplitzOperator):
    """The operator with explicit coefficients, equation (2)."""

    channel_parameters = {"taps": 1}

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.longest, self.decay = config.explicit_length, config.decay
        self.half_lags = taps_above(config.decay, NEGLIGIBLE)
        count = self.longest if self.causal else 2 * self.longest - 1
        self.taps = nn.Parameter(torch.empty(self.channels, count))

    def reset_parameters(self):
        init.normal_(self.taps, std=self.longest**-0.5)
        if self.slow_start:
            first = 0 if self.causal else 1 - self.longest
            lags = torch.arange(first, self.longest, device=self.taps.device).abs()
            init.copy_(self.taps, torch.exp(-lags / self.time_constants(self.channels).to(lags.device)[:, None]))

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        dtype = compute_dtype(self.taps.dtype)
        first = 0 if self.causal else 1 - self.longest
        lags = torch.arange(first, self.longest, device=device or self.taps.device, dtype=dtype)
        taps = self.taps.to(device, dtype) * fading(self.decay, lags)  # (D, P) or (D, 2P-1)
        return (fit_taps if self.causal else fit_lags)(taps, length)

    def kernel_length(self, exact: bool = False) -> int:
        return self.longest
