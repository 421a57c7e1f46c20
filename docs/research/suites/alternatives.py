"""Products that the library leaves out, beside those that it has, forward and backward.

    causal-ski       y_i = sum_{j <= i} (W A W^T)_ij v_j, the low-rank part of SKI under a causal mask
        prefix       y_i = (W A)_i . s_i,  s_i = sum_{j <= i} W_j v_j: linear attention of K features (SKI 3.3.1)
        intervals    W_j has two weights, so s_i need not be kept: a causal product of the K points of whole intervals,
                     and prefix sums of two numbers inside an interval
        filter       a causal product with as many taps as positions, as rpe and fd have
    split            the product with a Toeplitz matrix without padding to twice the length (Siron and Molesky, 2024)
        split        T = C + S, circulant and skew-circulant, with (t_k + t_{k-L}) / 2 and (t_k - t_{k-L}) / 2
        fused        the product of the library, which pads

B batch, L length, D channels, K inducing points h positions apart. All are written with PyTorch's own operations, in
chunks of channels that fit into the processor's cache (but `prefix`, which fits in no cache).
"""

import math
import statistics
from collections.abc import Callable

import torch
from suites.memory import saved_bytes

from modeling_tnn.tno_ski import InducingGrid
from modeling_tnn.toeplitz import causal_toeplitz_matmul, toeplitz_matmul
from modeling_tnn.toeplitz_fused import Windows, chunks
from tnn_scripts.benchmarks.measure import markdown, measure, ratio

SUBJECTS = {"causal-ski": ("filter", "prefix", "intervals"), "split": ("fused", "split")}
FORMATS = {"subject": "", "length": "", "way": "", "milliseconds": ".1f", "over_base": ".2f", "saved_mebibytes": ".1f"}


def causal_by_prefix_sums(v: torch.Tensor, taps: torch.Tensor, grid: InducingGrid) -> torch.Tensor:
    """The causal product of W A W^T with `v` `(D, B, L)` by prefix sums of K features of each channel.

    Args:
        taps: coefficients of A, `(D, 2K - 1)`.
    """
    weights = grid.matrix(v)  # (L, K)
    index = torch.arange(grid.num_points)
    middle = taps[:, index[:, None] - index + grid.num_points - 1]  # (D, K, K)
    sums = (weights * v[..., None]).cumsum(dim=2)  # (D, B, L, K)
    return torch.einsum("dlk,dblk->dbl", weights @ middle, sums)


def causal_by_intervals(v: torch.Tensor, taps: torch.Tensor, grid: InducingGrid) -> torch.Tensor:
    """The same, for points at a whole distance: intervals of h positions between two points.

    Interval a has the points a and a + 1, with the weights 1 - p / h and p / h at its position p.
    """
    step, length = grid.steps // grid.intervals, v.shape[2]
    count = -(-length // step)  # intervals
    x = torch.nn.functional.pad(v, (0, count * step - length)).unflatten(2, (count, step))  # (D, B, N, h)
    right = torch.arange(step, dtype=v.dtype) / step  # (h,)
    weights = torch.stack([1 - right, right])  # (2, h)
    middle = taps.shape[1] // 2  # lag 0
    # Inside an interval: the four entries of A between its two points, and prefix sums of two numbers.
    sums = (x[..., None, :] * weights).cumsum(dim=-1)  # (D, B, N, 2, h)
    lags = taps[:, [middle, middle - 1, middle + 1, middle]].view(-1, 2, 2)  # (D, 2, 2)
    y = torch.einsum("ph,dpq,dbnqh->dbnh", weights, lags, sums)
    # Of whole intervals before: point a of interval b is at lag a - b, and b + 1 at a - b - 1.
    ends = sums[..., -1]  # (D, B, N, 2)
    far = 0
    for side in (0, 1):
        for own in (0, 1):
            first = middle + 1 + own - side  # the lag from the interval before
            kernel = torch.nn.functional.pad(taps[:, first : first + count - 1], (1, 0))  # (D, N)
            given = ends[..., side].permute(1, 2, 0)  # (B, N, D)
            points = causal_toeplitz_matmul(given, kernel).permute(2, 0, 1)  # (D, B, N)
            far = far + points[..., None] * weights[own]
    return (y + far).flatten(2)[..., :length]


class SplitProduct(torch.autograd.Function):
    """The product of `v` `(D, B, L)`, L even, with `coefficients` `(D, 2L - 1)` by transforms of length L.

    c = (t_k + t_{k-L}) / 2 and s = (t_k - t_{k-L}) / 2 for k = 0 .. L-1, with t_{-L} = 0. A skew-circulant product of
    real numbers is a circulant one of L / 2 complex numbers z_j = (x_j + i x_{j+L/2}) e^{i pi j / L}.
    """

    @staticmethod
    def forward(ctx, v: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(v, coefficients)
        length, y = v.shape[2], torch.empty_like(v)
        turn = twist(length, v)
        for chosen in chunks(v, Windows(length, length)):
            even, odd = halves(coefficients[chosen], length)
            spectrum = torch.fft.rfft(v[chosen]) * torch.fft.rfft(even)[:, None]
            skew = torch.fft.fft(folded(v[chosen], turn)) * torch.fft.fft(folded(odd, turn))[:, None]
            y[chosen] = torch.fft.irfft(spectrum, n=length) + unfolded(torch.fft.ifft(skew), turn)
        return y

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        v, coefficients = ctx.saved_tensors
        length = v.shape[2]
        v_gradient, t_gradient, turn = torch.empty_like(v), torch.empty_like(coefficients), twist(length, v)
        for chosen in chunks(v, Windows(length, length)):
            even, odd = halves(coefficients[chosen], length)
            g, g_skew = torch.fft.rfft(gradient[chosen]), torch.fft.fft(folded(gradient[chosen], turn))
            x, x_skew = torch.fft.rfft(v[chosen]), torch.fft.fft(folded(v[chosen], turn))
            back = torch.fft.irfft(g * torch.fft.rfft(even)[:, None].conj(), n=length)
            skew = torch.fft.ifft(g_skew * torch.fft.fft(folded(odd, turn))[:, None].conj())
            v_gradient[chosen] = back + unfolded(skew, turn)
            c = torch.fft.irfft((x.conj() * g).sum(1), n=length)  # (C, L)
            s = unfolded(torch.fft.ifft((x_skew.conj() * g_skew).sum(1)), turn)
            t_gradient[chosen, length - 1 :] = (c + s) / 2
            t_gradient[chosen, : length - 1] = ((c - s) / 2)[:, 1:]
        return v_gradient, t_gradient


def halves(coefficients: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first columns of the circulant and the skew-circulant matrix, `(C, L)` each."""
    later = coefficients[:, length - 1 :]  # t_0 .. t_{L-1}
    earlier = torch.nn.functional.pad(coefficients[:, : length - 1], (1, 0))  # 0, t_{1-L} .. t_{-1}
    return (later + earlier) / 2, (later - earlier) / 2


def twist(length: int, like: torch.Tensor) -> torch.Tensor:
    """e^{i pi j / L} for j = 0 .. L/2 - 1."""
    angle = torch.arange(length // 2, dtype=torch.float64) * (math.pi / length)
    return torch.polar(torch.ones_like(angle), angle).to(torch.promote_types(like.dtype, torch.complex64))


def folded(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """z `(.., L/2)` of `x` `(.., L)`."""
    first, second = x.chunk(2, dim=-1)
    return torch.complex(first, second) * turn


def unfolded(z: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    z = z * turn.conj()
    return torch.cat([z.real, z.imag], dim=-1)


def causal_ski_ways(args, length: int) -> dict[str, tuple[Callable, list[torch.Tensor]]]:
    points = min(args.rank, length // 2)
    grid = InducingGrid(length, 1, length // points)
    v = torch.randn(args.channels, args.batch_size, length)
    taps, kernel = torch.randn(args.channels, 2 * grid.num_points - 1), torch.randn(args.channels, length)

    def filtered(v, kernel):
        return causal_toeplitz_matmul(v.permute(1, 2, 0), kernel).permute(2, 0, 1)

    return {
        "filter": (filtered, [v, kernel]),
        "prefix": (lambda v, taps: causal_by_prefix_sums(v, taps, grid), [v, taps]),
        "intervals": (lambda v, taps: causal_by_intervals(v, taps, grid), [v, taps]),
    }


def split_ways(args, length: int) -> dict[str, tuple[Callable, list[torch.Tensor]]]:
    v, taps = torch.randn(args.channels, args.batch_size, length), torch.randn(args.channels, 2 * length - 1)

    def padded(v, taps):
        return toeplitz_matmul(v.permute(1, 2, 0), taps).permute(2, 0, 1)

    return {"fused": (padded, [v, taps]), "split": (SplitProduct.apply, [v, taps])}


WAYS = {"causal-ski": causal_ski_ways, "split": split_ways}


def run(args) -> list[dict]:
    """One row for each subject, length and way: milliseconds, time over the first way, and MiB kept for backward."""
    rows = []
    for subject in args.subjects:
        for length in args.lengths:
            torch.manual_seed(0)
            ways = WAYS[subject](args, length)
            times = measure({name: passes(*way) for name, way in ways.items()}, args)
            base = SUBJECTS[subject][0]
            for name, (product, given) in ways.items():
                inputs = [one.requires_grad_() for one in given]
                row = {"subject": subject, "length": length, "way": name}
                row |= {"milliseconds": 1000 * statistics.median(times[name])}
                row |= {"over_base": ratio(times[name], times[base])}
                rows.append(row | {"saved_mebibytes": saved_bytes(lambda p=product, x=inputs: p(*x)) / 2**20})
    return rows


def passes(product: Callable, given: list[torch.Tensor]) -> Callable[[], None]:
    """A forward and a backward pass."""
    inputs = [one.requires_grad_() for one in given]
    gradient = torch.randn_like(inputs[0])
    return lambda: product(*inputs).backward(gradient, inputs=inputs)


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    return markdown(rows, FORMATS)
