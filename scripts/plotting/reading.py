"""The kernels of a model, read from its operators, and their statistics.

    share of lag k:  |t_k| / sum_j |t_j|,     horizon: the smallest h with  sum_{|k| <= h} share_k >= 90%

The sums are over all lags of a kernel, not only the drawn ones. If a kernel continues beyond the lags that were read,
its horizon is a lower bound. D channels, M lags.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from modeling_tnn.tno_auto import TwoAxisOperator
from modeling_tnn.tno_modal import ModalOperator
from modeling_tnn.tno_rtf import RtfOperator, companion_matrix
from modeling_tnn.tno_s4d import DiagonalOperator

HORIZON_SHARE = 0.9
# Number of positions of an unbounded kernel that are read first, and at most.
FIRST, LONGEST = 2**10, 2**15
# A kernel has decayed if the outer half of its lags has at most this share; later lags have even less.
NEGLIGIBLE = 1e-3
# Filters with poles outside the unit circle overflow. This limit keeps their sums finite.
LARGEST = 1e100
# The horizon of an open channel, for the order of horizons.
UNKNOWN = 2.0**40
TINY = np.finfo(float).tiny
AT_LEAST = "\N{GREATER-THAN OR EQUAL TO} "


@dataclass
class Kernel:
    """The coefficients of one operator, and the figures of all its lags."""

    label: str
    taps: np.ndarray  # coefficients (D, M)
    lags: np.ndarray  # (M,), from the furthest position ahead (negative) to the furthest back
    poles: np.ndarray | None = None  # complex poles of a recurrence, of any shape
    open: np.ndarray | None = None  # which channels may have weight beyond the lags, (D,); none unless given
    beyond: tuple[float, float] = (0.0, 0.0)  # mean shares of the channels further ahead and back than `lags`
    weights: np.ndarray | None = None  # the sum of |t_k| of each channel, (D,)
    horizons: np.ndarray | None = None  # (D,); 0 for a channel of zeros, a lower bound for an open channel

    def __post_init__(self):
        if self.weights is None:
            self.open = np.zeros(len(self.taps), dtype=bool) if self.open is None else self.open
            self.weights = np.abs(self.taps).sum(axis=1)
            within = self.shares_by_distance().cumsum(axis=1)
            horizons = (within < HORIZON_SHARE - 1e-12).sum(axis=1).clip(max=within.shape[1] - 1)
            self.horizons = np.where(self.weights == 0, 0, horizons)

    @property
    def causal(self) -> bool:
        return bool(self.lags[0] >= 0)

    def shares(self) -> np.ndarray:
        """The share of each lag in each channel, `(D, M)`; zero in a channel of zeros."""
        return np.abs(self.taps) / np.maximum(self.weights[:, None], TINY)

    def shares_by_distance(self) -> np.ndarray:
        """The shares of both sides together, `(D, distances)`."""
        shares, ahead = self.shares(), max(0, int(-self.lags[0]))
        by_distance = shares[:, ahead:].copy()
        by_distance[:, 1 : ahead + 1] += shares[:, :ahead][:, ::-1]
        return by_distance

    def horizon_percentile(self, percent: float) -> tuple[float, bool]:
        """A percentile of the channels' horizons, and whether it is only a lower bound."""
        known = np.where(self.open, UNKNOWN, self.horizons)
        is_bound = np.sort(known)[math.ceil(percent / 100 * (len(known) - 1))] == UNKNOWN
        return float(np.percentile(self.horizons if is_bound else known, percent)), bool(is_bound)

    def horizon_text(self, percent: float) -> str:
        value, is_bound = self.horizon_percentile(percent)
        return f"{AT_LEAST if is_bound else ''}{value:.0f}"

    def cut(self, length: int) -> Kernel:
        """The kernel at `length` positions, with the figures of all lags that were read."""
        lags = np.arange(0 if self.causal else 1 - length, length)
        taps = np.zeros((len(self.taps), len(lags)))
        taps[:, np.isin(lags, self.lags)] = self.taps[:, np.isin(self.lags, lags)]
        shares = self.shares().mean(axis=0)  # (M,)
        beyond = shares[self.lags < lags[0]].sum(), shares[self.lags > lags[-1]].sum()
        return replace(self, taps=taps, lags=lags, beyond=beyond)


def octaves(longest: int) -> list[tuple[int, int]]:
    """The ranges of distances 0, 1, 2-3, 4-7, .. up to `longest`, both ends included."""
    return [(0, 0), *((2**k, min(2 ** (k + 1) - 1, longest)) for k in range(longest.bit_length()))]


def octave_shares(kernel: Kernel) -> dict[str, float]:
    """The mean share of the channels in each octave, from the furthest ahead to the furthest back.

    A causal kernel looks only back, and its octaves have plain numbers as names. What a kernel has beyond its lags is
    in ranges of its own at the ends.
    """
    mean, (ahead, back) = kernel.shares().mean(axis=0), kernel.beyond  # (M,)
    longest = int(np.abs(kernel.lags).max())
    names = {first: str(first) if first == last else f"{first}\N{EN DASH}{last}" for first, last in octaves(longest)}
    rest = f"{AT_LEAST}{longest + 1}"

    def share(first: int, last: int, sign: int) -> float:
        return mean[(sign * kernel.lags >= first) & (sign * kernel.lags <= last)].sum()

    shares = {f"{rest} ahead": ahead} if ahead + back > 0 and not kernel.causal else {}
    if not kernel.causal:
        shares |= {f"{names[one]} ahead": share(one, last, -1) for one, last in reversed(octaves(longest)[1:])}
    for first, last in octaves(longest):
        shares[names[first] + (" back" if first and not kernel.causal else "")] = share(first, last, 1)
    if ahead + back > 0:
        shares[rest + ("" if kernel.causal else " back")] = back
    return {name: float(value) for name, value in shares.items()}


def summary(kernel: Kernel) -> dict:
    """The numbers of one kernel for the table and the JSON file."""
    percents = {"median": 50, "10_percent": 10, "90_percent": 90, "longest": 100}
    horizons = {f"horizon_{name}": kernel.horizon_percentile(percent) for name, percent in percents.items()}
    shares = octave_shares(kernel)
    return {
        "label": kernel.label,
        "channels": len(kernel.taps),
        "positions": int(np.abs(kernel.lags).max()) + 1,
        **{name: value for name, (value, _) in horizons.items()},
        "lower_bounds": [name for name, (_, is_bound) in horizons.items() if is_bound],
        "main_range": max(shares, key=shares.get),
        "main_range_share": max(shares.values()),
        "largest_pole": None if kernel.poles is None else float(np.abs(kernel.poles).max()),
        "share_by_distance": shares,
    }


@torch.no_grad()
def read_kernel(operator, length: int, label: str) -> Kernel:
    """The coefficients of an operator for sequences of `length` positions."""
    taps = operator.coefficients(length).double().cpu().numpy()  # (D, M)
    taps = np.nan_to_num(taps, nan=LARGEST, posinf=LARGEST, neginf=-LARGEST).clip(-LARGEST, LARGEST)
    poles = poles_of(operator)
    lags = np.arange(0 if operator.causal else 1 - length, length)
    return Kernel(label, taps, lags, None if poles is None else poles.cpu().numpy())


def poles_of(operator) -> torch.Tensor | None:
    """The poles of at most 65 kernels, with the largest, complex `(<= 65, N)`; None of an operator without poles."""
    if isinstance(operator, RtfOperator):
        poles = torch.linalg.eigvals(companion_matrix(operator.denominators()))  # (D, N)
    elif isinstance(operator, ModalOperator | DiagonalOperator):
        one = torch.ones(1, device=next(operator.parameters()).device)
        poles = torch.atleast_2d(operator.powers(one)[..., 0])
    else:
        return None
    if len(poles) <= 64:
        return poles
    return torch.cat([poles[:: -(-len(poles) // 64)], poles[poles.abs().amax(dim=1).argmax()][None]])


def read_whole(operator, label: str, side: int | None = None) -> Kernel:
    """The kernel up to its end, or until it has decayed. `open` marks channels that are longer than `LONGEST`.

    `side` is the number of patches along a side of an image, which ends a kernel.
    """
    end = operator.kernel_length(exact=True) if side is None else side
    length = FIRST if end is None else min(end, LONGEST)
    while True:
        kernel = read_kernel(operator, length, label)
        if length == end:
            return kernel
        shares = kernel.shares_by_distance()
        kernel.open = shares[:, shares.shape[1] // 2 :].sum(axis=1) > NEGLIGIBLE
        if length == LONGEST or not kernel.open.any():
            return kernel
        length = min(4 * length, LONGEST)


def read_layer(operator, length: int, label: str, side: int | None = None) -> list[tuple[Kernel, dict]]:
    """The kernels of a layer at `length` positions, and the figures of all their lags."""
    two = isinstance(operator, TwoAxisOperator)
    parts = {" rows": operator.rows, " columns": operator.columns} if two else {"": operator}
    whole = [read_whole(part, label + name, side) for name, part in parts.items()]
    return [(kernel.cut(length), summary(kernel)) for kernel in whole]


def read_model(model: PreTrainedModel, length: int) -> tuple[list[Kernel], list[dict]]:
    """The kernels of all layers of a model without its head, drawn at `length` positions, and the figures of each.

    They are computed in float32 or float64, because the resolution of the dtype limits the decay. A layer of an image
    model has two, along rows and columns. Attention has none.
    """
    dtype = torch.promote_types(model.dtype, torch.float32)
    side = model.config.axis_length if model.config.spatial_dims == 2 else None
    operators = {f"layer {i}": layer.mixer.tno for i, layer in enumerate(model.layers) if layer.mixer is not None}
    if not operators:
        raise ValueError(f"`layer_types` must have a 'toeplitz' layer to draw, got {model.config.layer_types}")
    found = []
    for label, operator in operators.items():
        operator = operator if dtype == model.dtype else copy.deepcopy(operator).to(dtype)
        found += read_layer(operator, length, label, side)
    return [kernel for kernel, _ in found], [row for _, row in found]
