"""Statistics of Toeplitz kernels: weights, shares by distance and horizons.

    share of lag k:  |t_k| / sum_j |t_j|,     horizon: the smallest h with  sum_{|k| <= h} share_k >= 90%

The sums are over all lags of a kernel, not only the drawn ones. If a kernel continues beyond the lags that were read,
its horizon is a lower bound. D channels, M lags. All functions take and return numpy arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

HORIZON_SHARE = 0.9
# The horizon of an open channel, for the order of horizons.
UNKNOWN = 2.0**40


@dataclass(frozen=True)
class Whole:
    """The figures of all lags of a kernel, of which only some are drawn.

    Args:
        weights: the sum of |t_k| of each channel, `(D,)`.
        horizons: the horizon of each channel, `(D,)`.
        response: the result of `Kernel.response`.
        beyond: the mean shares of the channels further ahead and further back than what is drawn.
    """

    weights: np.ndarray
    horizons: np.ndarray
    response: tuple[np.ndarray, np.ndarray]
    beyond: tuple[float, float] = (0.0, 0.0)


@dataclass
class Kernel:
    """The coefficients of one operator.

    Args:
        label: name of the kernel in the pictures.
        taps: coefficients `(D, M)`.
        lags: `(M,)`, from the most negative one (the furthest position ahead) to the largest (the furthest back).
        poles: complex poles of a recurrence, of any shape.
        open: which channels may have weight beyond the lags, `(D,)`; none unless given.
        whole: the figures of all lags, if `lags` are only those to draw.
    """

    label: str
    taps: np.ndarray
    lags: np.ndarray
    poles: np.ndarray | None = None
    open: np.ndarray | None = None
    whole: Whole | None = None

    @property
    def causal(self) -> bool:
        return bool(self.lags[0] >= 0)

    def weights(self) -> np.ndarray:
        """The sum of |t_k| of each channel, `(D,)`."""
        return np.abs(self.taps).sum(axis=1) if self.whole is None else self.whole.weights

    def shares(self) -> np.ndarray:
        """The share of each lag in each channel, `(D, M)`; zero in a channel of zeros."""
        return np.abs(self.taps) / np.maximum(self.weights()[:, None], np.finfo(self.taps.dtype).tiny)

    def horizons(self) -> np.ndarray:
        """The horizon of each channel, `(D,)`; 0 for a channel of zeros, a lower bound for an open channel."""
        if self.whole is not None:
            return self.whole.horizons
        within = self._shares_by_distance().cumsum(axis=1)
        horizons = (within < HORIZON_SHARE - 1e-12).sum(axis=1).clip(max=within.shape[1] - 1)
        return np.where(self.weights() == 0, 0, horizons)

    def horizon_percentile(self, percent: float) -> tuple[float, bool]:
        """A percentile of the channels' horizons, and whether it is only a lower bound."""
        horizons = self.horizons()
        known = horizons if self.open is None else np.where(self.open, UNKNOWN, horizons)
        is_bound = np.sort(known)[math.ceil(percent / 100 * (len(known) - 1))] == UNKNOWN
        return float(np.percentile(horizons if is_bound else known, percent)), bool(is_bound)

    def horizon_text(self, percent: float) -> str:
        value, is_bound = self.horizon_percentile(percent)
        return f"\N{GREATER-THAN OR EQUAL TO} {value:.0f}" if is_bound else f"{value:.0f}"

    def outer_shares(self) -> np.ndarray:
        """The share of the further half of the distances in each channel, `(D,)`."""
        shares = self._shares_by_distance()
        return shares[:, shares.shape[1] // 2 :].sum(axis=1)

    def response(self, points: int = 513) -> tuple[np.ndarray, np.ndarray]:
        """The angular frequencies `(points,)` in [0, pi], and the magnitudes of the response `(D, points)`."""
        if self.whole is not None:
            return self.whole.response
        size = 2 * (points - 1)  # the samples cannot distinguish lags that differ by this number
        folded = np.pad(self.taps, ((0, 0), (0, -self.taps.shape[1] % size)))
        folded = folded.reshape(len(folded), -1, size).sum(axis=1)  # (D, size)
        return np.linspace(0, np.pi, points), np.abs(np.fft.rfft(folded))

    def _shares_by_distance(self) -> np.ndarray:
        """The shares of both sides together, `(D, distances)`."""
        shares = self.shares()
        ahead = int(-self.lags[0])
        if ahead <= 0:
            return shares
        by_distance = shares[:, ahead:].copy()
        by_distance[:, 1:] += shares[:, :ahead][:, ::-1]
        return by_distance


def octaves(longest: int) -> list[tuple[int, int]]:
    """The ranges of distances 0, 1, 2-3, 4-7, .. up to `longest`, both ends included."""
    ranges = [(0, 0)]
    while ranges[-1][1] < longest:
        first = ranges[-1][1] + 1
        ranges.append((first, min(2 * first - 1, longest)))
    return ranges


def range_name(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}\N{EN DASH}{last}"


def octave_shares(kernel: Kernel) -> dict[str, float]:
    """The mean share of the channels in each octave, from the furthest ahead to the furthest back.

    A causal kernel looks only back, and its octaves have plain numbers as names. What a whole kernel has beyond the
    drawn lags is in ranges of its own at the ends.
    """
    mean = kernel.shares().mean(axis=0)  # (M,)
    longest = int(np.abs(kernel.lags).max())
    ranges, rest = octaves(longest), f"\N{GREATER-THAN OR EQUAL TO} {longest + 1}"
    ahead, back = (0.0, 0.0) if kernel.whole is None else kernel.whole.beyond
    shares = {f"{rest} ahead": ahead} if ahead + back > 0 and not kernel.causal else {}
    if not kernel.causal:
        for first, last in reversed(ranges[1:]):
            shares[f"{range_name(first, last)} ahead"] = mean[(-kernel.lags >= first) & (-kernel.lags <= last)].sum()
    for first, last in ranges:
        name = range_name(first, last) + (" back" if first and not kernel.causal else "")
        shares[name] = mean[(kernel.lags >= first) & (kernel.lags <= last)].sum()
    if ahead + back > 0:
        shares[rest + ("" if kernel.causal else " back")] = back
    return {name: float(share) for name, share in shares.items()}


def summary(kernel: Kernel) -> dict:
    """The numbers of one kernel for the table and the JSON file."""
    percents = {"median": 50, "10_percent": 10, "90_percent": 90, "longest": 100}
    horizons = {f"horizon_{name}": kernel.horizon_percentile(percent) for name, percent in percents.items()}
    frequency, magnitude = kernel.response()
    shares = octave_shares(kernel)
    return {
        "label": kernel.label,
        "channels": len(kernel.taps),
        "positions": int(np.abs(kernel.lags).max()) + 1,
        **{name: value for name, (value, _) in horizons.items()},
        "lower_bounds": [name for name, (_, is_bound) in horizons.items() if is_bound],
        "main_range": max(shares, key=shares.get),
        "main_range_share": max(shares.values()),
        "mean_peak_frequency": float(frequency[magnitude.argmax(axis=1)].mean()),
        "largest_pole": None if kernel.poles is None else float(np.abs(kernel.poles).max()),
        "share_by_distance": shares,
    }
