"""A layer of S4: the kernel of a diagonal plus low-rank state-space model, by a Cauchy product.

    x'(s) = (diag(lambda) - p p*) x(s) + b u(s),    y(s) = c x(s)                                             (1)
    K_f = (1 + i tan(w / 2)) (k_cb - k_cp k_pb / (1 + k_pp)),    w = 2 pi f / L                               (2)
    k_vu = sum_n v_n u_n / (i tau - lambda_n),    tau = (2 / Delta) tan(w / 2)                                (3)

B batch, L length, D channels, N states, Q = N / 2 modes (each stands for itself and its conjugate), F frequencies, R
rows. (2) is the Fourier transform of the first L taps, where Tustin's rule with the step Delta makes (1) discrete. The
products with p on the left take its conjugate. What is learned is not c but c (1 - A^L), with the discrete matrix A.
(Gu, Goel and Ré, "Efficiently Modeling Long Sequences with Structured State Spaces", 2022, algorithm 1.)

A pair of conjugate terms of (3) is real but for i tau:

    (2 Re(v u) i tau - 2 Re(v u conj(lambda))) / (|lambda|^2 - tau^2 - 2 i tau Re(lambda))                    (4)

A peer of the operators of this package in benchmarks.
"""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from modeling_tnn.toeplitz import causal_toeplitz_matmul

# So many entries of the matrices of (4) exist at once, in the backward pass as in the forward one.
ENTRIES = 2**20


def cauchy_sums(products: torch.Tensor, poles: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """Equation (3) by (4), for R rows of products v u.

    Args:
        products: complex `(D, Q, R)`.
        poles: complex `(D, Q)`.
        tau: `(D, F)`.

    Returns:
        Complex `(D, F, R)`.
    """
    weights = 2 * torch.cat([products.real, -(products * poles.conj()[..., None]).real], dim=-1)  # (D, Q, 2R)
    real = poles.abs().square()[:, None] - tau.square()[..., None]  # (D, F, Q), as the next two
    imag = -2 * tau[..., None] * poles.real[:, None]
    inverse = (real.square() + imag.square()).reciprocal()
    of_real, of_imag = (real * inverse) @ weights, (-imag * inverse) @ weights  # (D, F, 2R)
    (turned, straight), (turned_imag, straight_imag) = of_real.chunk(2, dim=-1), of_imag.chunk(2, dim=-1)
    tau = tau[..., None]
    return torch.complex(straight - tau * turned_imag, straight_imag + tau * turned)


def taps_of(poles, low_rank, input_weights, output_weights, step, length: int) -> torch.Tensor:
    """The taps `(D, L)` by (2) and (3).

    Args:
        poles, low_rank, input_weights, output_weights: complex `(D, Q)`.
        step: `(D, 1)`.
    """
    left = torch.stack([output_weights, low_rank.conj()], dim=-1)  # (D, Q, 2)
    right = torch.stack([input_weights, low_rank], dim=-1)  # (D, Q, 2)
    products = (left[..., :, None] * right[..., None, :]).flatten(-2)  # (D, Q, 4): cb, cp, pb, pp
    # Without w = pi, where the tangent has no value.
    angle = torch.arange((length + 1) // 2, dtype=step.dtype, device=step.device) * (math.pi / length)  # w / 2, (F,)
    tau = 2 / step * angle.tan()  # (D, F)
    rows = max(1, ENTRIES // poles.numel())
    parts = [checkpoint(cauchy_sums, products, poles, part, use_reentrant=False) for part in tau.split(rows, dim=1)]
    cb, cp, pb, pp = torch.cat(parts, dim=1).unbind(-1)  # (D, F) each
    response = torch.complex(torch.ones_like(angle), angle.tan()) * (cb - cp * pb / (1 + pp))
    if length % 2 == 0:
        last = step * products[..., 0].real.sum(-1, keepdim=True)  # the limit of (2)
        response = torch.cat([response, last.to(response.dtype)], dim=-1)
    return torch.fft.irfft(response, n=length)


def legendre_parts(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The poles, p and b of HiPPO-LegS in the eigenvectors of its normal part, complex `(N / 2,)` each."""
    root = (torch.arange(size, dtype=torch.float64) + 0.5).sqrt()  # p
    below = torch.tril(torch.outer(root, root), diagonal=-1)  # (N, N)
    frequencies, vectors = torch.linalg.eigh(1j * (below - below.T))  # ascending; they come in pairs +-
    half = vectors[:, size // 2 :].conj().T
    low_rank = half @ root.to(half)
    return torch.complex(torch.full_like(root, -0.5), frequencies)[size // 2 :], low_rank, math.sqrt(2) * low_rank


class S4Layer(nn.Module):
    """S4 with the start of HiPPO-LegS: all parts of (1) are learned, each channel has its own."""

    def __init__(self, channels: int, state_size: int):
        super().__init__()
        poles, low_rank, inputs = (part.to(torch.complex64).repeat(channels, 1) for part in legendre_parts(state_size))
        self.log_real = nn.Parameter((-poles.real).log())
        self.imag = nn.Parameter(poles.imag.clone())
        self.low_rank, self.input_weights = nn.Parameter(low_rank), nn.Parameter(inputs)
        self.output_weights = nn.Parameter(torch.randn_like(inputs))
        self.log_step = nn.Parameter(torch.empty(channels, 1).uniform_(math.log(0.001), math.log(0.1)))
        self.direct = nn.Parameter(torch.randn(channels))

    def coefficients(self, length: int) -> torch.Tensor:
        """The taps `(D, L)` without the direct term."""
        poles = torch.complex(-self.log_real.exp(), self.imag)
        step = self.log_step.exp()
        return taps_of(poles, self.low_rank, self.input_weights, self.output_weights, step, length)

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        """`(B, L, D)` to `(B, L, D)`."""
        return causal_toeplitz_matmul(v, self.coefficients(v.shape[1])) + self.direct * v
