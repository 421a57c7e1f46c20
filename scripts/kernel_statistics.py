"""What a Toeplitz kernel attends to, in numbers.

    share of lag k:  |t_k| / sum_j |t_j|,     horizon: the smallest h with  sum_{|k| <= h} share_k >= 90%

D channels, M lags. All functions take and return numpy arrays.
"""

from dataclasses import dataclass

import numpy as np

HORIZON_SHARE = 0.9


@dataclass
class Kernel:
    """The coefficients of one operator.

    Args:
        label: what the pictures call it.
        taps: `(D, M)`.
        lags: `(M,)`, from the most negative one (the furthest position ahead) to the largest (the furthest back).
        poles: complex, any shape, of a kernel that is a recurrence.
    """

    label: str
    taps: np.ndarray
    lags: np.ndarray
    poles: np.ndarray | None = None

    @property
    def causal(self) -> bool:
        return bool(self.lags[0] >= 0)

    def shares(self) -> np.ndarray:
        """Of each lag in each channel, `(D, M)`; zero in a channel of zeros."""
        size = np.abs(self.taps)
        return size / np.maximum(size.sum(axis=1, keepdims=True), np.finfo(size.dtype).tiny)

    def horizons(self) -> np.ndarray:
        """Of each channel, `(D,)`."""
        distance = np.abs(self.lags)
        by_distance = np.zeros((len(self.taps), distance.max() + 1))
        np.add.at(by_distance.T, distance, self.shares().T)
        return (by_distance.cumsum(axis=1) < HORIZON_SHARE - 1e-12).sum(axis=1).clip(max=distance.max())

    def response(self, points: int = 513) -> tuple[np.ndarray, np.ndarray]:
        """Angular frequencies `(points,)` in [0, pi] and the magnitudes there, `(D, points)`."""
        frequency = np.linspace(0, np.pi, points)
        waves = np.exp(-1j * np.outer(self.lags, frequency))  # (M, points)
        return frequency, np.abs(self.taps @ waves)


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

    A causal kernel only looks back, and its names are bare numbers.
    """
    mean = kernel.shares().mean(axis=0)  # (M,)
    ranges = octaves(int(np.abs(kernel.lags).max()))
    shares = {}
    if not kernel.causal:
        for first, last in reversed(ranges[1:]):
            shares[f"{range_name(first, last)} ahead"] = mean[(-kernel.lags >= first) & (-kernel.lags <= last)].sum()
    for first, last in ranges:
        name = range_name(first, last) + (" back" if first and not kernel.causal else "")
        shares[name] = mean[(kernel.lags >= first) & (kernel.lags <= last)].sum()
    return {name: float(share) for name, share in shares.items()}


def summary(kernel: Kernel) -> dict:
    """The numbers of one kernel for the table and the JSON file."""
    horizons = kernel.horizons()
    low, median, high = np.percentile(horizons, [10, 50, 90])
    frequency, magnitude = kernel.response()
    shares = octave_shares(kernel)
    return {
        "label": kernel.label,
        "channels": len(kernel.taps),
        "horizon_median": float(median),
        "horizon_10_percent": float(low),
        "horizon_90_percent": float(high),
        "horizon_longest": int(horizons.max()),
        "main_range": max(shares, key=shares.get),
        "main_range_share": max(shares.values()),
        "mean_peak_frequency": float(frequency[magnitude.argmax(axis=1)].mean()),
        "largest_pole": None if kernel.poles is None else float(np.abs(kernel.poles).max()),
        "share_by_distance": shares,
    }
