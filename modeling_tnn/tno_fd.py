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
        # If the grid has the transform length that the product needs anyway, the response is used directly.
        if self.causal or is_exported() or not self.resolution < 2 * length <= 2 * self.resolution:
            return None
        return self.response_parts(device)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        if self.causal:  # transform and window act on the w features of the MLP, before its D outputs
            taps = self._inverse(self.features(device).t())[:, : self.resolution]  # (w, R)
            taps = torch.cat([taps[:, :1], 2 * taps[:, 1:]], dim=1)
            impulse = torch.zeros_like(taps[0])  # (R,), the transform of a constant
            impulse[0] = 1
            return fit_taps(self.rpe.emit(taps.t(), impulse), length)
        taps = self._inverse(self.response_parts(device))  # (D, 2R), lags 0..R, -(R-1)..-1
        positive, negative = taps[:, : self.resolution], taps[:, self.resolution + 1 :]  # (D, R), (D, R-1)
        return fit_lags(torch.cat([negative, positive], dim=1), length)

    def _inverse(self, response: torch.Tensor) -> torch.Tensor:
        """The taps `(M, 2R)` of a response: real `(M, R + 1)`, or its real and imaginary parts `(2, M, R + 1)`."""
        size = 2 * self.resolution
        if is_exported_to_onnx():
            real, imag = response if response.dim() == 3 else (response, torch.zeros_like(response))
            return inverse_matrix_transform(Pair(real, imag), size, 0, size)
        return torch.fft.irfft(complex_response(response) if response.dim() == 3 else response, n=size)

    def kernel_length(self, exact: bool = False) -> int:
        return self.resolution
