"""Measure what the theorems of the papers say with the operators of this package, and write the figures of their page.

    theorem-1     the error of SKI beside its bound (SKI paper, theorem 1)
    fd-decay      how fast the kernels of FD fall, by activation and input (SKI paper, theorems 2 to 4)

The weights are random with a fixed seed, and all numbers are float64. `draw.py` draws the decay, and the stable
denominators of order 2 (RTF paper, figure 4) by functions of this file.

Example:
    python docs/research/theory.py
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from modeling_tnn import TnnConfig, dense_toeplitz
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tno_ski import InducingGrid

FIGURES = Path(__file__).parent / "figures"
Function = Callable[[torch.Tensor], torch.Tensor]

LENGTH, WIDTH = 257, 16  # positions, and lags over which the kernel falls

# The largest |psi_N| / (N + 1)! between points at distance 1, for linear interpolation (N = 1).
PSI = 1 / 8

FD_INPUTS = {"omega": "frequency, as published", "cos": "its cosine"}
FD_ACTS = {"relu": "ReLU", "silu": "SiLU", "gelu": "GELU"}


def smooth_kernel(lags: torch.Tensor) -> torch.Tensor:
    """A smooth kernel that is not symmetric: a Matern function of smoothness 9/2, larger at positive lags."""
    x = 3 * lags.abs() / WIDTH
    matern = torch.exp(-x) * (1 + x + 3 * x**2 / 7 + 2 * x**3 / 21 + x**4 / 105)
    return matern * (1 + torch.tanh(lags / WIDTH) / 2)


def largest_derivative(kernel: Function, order: int, reach: float, step: float) -> float:
    """The largest absolute value of a derivative of even order up to the lags of `reach`, by differences."""
    values = kernel(torch.arange(-reach, reach, step, dtype=torch.float64))
    return (values.diff(n=order) / step**order).abs().max().item()


class Interpolated:
    """The matrices of a low-rank part: n positions, K inducing points h = (n - 1)/(r - 1) apart, a kernel of the lag.

    Attributes:
        toeplitz: T, the kernel at all pairs of positions.
        weights, middle: W `(n, K)` and A `(K, K)`.
        left, right: F `(n, K)` and B `(K, n)`, the kernel between positions and points.
    """

    def __init__(self, kernel: Function, length: int, rank: int):
        grid = InducingGrid(length, rank - 1, length - 1)
        self.distance = (length - 1) / (rank - 1)
        positions = torch.arange(length, dtype=torch.float64)  # (n,)
        points = torch.arange(grid.num_points, dtype=torch.float64) * self.distance  # (K,)
        self.weights = grid.matrix(positions)
        self.middle = kernel(points[:, None] - points)
        self.left = kernel(positions[:, None] - points)
        self.right = kernel(points[:, None] - positions)
        lags = torch.arange(1 - length, length, dtype=torch.float64)
        self.toeplitz = dense_toeplitz(kernel(lags)[None])[0]

    def product(self) -> torch.Tensor:
        """W A W^T."""
        return self.weights @ self.middle @ self.weights.t()

    def nystroem(self) -> torch.Tensor:
        """F A^+ B, of which W A W^T is what interpolation leaves (SKI paper, section 3.2.1)."""
        return self.left @ torch.linalg.pinv(self.middle, rtol=1e-13) @ self.right


def error_and_bound(kernel: Function, length: int, rank: int) -> dict[str, float]:
    """The two sides of theorem 1, and the error of each form against T, as spectral norms.

    The paper writes psi_N as a product over N points; the error of interpolation by N + 1 points has N + 1 factors, as
    its own example h^2 / 8 for N = 1.
    """
    parts = Interpolated(kernel, length, rank)
    points = len(parts.middle)
    u, s, v = torch.linalg.svd(parts.toeplitz)
    optimal = (u[:, :points] * s[:points]) @ v[:points]
    largest = largest_derivative(kernel, 2, length + 2 * parts.distance, step=0.05)
    entry = PSI * parts.distance**2 * largest  # bounds the error of an entry of W A and A W^T
    smallest = torch.linalg.svdvals(parts.middle)[-1].item()
    outer = min(norm(parts.left), norm(parts.right))
    nystroem = norm(parts.nystroem() - optimal)
    bound = math.sqrt(length * points) * entry * (2 * math.sqrt(length) + outer / smallest) + nystroem
    return {
        "distance": parts.distance,
        "toeplitz_error": norm(parts.product() - parts.toeplitz),
        "error": norm(parts.product() - optimal),
        "nystroem": nystroem,
        "bound": bound,
    }


def norm(matrix: torch.Tensor) -> float:
    """The spectral norm."""
    return torch.linalg.matrix_norm(matrix, ord=2).item()


def fd_envelope(act: str, fd_input: str, lags: list[int], resolution: int = 8192, channels: int = 64) -> list[float]:
    """Return the kernel of an untrained causal FD operator at each lag, relative to its largest tap.

    Of each channel, the largest tap from the lag to twice the lag; the median over the channels.
    """
    torch.manual_seed(0)
    config = TnnConfig(
        tno_type="fd",
        hidden_size=channels,
        gtu_expansion=1,
        rpe_layers=3,
        fd_act=act,
        fd_input=fd_input,
        fd_resolution=resolution,
    )
    with torch.no_grad():
        taps = build_tno(config).double().coefficients(resolution).abs()  # (D, R)
    taps /= taps.max(dim=1, keepdim=True).values
    return [taps[:, lag : 2 * lag].max(dim=1).values.median().item() for lag in lags]


def is_stable(a1: np.ndarray, a2: np.ndarray) -> np.ndarray:
    """Whether the poles of 1 / (1 + a1 z^-1 + a2 z^-2) are inside the unit circle: a triangle."""
    return (np.abs(a2) < 1) & (np.abs(a1) < 1 + a2)


def is_montel(a1: np.ndarray, a2: np.ndarray) -> np.ndarray:
    """Whether the coefficients are in Montel's region, |a1| + |a2| <= 1: a square within the triangle."""
    return np.abs(a1) + np.abs(a2) <= 1


def initial_denominators(initializer: str, constraint: str | None, channels: int = 4096) -> np.ndarray:
    """Coefficients a1, a2 of an untrained RTF operator with two states, `(channels, 2)`."""
    torch.manual_seed(0)
    config = TnnConfig(
        tno_type="rtf",
        hidden_size=channels,
        gtu_expansion=1,
        rtf_state_size=2,
        rtf_initializer=initializer,
        rtf_constraint=constraint,
    )
    operator = build_tno(config)
    with torch.no_grad():
        operator.reset_parameters()
        return operator.denominators().double().numpy()


def theorem_1() -> list[dict]:
    return [error_and_bound(smooth_kernel, LENGTH, rank) for rank in (9, 17, 33, 65)]


def fd_decay() -> list[dict]:
    lags = [4, 16, 64, 256, 1024]
    rows = []
    for fd_input in FD_INPUTS:
        for act in FD_ACTS:
            left = fd_envelope(act, fd_input, lags)
            row = {"act": FD_ACTS[act], "input": FD_INPUTS[fd_input]}
            row |= {f"lag_{lag}": value for lag, value in zip(lags, left, strict=True)}
            if left[-1] > 1e-12:  # else it is rounding, and has no power
                row["power"] = math.log(left[-2] / left[-1]) / math.log(lags[-1] / lags[-2])
            rows.append(row)
    return rows


def write(name: str, rows: list[dict]):
    """Put the rows into the file of figures, one a line; what else it holds stays."""
    file = FIGURES / f"{name}.json"
    figures = json.loads(file.read_text(encoding="utf-8")) | {"rows": []}
    lines = ",\n".join(f"    {json.dumps({key: rounded(value) for key, value in row.items()})}" for row in rows)
    text = json.dumps(figures, indent=2, ensure_ascii=False).replace('"rows": []', f'"rows": [\n{lines}\n  ]')
    file.write_text(text + "\n", encoding="utf-8")


def rounded(value):
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main():
    for name, measure in {"theorem-1": theorem_1, "fd-decay": fd_decay}.items():
        write(name, measure())


if __name__ == "__main__":
    main()
