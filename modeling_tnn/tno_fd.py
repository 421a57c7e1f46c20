"""Compute Toeplitz coefficients from an MLP of the frequency ("SKI to go Faster": FD-TNO).

    bidirectional   t = irfft(re + i im),  re, im = MLP(omega); im is 0 at omega = 0 and pi, as for any real t
    causal          r = irfft(MLP(omega)) is even in the lag; t_0 = r_0, t_k = 2 r_k for 0 < k < R, 0 beyond

D channels, L length, R = `fd_resolution` taps on each side, frequencies omega_m = pi m / R, m = 0 .. R, transform
length 2R. `fd_input="cos"` gives cos(omega) to the MLP, which makes the response smooth where the spectrum repeats, as
the decay theorems of the paper assume.

The causal window doubles positive lags and drops negative ones. The result is the filter whose response has the MLP as
its real part and the Hilbert transform of the MLP as its imaginary part. The lag R stands for both signs, so it is
dropped. The grid does not depend on the length of the input, so that a prefix has the same coefficients in any
sequence. (That of the released code grows with the sequence.)
"""

import math

import torch

from .numerics import is_exported, is_exported_to_onnx
from .position_encoder import RelativePositionEncoder
from .tno import ToeplitzOperator
from .toeplitz import Pair, fit_lags, fit_taps, inverse_matrix_transform
from .toeplitz_fused import complex_response


class FdOperator(ToeplitzOperator):
    """The frequency-domain operator, FD-TNO."""

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        parts = 1 if self.causal else 2  # the real and the imaginary part
        self.rpe = RelativePositionEncoder(config, parts * self.channels, config.fd_act)
        self.channel_parameters = {"rpe.out.linear.weight": parts, "rpe.out.linear.bias": parts}
        self.resolution = config.fd_resolution
        self.cos_input = config.fd_input == "cos"

    def features(self, device: torch.device | None) -> torch.Tensor:
        """The features `(R + 1, w)` of the MLP at all frequencies, of which it sees omega or cos(omega)."""
        device = device or self.rpe.in_proj.weight.device
        index = torch.arange(self.resolution + 1, device=device, dtype=self.rpe.dtype)
        omega = index * (math.pi / self.resolution)  # (R+1,)
        return self.rpe.features(omega.cos() if self.cos_input else omega)

    def response_parts(self, device: torch.device | None = None) -> torch.Tensor:
        """Real and imaginary part of the response, `(2, D, R + 1)`; if causal, its real part, `(D, R + 1)`."""
        features = self.features(device)
        values = self.rpe.emit(features, torch.ones_like(features[:, 0]))  # (2D, R+1) or (D, R+1)
        return values if self.causal else values.unflatten(0, (2, self.channels))

    def response(self, length: int, device: torch.device | None = None) -> torch.Tensor | None:
        # Up to R positions the response is exact, and saves a transform. At 3R / 4 and fewer, the shorter transforms
        # that taps need outweigh this (measured).
        if self.causal or is_exported() or not 3 * self.resolution < 4 * length <= 4 * self.resolution:
            return None
        return self.response_parts(device)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        # Transform and window act on the w features of the MLP, before its D outputs. The real part of the response
        # gives the even part of the taps, the imaginary part the odd one.
        reach = self.resolution if is_exported() else min(length, self.resolution)  # K lags, 0 .. K-1
        features = self.features(device).t()  # (w, R+1)
        even = self._inverse(Pair(features, torch.zeros_like(features)), reach)  # (w, K)
        impulse = torch.zeros_like(even[0])  # (K,), the transform of a constant
        impulse[0] = 1
        if self.causal:
            even = torch.cat([even[:, :1], 2 * even[:, 1:]], dim=1)
            return fit_taps(self.rpe.emit(even.t(), impulse), length)
        odd = torch.cat([features, torch.ones_like(features[:1])])  # (w+1, R+1), with a constant
        odd = self._inverse(Pair(torch.zeros_like(odd), odd), reach)  # (w+1, K)
        even, odd = self.rpe.emit(torch.stack([even, odd[:-1]]).mT, torch.stack([impulse, odd[-1]]))  # (D, K) each
        return fit_lags(torch.cat([(even - odd)[:, 1:].flip(1), even + odd], dim=1), length)

    def _inverse(self, response: Pair, reach: int) -> torch.Tensor:
        """The first `reach` taps `(M, K)` of a response `(M, R + 1)`."""
        size = 2 * self.resolution
        if is_exported_to_onnx():
            return inverse_matrix_transform(response, size, 0, reach)
        return torch.fft.irfft(complex_response(response), n=size)[:, :reach]

    def kernel_length(self, exact: bool = False) -> int:
        return self.resolution
