"""Pictures of Toeplitz kernels: each function takes kernels and returns a matplotlib figure.

A lag i - j above 0 looks back, one below 0 ahead. Bands go from the 10th to the 90th
percentile of the channels.
"""

import textwrap

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from tnn_scripts.plotting.reading import Kernel, octave_shares, range_name

matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.grid": False})
SEQUENTIAL, DIVERGING, LINE, ACCENT = "magma", "RdBu_r", "#2166ac", "#d6604d"
# Lags on each side of the linear axes; the logarithmic axes show all lags.
NEAR = 32
# Matrices are black below this share of a lag.
FAINTEST = 1e-3
EXAMPLES = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)


def overview(kernels: list[Kernel], title: str) -> Figure:
    """A figure of all layers: the share of weight by distance, and the horizon."""
    found = [octave_shares(kernel) for kernel in kernels]
    names = list(max(found, key=len))  # kernels that end within the drawn lags have no shares beyond
    shares = np.array([[row.get(name, 0.0) for name in names] for row in found])  # (layers, octaves)
    width = max(9, 2.5 + 0.62 * len(names) + 3.5)
    figure = Figure(figsize=(width, 1.9 + 0.42 * len(kernels)), layout="constrained")
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
    _distance_axis(axes, max(_longest(kernel) for kernel in kernels))
    axes.set_ylim(len(kernels) - 0.5, -0.5)
    axes.set_title("horizon: 90% of the weight is nearer\n(median channel, 10th\N{EN DASH}90th percentile)")
    axes.grid(axis="x", alpha=0.3)


def layer(kernel: Kernel, matrix_size: int, tall: bool = False) -> Figure:
    """A figure of one layer in eight panels (seven without poles): in two rows, or in two columns if `tall`."""
    if tall:
        corner = "horizons" if kernel.poles is None else "poles"
        panels = [["matrix", "octaves"], ["channels", "log"], ["linear", "response"], [corner, "horizons"]]
    else:
        corner = "channels" if kernel.poles is None else "poles"
        panels = [["matrix", "octaves", "channels", corner], ["linear", "log", "response", "horizons"]]
    figure = Figure(figsize=(4.25 * len(panels[0]), 3.8 * len(panels)), layout="constrained")
    axes = figure.subplot_mosaic(panels)
    _mean_matrix(axes["matrix"], kernel, matrix_size)
    _octave_bars(axes["octaves"], kernel)
    _channel_map(axes["channels"], kernel)
    _horizon_histogram(axes["horizons"], kernel)
    _linear_taps(axes["linear"], kernel)
    _log_taps(axes["log"], kernel)
    _response(axes["response"], kernel)
    if kernel.poles is not None:
        _poles(axes["poles"], kernel)
    low, median, high = (kernel.horizon_text(percent) for percent in (10, 50, 90))
    title = (
        f"{kernel.label}: half of the channels have 90% of their weight within {median} positions "
        f"(10th\N{EN DASH}90th percentile: {low}\N{EN DASH}{high})"
    )
    figure.suptitle(textwrap.fill(title, 36 * len(panels[0])), fontsize=13)
    return figure


def matrices(kernel: Kernel, size: int) -> Figure:
    """The Toeplitz matrices of eight channels, from a short to the longest horizon (figure 3 of the TNN paper)."""
    horizons = kernel.horizons
    order = np.argsort(horizons, kind="stable")
    chosen = [order[min(len(order) - 1, int(share * len(order)))] for share in EXAMPLES]
    figure = Figure(figsize=(15, 7.6), layout="constrained")
    for axes, channel in zip(figure.subplots(2, 4, sharex=True, sharey=True).flat, chosen, strict=True):
        matrix = _toeplitz(kernel, kernel.taps[channel], size)
        bound = np.abs(matrix).max() or 1.0
        picture = axes.imshow(matrix / bound, cmap=DIVERGING, vmin=-1, vmax=1, interpolation="nearest")
        axes.set_title(f"channel {channel}, horizon {horizons[channel]}")
        axes.label_outer()
    figure.supxlabel("input position j")
    figure.supylabel("output position i")
    figure.colorbar(picture, ax=figure.axes, label="coefficient over the largest of its channel", shrink=0.7)
    figure.suptitle(f"{kernel.label}: Toeplitz matrices of eight channels, by horizon", fontsize=13)
    return figure


def _toeplitz(kernel: Kernel, taps: np.ndarray, size: int) -> np.ndarray:
    """The upper left `(size, size)` corner of the matrix of `taps` `(M,)`."""
    lag = np.subtract.outer(np.arange(size), np.arange(size)) - kernel.lags[0]
    inside = (lag >= 0) & (lag < len(taps))
    return np.where(inside, taps[lag.clip(0, len(taps) - 1)], 0.0)


def _mean_matrix(axes: Axes, kernel: Kernel, size: int):
    share = _toeplitz(kernel, kernel.shares().mean(axis=0), size)
    largest = share.max() or 1.0
    norm = LogNorm(FAINTEST * largest, largest, clip=True)
    picture = axes.imshow(np.maximum(share, FAINTEST * largest), cmap=SEQUENTIAL, norm=norm)
    axes.figure.colorbar(picture, ax=axes, shrink=0.8, format=PercentFormatter(1, decimals=None))
    axes.set(title="Toeplitz matrix: share of weight, mean", xlabel="input position j", ylabel="output position i")


def _octave_bars(axes: Axes, kernel: Kernel):
    shares = octave_shares(kernel)
    bars = axes.barh(list(shares), list(shares.values()), color=LINE)
    axes.bar_label(bars, [f"{100 * share:.0f}%" for share in shares.values()], padding=2)
    axes.set_xlim(0, 1.18 * max(shares.values()) or 1.0)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    side = "positions back" if kernel.causal else "positions"
    axes.set(title="where the weight lies", xlabel="share of weight, mean of the channels", ylabel=side)


def _channel_map(axes: Axes, kernel: Kernel):
    """Draw every channel as a row, ordered by horizon, over distances in octaves.

    The sign of a channel has no meaning (the gate and the output projection can change it): the largest is positive.
    """
    order = np.argsort(kernel.horizons, kind="stable")
    positions = _warp(kernel.lags)
    edges = np.linspace(positions.min() - 0.25, positions.max() + 0.25, 240)
    nearest = np.abs(positions[None, :] - ((edges[1:] + edges[:-1]) / 2)[:, None]).argmin(axis=1)
    largest = np.take_along_axis(kernel.taps, np.abs(kernel.taps).argmax(axis=1)[:, None], axis=1)  # (D, 1)
    values = (kernel.taps / np.where(largest == 0, 1, largest))[order][:, nearest]
    norm = SymLogNorm(linthresh=0.01, linscale=0.5, vmin=-1, vmax=1)
    extent = (edges[0], edges[-1], len(order), 0)
    picture = axes.imshow(values, aspect="auto", cmap=DIVERGING, norm=norm, extent=extent, interpolation="nearest")
    bar = axes.figure.colorbar(picture, ax=axes, shrink=0.8, ticks=[-1, -0.1, 0, 0.1, 1], format="%g")
    bar.set_label("coefficient over the largest")
    _warped_ticks(axes, kernel)
    axes.set(title="all channels", xlabel="lag i\N{MINUS SIGN}j", ylabel="channel, short to long horizon")


def _warp(lags: np.ndarray) -> np.ndarray:
    """The signed logarithm sign(lag) log2(1 + |lag|)."""
    return np.sign(lags) * np.log2(1 + np.abs(lags))


def _warped_ticks(axes: Axes, kernel: Kernel):
    longest = int(np.abs(kernel.lags).max())
    marks = [0] + [2**power for power in range(0, longest.bit_length(), 2 if kernel.causal else 3)]
    marks = [-mark for mark in reversed(marks[1:]) if not kernel.causal] + marks
    axes.set_xticks(_warp(np.array(marks)), [str(mark) for mark in marks])


def _horizon_histogram(axes: Axes, kernel: Kernel):
    horizons, longest = kernel.horizons, _longest(kernel)
    bins = np.array([0, 1] + [2**power for power in range(1, longest.bit_length() + 1)])
    counts = np.histogram(horizons, bins)[0]
    names = [range_name(int(a), int(min(b - 1, longest))) for a, b in zip(bins[:-1], bins[1:], strict=True)]
    axes.bar_label(axes.bar(names, counts, color=LINE), padding=2)
    axes.tick_params(axis="x", rotation=45)
    axes.set(
        title="horizon: 90% of the weight is nearer", xlabel="horizon in positions", ylabel="channels", ymargin=0.1
    )


def _linear_taps(axes: Axes, kernel: Kernel):
    near = np.abs(kernel.lags) <= NEAR
    lags, taps = kernel.lags[near], kernel.taps[:, near]
    order = np.argsort(kernel.horizons, kind="stable")
    low, high = np.percentile(taps, [10, 90], axis=0)
    axes.fill_between(lags, low, high, color="0.5", alpha=0.25, linewidth=0, label="10th\N{EN DASH}90th percentile")
    for share, colour in zip((0.1, 0.5, 0.9), ("#1b9e77", "#d95f02", "#7570b3"), strict=True):
        channel = order[int(share * (len(order) - 1))]
        horizon = kernel.horizons[channel]
        axes.plot(lags, taps[channel], color=colour, linewidth=1.2, label=f"channel {channel}, horizon {horizon}")
    axes.axhline(0, color="0.6", linewidth=0.6)
    # Below the axes: the curves of a causal kernel start high, and may be anywhere after a few lags.
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
    axes.set(
        title=f"coefficients of lags up to {np.abs(lags).max()}, linear axes",
        xlabel="lag i\N{MINUS SIGN}j",
        ylabel="coefficient",
    )


def _log_taps(axes: Axes, kernel: Kernel):
    floor = 1e-8 * (np.abs(kernel.taps).max() or 1.0)
    for sign, name, colour in ((1, "back", LINE), (-1, "ahead", ACCENT)):
        side = sign * kernel.lags >= 1
        if not side.any():
            continue
        distance, size = np.abs(kernel.lags[side]), np.maximum(np.abs(kernel.taps[:, side]), floor)
        low, median, high = np.percentile(size, [10, 50, 90], axis=0)
        axes.fill_between(distance, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.loglog(distance, median, color=colour, label=f"median channel, {name}")
    axes.axvline(max(1, np.median(kernel.horizons)), color="0.4", linestyle="--", label="median horizon")
    longest = int(np.abs(kernel.lags).max())
    axes.xaxis.set_major_locator(LogLocator(10 if longest > NEAR else 2))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    axes.set(title="coefficients, logarithmic axes", xlabel="distance in positions", ylabel="|coefficient|")


def _response(axes: Axes, kernel: Kernel):
    magnitude = kernel.magnitudes
    frequency = np.linspace(0, 1, magnitude.shape[1])  # over pi
    peak = np.maximum(magnitude.max(axis=1, keepdims=True), np.finfo(magnitude.dtype).tiny)
    decibels = 20 * np.log10(np.maximum(magnitude / peak, 1e-4))
    low, median, high = np.percentile(decibels, [10, 50, 90], axis=0)
    axes.fill_between(frequency, low, high, color=LINE, alpha=0.2, linewidth=0)
    axes.plot(frequency, median, color=LINE)
    axes.set_ylim(max(-60, low.min() - 3), 3)
    periods = [period for period in (64, 16, 8, 4, 3, 2) if period <= max(2, len(kernel.lags))]
    top = axes.secondary_xaxis("top")
    top.set_xticks([2 / period for period in periods], [str(period) for period in periods])
    axes.grid(alpha=0.3)
    axes.set(xlabel="frequency over \N{GREEK SMALL LETTER PI}", ylabel="dB below the channel's peak", xlim=(0, 1))
    axes.set_title("frequency response, by period in positions")


def _poles(axes: Axes, kernel: Kernel):
    poles = np.concatenate([kernel.poles.ravel(), kernel.poles.ravel().conj()])
    axes.add_patch(matplotlib.patches.Circle((0, 0), 1, fill=False, color="0.4"))
    axes.scatter(poles.real, poles.imag, s=6, color=ACCENT, alpha=0.5, linewidth=0)
    bound = max(1.1, 1.05 * np.abs(poles).max())
    axes.set(xlim=(-bound, bound), ylim=(-bound, bound), aspect="equal", xlabel="real part", ylabel="imaginary part")
    axes.set_title(f"poles and unit circle (largest radius {np.abs(poles).max():.4f})")
    axes.grid(alpha=0.3)


def _longest(kernel: Kernel) -> int:
    """The largest of the drawn lags and of the horizons, which cover all lags."""
    return int(max(np.abs(kernel.lags).max(), kernel.horizons.max()))


def _distance_axis(axes: Axes, longest: int):
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xlim(-0.3, longest * 1.3)
    axes.set_xticks([0] + [2**power for power in range(0, longest.bit_length(), 2)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("distance in positions")
