"""Rational transfer functions, their taps and their recurrences. No parameters here.

    H(z) = h_0 + (b_1 z^-1 + .. + b_N z^-N) / (1 + a_1 z^-1 + .. + a_N z^-N)                                 (1)

D filters, Q denominators (D, or fewer shared by groups of D/Q consecutive filters), N order, L length, F transform
length. RTF paper, sections 3.1 to 3.3.

Sampling (1) at the F-th roots of unity and transforming back yields F taps k whose tails have wrapped around: tap t
is the sum of the impulse response at t, t + F, t + 2F, ... Training fits those taps. The filter with exactly these
taps and no wrapping has the same denominator; its numerator c follows from K(z) a(z) = c(z), read at z^-1 .. z^-N:

    c_i = k_i + a_1 k_{i-1} + .. + a_{i-1} k_1                                                              (2)

which is the c of b = c (I - A^F), A the companion matrix (paper, equation 13), without forming A^F. Since lag F folds
onto lag 0, its direct term is the tap k_0, not h_0. Beyond F the taps are

    k_t = sum_{i=1}^{N} c_i g_{t-i},    g the power series of 1/a(z)                                        (3)

a(z) has all its roots inside the unit circle if and only if every reflection coefficient r_n of the step-down
recursion (Schur 1917, Cohn 1922) is below 1 in magnitude:

    r_n = a_n,    a_i <- (a_i - r_n a_{n-i}) / (1 - r_n^2),  i = 1 .. n-1,    for n = N .. 1                  (4)

It is so if

    |a_1| + .. + |a_N| < 1,                                                                                  (5)

because a(z) is not 0 on the circle or outside it then. With a_i / r^i in place of a_i, both are for the circle of
radius r.
"""

import torch

from .fourier import exported_quotient
from .gating import differentiable_gradients, must_differentiate
from .numerics import is_exported, is_exported_to_onnx, is_on_host, next_fast_len
from .toeplitz import dense_toeplitz, fit_taps, two_sided
from .toeplitz_fused import CHUNK

# Numbers in a chunk of filters on devices other than the CPU.
LARGE_CHUNK = 2**25


def rational_kernel(denominator: torch.Tensor, numerator: torch.Tensor, size: int) -> torch.Tensor:
    """The taps of (1) without h_0, from samples at `size` points.

    Args:
        denominator: `(Q, N)`, a_1 .. a_N.
        numerator: `(D, N)`, b_1 .. b_N.
        size: even transform length F, above N.

    Returns:
        `(D, F)`.
    """
    if is_exported_to_onnx():
        return exported_quotient(delayed(numerator), per_filter(monic(denominator), len(numerator)), size, size)
    below = monic(denominator)  # (Q, N+1)
    # Exporters that transform in the runtime cannot repeat complex numbers.
    below = torch.fft.rfft(per_filter(below, len(numerator)) if is_exported() else below, n=size)  # (Q or D, F/2+1)
    above = torch.fft.rfft(delayed(numerator), n=size)  # (D, F/2+1)
    return torch.fft.irfft(above / per_filter(below, len(numerator)), n=size)


class RationalTaps(torch.autograd.Function):
    """The first L <= F taps of (1), h_0 included, for a few filters at a time. Only the inputs are saved.

    With A and B the transforms of denominator and numerator, k = irfft(B / A), and for a gradient g of the taps

        gradient of b = irfft(rfft(g) conj(1 / A)),    gradient of a = -irfft(rfft(g) conj(B / A^2))

    both at 1 .. N. So time and memory do not depend on the order, apart from the parameters. It computes in the dtype
    `work`. For higher derivatives, autograd computes the gradients from `rational_kernel`.
    """

    @staticmethod
    def forward(ctx, denominator, numerator, direct, size: int, length: int, work: torch.dtype) -> torch.Tensor:
        """`(Q, N)`, `(D, N)` and `(D,)` to `(D, L)` in the dtype of `numerator`, but at least float32."""
        ctx.save_for_backward(denominator, numerator)
        ctx.size, ctx.work = size, work
        taps = numerator.new_empty(len(numerator), length, dtype=torch.promote_types(numerator.dtype, torch.float32))
        for chosen in filter_chunks(numerator, size):
            below, above = spectra(denominator, numerator, chosen, size, work)  # (C, F/2+1) each
            taps[chosen] = torch.fft.irfft(above.div_(below), n=size)[:, :length]
        taps[:, 0] += direct
        return taps

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        denominator, numerator = ctx.saved_tensors
        order, group = numerator.shape[1], len(numerator) // len(denominator)
        size, work = ctx.size, ctx.work
        if must_differentiate(gradient):

            def taps(a, b):
                return rational_kernel(a.to(work), b.to(work), size)[:, : gradient.shape[1]].to(gradient.dtype)

            found = differentiable_gradients(taps, (denominator, numerator), ctx.needs_input_grad, gradient)
            return *found, gradient[:, 0], None, None, None
        a_gradient, b_gradient = torch.zeros_like(denominator, dtype=work), torch.empty_like(numerator)
        for chosen in filter_chunks(numerator, size):
            below, above = spectra(denominator, numerator, chosen, size, work)  # (C, F/2+1) each
            g = torch.fft.rfft(gradient[chosen].to(work), n=size).div_(below.conj())  # (C, F/2+1)
            b_gradient[chosen] = torch.fft.irfft(g, n=size)[:, 1 : order + 1]
            parts = torch.fft.irfft(g.mul_(above.div_(below).conj()), n=size)[:, 1 : order + 1]  # (C, N)
            owner = torch.arange(chosen.start, chosen.stop, device=parts.device) // group
            a_gradient.index_add_(0, owner, parts, alpha=-1)
        return a_gradient.to(denominator.dtype), b_gradient, gradient[:, 0], None, None, None


def filter_chunks(numerator: torch.Tensor, size: int) -> list[slice]:
    """Slices of the filters of `numerator` `(D, N)` that are computed together."""
    filters = len(numerator)
    step = max(1, (CHUNK if is_on_host(numerator) else LARGE_CHUNK) // size)
    return [slice(start, min(start + step, filters)) for start in range(0, filters, step)]


def spectra(denominator: torch.Tensor, numerator: torch.Tensor, chosen: slice, size: int, work: torch.dtype):
    """The transforms of denominator and numerator of some filters, `(C, F/2 + 1)` each."""
    group = len(numerator) // len(denominator)
    first = chosen.start // group
    below = torch.fft.rfft(monic(denominator[first : (chosen.stop - 1) // group + 1].to(work)), n=size)
    if group > 1:
        below = below[torch.arange(chosen.start, chosen.stop, device=below.device) // group - first]
    return below, torch.fft.rfft(delayed(numerator[chosen].to(work)), n=size)


def delayed(numerator: torch.Tensor) -> torch.Tensor:
    """The series 0, b_1 .. b_N: `(D, N)` to `(D, N + 1)`."""
    return torch.cat([torch.zeros_like(numerator[:, :1]), numerator], dim=1)


def companion_matrix(denominator: torch.Tensor) -> torch.Tensor:
    """The companion matrices `(Q, N, N)`, whose eigenvalues are the roots of denominators `(Q, N)`."""
    companion = torch.diag_embed(torch.ones_like(denominator[:, 1:]), offset=-1)
    companion[:, 0] = -denominator
    return companion


def monic(denominator: torch.Tensor) -> torch.Tensor:
    """The series 1, a_1 .. a_N: `(Q, N)` to `(Q, N + 1)`."""
    return torch.cat([torch.ones_like(denominator[:, :1]), denominator], dim=1)


def per_filter(values: torch.Tensor, filters: int) -> torch.Tensor:
    """The values of each filter, `(Q, ...)` to `(D, ...)`: D/Q consecutive filters share a denominator."""
    if filters == len(values):
        return values
    return values.repeat_interleave(filters // len(values), dim=0)


def multiply_series(first: torch.Tensor, second: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` coefficients of the product of two power series, `(D, K)` and `(D, M)` to `(D, length)`."""
    first, second = first[:, :length], second[:, :length]
    size = next_fast_len(first.shape[1] + second.shape[1])
    product = torch.fft.irfft(torch.fft.rfft(first, n=size) * torch.fft.rfft(second, n=size), n=size)
    return torch.nn.functional.pad(product, (0, max(0, length - size)))[:, :length]


def reciprocal_series(denominator: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` coefficients of 1/a(z), `(Q, N)` to `(Q, length)`.

    Newton's iteration g <- g (2 - a g) doubles the number of correct coefficients: O(L log L).
    """
    a, g = monic(denominator), torch.ones_like(denominator[:, :1])
    while g.shape[1] < length:
        known = min(2 * g.shape[1], length)
        residual = -multiply_series(a, g, known)  # (Q, known)
        residual[:, 0] += 2
        g = multiply_series(g, residual, known)
    return g[:, :length]


def recurrence_numerator(denominator: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """The numerator c `(D, N)` of the filter with the taps `(D, F)`, by equation (2). Only taps 1 .. N are read."""
    order = denominator.shape[1]
    below, later = per_filter(monic(denominator), len(taps)), taps[:, 1 : order + 1]
    if is_exported_to_onnx():
        return (dense_toeplitz(two_sided(below[:, :order])) @ later[..., None])[..., 0]
    return multiply_series(below, later, order)


def extend_kernel(denominator: torch.Tensor, taps: torch.Tensor, length: int) -> torch.Tensor:
    """The taps `(D, F)` continued to `(D, length)` by equation (3)."""
    numerator = recurrence_numerator(denominator, taps)
    series = per_filter(reciprocal_series(denominator, length), len(taps))  # (D, L)
    beyond = multiply_series(numerator, series, length - 1)[:, taps.shape[1] - 1 :]  # taps F .. L-1
    return torch.cat([taps, beyond], dim=1)


def kernel_of_any_length(denominator: torch.Tensor, taps: torch.Tensor, length: int) -> torch.Tensor:
    """The taps `(D, F)` cut or continued to `(D, length)` without a branch on the length, for torch.export.

    The taps beyond F are the series of c(z)/a(z). It is sampled at M points like (1), but on a circle of radius
    r > 1: the taps become k_t r^-t, and a tail shrinks by r^M each time it wraps around. With M > 2L and
    r^M = 1 / eps the wrapped tail vanishes. The multiplication by r^t increases rounding errors by at most
    eps^(-1/2), to 1e-8 of the largest tap in float64. The magnitude of poles may be up to r, so that a kernel may grow
    by eps^(-1/2) over the sequence. This is the inversion of generating functions by Abate and Whitt (1992).
    """
    order, count = denominator.shape[1], taps.shape[1]
    size = next_fast_len(2 * length + order)  # M
    position = torch.arange(length, device=taps.device)
    fading = torch.finfo(taps.dtype).eps ** (position.to(taps.dtype) / size)  # (L,): r^-t
    scale = torch.finfo(taps.dtype).eps ** (torch.arange(1, order + 1, device=taps.device, dtype=taps.dtype) / size)
    numerator = recurrence_numerator(denominator, taps)
    below = per_filter(monic(denominator * scale), len(taps))  # (D, N+1)
    beyond = exported_quotient(delayed(numerator * scale), below, size, length) / fading  # (D, L)
    return torch.where(position < count, fit_taps(taps, length), beyond)


def is_stable(denominator: torch.Tensor, radius: float = 1.0) -> torch.Tensor:
    """Whether all roots of each denominator `(Q, N)` lie inside the circle of `radius`, `(Q,)`, in float64.

    By (5) where it holds, which is cheap, and by (4) for the others.
    """
    powers = torch.arange(1, denominator.shape[1] + 1, device=denominator.device, dtype=torch.float64)
    a = denominator.double() / radius**powers  # (Q, N)
    stable = a.abs().sum(dim=1) < 1  # (Q,)
    others = (~stable).nonzero()[:, 0]  # (M,)
    if len(others):
        stable[others] = _step_down(a[others])
    return stable


def _step_down(a: torch.Tensor) -> torch.Tensor:
    """Whether all roots of polynomials `(Q, N)` lie inside the unit circle, `(Q,)`, by (4)."""
    a = a.T.contiguous()  # (N, Q)
    reflections = []
    for n in range(len(a), 0, -1):
        k, rest = a[n - 1], a[: n - 1]  # (Q,), (n-1, Q)
        reflections.append(k)
        a = torch.addcmul(rest, k, rest.flip(0), value=-1).div_(1 - k.square())
    # What is not a number stays so until it is a reflection coefficient itself.
    return (torch.stack(reflections).abs() < 1).all(dim=0)


def spectral_radius(denominator: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a root of each denominator `(Q, N)`, `(Q,)` in float64; infinite if not finite."""
    finite = denominator.isfinite().all(dim=1)
    matrices = companion_matrix(denominator.double().where(finite[:, None], 0.0))  # (Q, N, N)
    radii = torch.linalg.eigvals(matrices).abs().amax(dim=1)
    return radii.where(finite, torch.inf)
