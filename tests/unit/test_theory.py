"""What the theorems of the papers say about the operators, by the functions that measure it for the documentation."""

import math
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from helpers.models import relative_error, seeded, tiny_config
from modeling_tnn.tno_rpe import RelativePositionEncoder

sys.path.append(str(Path(__file__).parents[2] / "docs" / "research"))
theory, shapes = import_module("theory"), import_module("kernel_shapes")
draw = import_module("draw")


@pytest.mark.parametrize("kind", theory.DEGREES)
def test_nystroem_is_the_interpolation_with_the_kernel_itself(kind):
    """W A W^T = F A^+ B where W A = F and A W^T = B: at a point for each position, else to order h^2 or h^4."""
    parts = theory.Interpolated(lambda lags: torch.exp(-lags / 20), 33, 9, kind)  # F A^+ B is T; A has no inverse
    assert torch.linalg.matrix_rank(parts.middle) == 1 and relative_error(parts.nystroem(), parts.toeplitz) < 1e-12
    parts = theory.Interpolated(theory.smooth_kernel, 33, 33, kind)
    assert relative_error(parts.product(), parts.toeplitz) < 1e-14
    assert relative_error(parts.nystroem(), parts.toeplitz) < 1e-5, "A is nearly singular"
    errors = []
    for rank in (9, 17):
        parts = theory.Interpolated(theory.smooth_kernel, 33, rank, kind)
        pairs = [
            (parts.weights @ parts.middle, parts.left),
            (parts.middle @ parts.weights.t(), parts.right),
            (parts.product(), parts.nystroem()),
        ]
        errors.append([relative_error(*pair) for pair in pairs])
    order = theory.DEGREES[kind][0] + 1
    for coarse, fine in zip(*errors, strict=True):
        assert abs(math.log2(coarse / fine) - order) < 0.3


@pytest.mark.parametrize("kind", theory.DEGREES)
def test_spectral_error_is_within_its_bound(kind):
    """SKI paper, theorem 1; and each of its steps, the bound of an entry of W A - F."""
    for rank in (5, 9, 17, 33):
        row = theory.error_and_bound(theory.smooth_kernel, 65, rank, kind)
        assert 0 < row["error"] <= row["bound"]
        parts, (degree, psi) = theory.Interpolated(theory.smooth_kernel, 65, rank, kind), theory.DEGREES[kind]
        derivative = theory.largest_derivative(theory.smooth_kernel, degree + 1, 65 + 2 * row["distance"], step=0.05)
        entry = (parts.weights @ parts.middle - parts.left).abs().max().item()
        assert 0.01 < entry / (psi * row["distance"] ** (degree + 1) * derivative) <= 1 or entry < 1e-12


def encoder(norm: str | None) -> RelativePositionEncoder:
    """A ReLU encoder of the lag with random biases; without any norm if None."""
    config = tiny_config(rpe_dim=16, rpe_layers=2, rpe_norm_type=norm or "layernorm", rpe_residual=False)
    made = seeded(RelativePositionEncoder, config, num_outputs=3, act="relu").double()
    if norm is None:
        for layer in (*made.layers, made.out):
            layer.norm = nn.Identity()
    return made


def values(made: RelativePositionEncoder, lags: torch.Tensor) -> torch.Tensor:
    """The outputs `(M, D)` at the lags `(M,)`."""
    return made.emit(made.features(lags), torch.ones_like(lags)).t()


def curved_share(made: RelativePositionEncoder) -> float:
    """The share of lags, of 8,001 between -20 and 20, at which the function is curved."""
    with torch.no_grad():
        found = values(made, torch.linspace(-20, 20, 8001, dtype=torch.float64))  # (M, D)
    return (found.diff(n=2, dim=0).abs() > 1e-9 * found.abs().max() / 8001).double().mean().item()


def test_a_relu_encoder_without_norms_is_piecewise_linear():
    """SKI paper, proposition 1: curved at no more lags than next to its kinks, of which 48 units make a few."""
    assert curved_share(encoder(None)) < 2 * 150 / 8001


@pytest.mark.parametrize("norm", ["layernorm", "simplermsnorm"])
def test_a_norm_makes_it_curved(norm):
    """It divides by a function of the lag: proposition 1 holds without one only. At far lags it goes to a constant."""
    made = encoder(norm)
    assert curved_share(made) > 0.9
    first, second = values(made, torch.tensor([1e6, 2e6], dtype=torch.float64))
    assert relative_error(first, second) < 1e-3
    first, second = values(encoder(None), torch.tensor([1e6, 2e6], dtype=torch.float64))
    assert relative_error(2 * first, second) < 1e-3, "without a norm it grows with the lag"


@pytest.mark.parametrize("act", theory.FD_ACTS)
def test_how_kernels_fall(act):
    """With the published input as a square, whatever the activation: its even extension has kinks at 0 and pi.

    With the cosine, smooth activations beyond every power; ReLU is square-summable (SKI theorems 2 to 4).
    """
    near, far = theory.fd_envelope(act, "omega", [64, 1024], resolution=4096, channels=16)
    assert 1.6 < math.log(near / far) / math.log(16) < 2.2
    near, far = theory.fd_envelope(act, "cos", [16, 128], resolution=4096, channels=16)
    if act == "relu":
        assert 1.6 < math.log(near / far) / math.log(8) < 2.2
    else:
        assert far < 1e-15 and near < 1e-3


def test_stable_region():
    """The triangle is where poles are inside the unit circle, and Montel's square is half of it."""
    a1, a2 = np.random.default_rng(0).uniform((-2.2, -1.2), (2.2, 1.2), (2000, 2)).T
    radius = np.array([np.abs(np.roots([1, *pair])).max() for pair in zip(a1, a2, strict=True)])
    stable, montel = theory.is_stable(a1, a2), theory.is_montel(a1, a2)
    assert (stable == (radius < 1)).all() and stable[montel].all()
    a1, a2 = np.meshgrid(np.linspace(-2, 2, 1001), np.linspace(-1, 1, 1001))
    assert theory.is_montel(a1, a2).mean() / theory.is_stable(a1, a2).mean() == pytest.approx(0.5, abs=0.01)
    for region, holds in ((draw.TRIANGLE, theory.is_stable), (draw.SQUARE, theory.is_montel)):
        corners = np.array(region)
        inside = np.random.default_rng(0).dirichlet(np.ones(len(corners)), 500) @ corners
        outside = corners.mean(axis=0) + 1.05 * (corners - corners.mean(axis=0))
        assert holds(*inside.T).all() and not holds(*outside.T).any(), "as it is drawn"


def test_initialised_denominators():
    """Xavier's bound puts some poles of order 2 outside the circle, Montel's none, nor does the constraint."""
    a1, a2 = theory.initial_denominators("xavier", None).T
    assert theory.is_stable(a1, a2).mean() == pytest.approx(0.91, abs=0.02)
    assert theory.is_montel(a1, a2).mean() == pytest.approx(0.83, abs=0.02)
    for initializer, constraint in (("montel", None), ("xavier", "l1_montel")):
        assert theory.is_montel(*theory.initial_denominators(initializer, constraint).T).all()


def test_shapes_of_kernels():
    """A smooth kernel is of low rank, one with a spike is that and a sparse matrix, and noise is neither."""
    lags = np.arange(1 - shapes.LENGTH, shapes.LENGTH)
    smooth = np.exp(-((lags / 60) ** 2))
    found = {name: shapes.shape(kernel) for name, kernel in {
        "smooth": smooth,
        "spiky": smooth + 3 * (-1.0) ** lags * (abs(lags) < 5),
        "noise": np.random.default_rng(0).normal(size=len(lags)),
    }.items()}  # fmt: skip
    assert found["smooth"]["left_low_rank"] < 0.01 > found["smooth"]["rough_near"]
    assert found["spiky"]["left_both"] < 0.01 and found["spiky"]["left_low_rank"] > 0.5
    assert found["spiky"]["rough_near"] > 2 > 0.01 > found["spiky"]["rough_far"]
    assert found["noise"]["left_both"] > 0.5 and abs(found["noise"]["rough_far"] - 1.5) < 0.2
    assert found["spiky"]["rank_near"] > 5 > found["spiky"]["rank_far"] and found["noise"]["rank_far"] > 25
