"""Pictures of Toeplitz kernels: each function takes kernels and returns a matplotlib figure.

A lag i - j above 0 looks back, one below 0 ahead. Bands go from the 10th to the 90th
percentile of the channels.
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from tnn_programs.plotting.reading import Kernel, octave_shares

matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.grid": False})
LINE, ACCENT = "#2166ac", "#d6604d"
# Matrices are black below this share of a lag.
FAINTEST = 1e-3
# Rows and columns of a matrix that are drawn at most, and the resolution of the pictures.
MATRIX_SIZE, DPI = 64, 100


def overview(kernels: list[Kernel], title: str) -> Figure:
    """A figure of all layers: the share of weight by distance, and the horizon."""
    found = [octave_shares(kernel) for kernel in kernels]
    names = list(max(found, key=len))  # kernels that end within the drawn lags have no shares beyond
    shares = np.array([[row.get(name, 0.0) for name in names] for row in found])  # (layers, octaves)
    figure = Figure(figsize=(max(9, 6 + 0.62 * len(names)), 1.9 + 0.42 * len(kernels)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[0.62 * len(names), 3.5], sharey=True)
    left.imshow(shares, aspect="auto", cmap="Blues", vmin=0, vmax=shares.max())
    for (row, column), share in np.ndenumerate(shares):
        colour = "white" if share > 0.6 * shares.max() else "black"
        left.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=colour)
    left.set_xticks(range(len(names)), names, rotation=45, ha="right")
    left.set_yticks(range(len(kernels)), [kernel.label for kernel in kernels])
    left.set_xlabel("positions back" if kernels[0].causal else "positions ahead and back")
    left.set_title("share of the weight at each distance, in % (mean of the channels)")
    _horizon_ranges(right, kernels)
    figure.suptitle(title)
    return figure


def _horizon_ranges(axes: Axes, kernels: list[Kernel]):
    for row, kernel in enumerate(kernels):
        low, median, high = (kernel.horizon_percentile(percent)[0] for percent in (10, 50, 90))
        axes.plot([low, high], [row, row], color=LINE, linewidth=4, alpha=0.4, solid_capstyle="round")
        axes.plot(median, row, "o", color=LINE)
        axes.annotate(kernel.horizon_text(50), (median, row), xytext=(0, 6), textcoords="offset points", ha="center")
    longest = int(max(max(np.abs(kernel.lags).max(), kernel.horizons.max()) for kernel in kernels))
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks([0] + [2**power for power in range(0, longest.bit_length(), 2)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel="distance in positions", xlim=(-0.3, longest * 1.3), ylim=(len(kernels) - 0.5, -0.5))
    axes.set_title("horizon: 90% of the weight is nearer\n(median channel, 10th\N{EN DASH}90th percentile)")
    axes.grid(axis="x", alpha=0.3)


def layer(kernel: Kernel) -> Figure:
    """A figure of one layer in three panels, and a fourth of its poles if it has some."""
    panels = [_matrix, _coefficients, _response, *([] if kernel.poles is None else [_poles])]
    figure = Figure(figsize=(8.5, 7.6), layout="constrained")
    for number, panel in enumerate(panels, 1):
        panel(figure.add_subplot(2, 2, number), kernel)
    low, median, high = (kernel.horizon_text(percent) for percent in (10, 50, 90))
    figure.suptitle(
        f"{kernel.label}: half of the channels have 90% of their weight within {median} positions\n"
        f"(10th\N{EN DASH}90th percentile: {low}\N{EN DASH}{high})"
    )
    return figure


def save_all(kernels: list[Kernel], title: str, folder: Path) -> dict[str, Path]:
    """Save the figures of all layers (`overview.png`) and of each; the files by what they show."""
    drawn, files = {"overview": overview(kernels, title)} | {one.label: layer(one) for one in kernels}, {}
    for label, figure in drawn.items():
        files[label] = folder / f"{label.replace(' ', '-')}.png"
        figure.savefig(files[label], dpi=DPI)
    return files


def _matrix(axes: Axes, kernel: Kernel):
    positions = np.arange(min(MATRIX_SIZE, kernel.lags[-1] + 1))
    place = np.subtract.outer(positions, positions) - kernel.lags[0]  # of the lag i - j; negative without one
    share = np.where(place < 0, 0.0, kernel.shares().mean(axis=0)[np.maximum(place, 0)])
    largest = share.max() or 1.0
    norm = LogNorm(FAINTEST * largest, largest, clip=True)
    picture = axes.imshow(np.maximum(share, FAINTEST * largest), cmap="magma", norm=norm)
    axes.figure.colorbar(picture, ax=axes, shrink=0.8, format=PercentFormatter(1, decimals=None))
    axes.set(title="Toeplitz matrix: share of weight, mean", xlabel="input position j", ylabel="output position i")


def _coefficients(axes: Axes, kernel: Kernel):
    floor = 1e-8 * (np.abs(kernel.taps).max() or 1.0)
    for sign, name, colour in ((1, "back", LINE), (-1, "ahead", ACCENT)):
        side = sign * kernel.lags >= 1
        if side.any():
            distance, size = np.abs(kernel.lags[side]), np.maximum(np.abs(kernel.taps[:, side]), floor)
            low, median, high = np.percentile(size, [10, 50, 90], axis=0)
            axes.fill_between(distance, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.loglog(distance, median, color=colour, label=f"median channel, {name}")
    axes.axvline(max(1, np.median(kernel.horizons)), color="0.4", linestyle="--", label="median horizon")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    axes.set(title="coefficients by distance", xlabel="distance in positions", ylabel="|coefficient|")


def _response(axes: Axes, kernel: Kernel):
    magnitude = np.abs(np.fft.rfft(kernel.taps, max(1024, kernel.taps.shape[1])))  # (D, frequencies)
    frequency = np.linspace(0, 1, magnitude.shape[1])  # over pi
    peak = np.maximum(magnitude.max(axis=1, keepdims=True), np.finfo(magnitude.dtype).tiny)
    decibels = 20 * np.log10(np.maximum(magnitude / peak, 1e-4))
    low, median, high = np.percentile(decibels, [10, 50, 90], axis=0)
    axes.fill_between(frequency, low, high, color=LINE, alpha=0.2, linewidth=0)
    axes.plot(frequency, median, color=LINE)
    axes.grid(alpha=0.3)
    axes.set(xlabel="frequency over \N{GREEK SMALL LETTER PI}", ylabel="dB below the channel's peak", xlim=(0, 1))
    axes.set(title="frequency response", ylim=(max(-60, low.min() - 3), 3))


def _poles(axes: Axes, kernel: Kernel):
    poles = np.concatenate([kernel.poles.ravel(), kernel.poles.ravel().conj()])
    axes.add_patch(matplotlib.patches.Circle((0, 0), 1, fill=False, color="0.4"))
    axes.scatter(poles.real, poles.imag, s=6, color=ACCENT, alpha=0.5, linewidth=0)
    bound = max(1.1, 1.05 * np.abs(poles).max())
    axes.set(xlim=(-bound, bound), ylim=(-bound, bound), aspect="equal", xlabel="real part", ylabel="imaginary part")
    axes.set_title(f"poles and unit circle (largest radius {np.abs(poles).max():.4f})")
    axes.grid(alpha=0.3)
