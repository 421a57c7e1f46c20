"""Recurrences of lower order, and the bounds of every conversion, which no input may break."""

import pytest
import torch

from helpers.mixers import MIXED
from helpers.models import lively_language_model, relative_error
from modeling_tnn.tools import recurrent

REDUCED = {
    "rtf": {"tno_type": "rtf", "rtf_state_size": 12},
    "rtf-one-pole": {"tno_type": "rtf"} | MIXED["multihyena"],
    "s4d": {"tno_type": "s4d", "s4d_state_size": 16, "s4d_dt_min": 0.05, "s4d_dt_max": 2.0},
    "s4d-slow": {"tno_type": "s4d", "s4d_state_size": 12, "s4d_discretization": "bilinear", "s4d_initializer": "legs"},
    "exponential": {"tno_type": "exponential", "num_modes": 9},
    "modal": {"tno_type": "modal", "num_modes": 6},
}
OTHERS = {
    "rpe": {"tno_type": "rpe", "decay": 0.95},
    "rpe-late": {"tno_type": "rpe", "decay": 0.998},
    "fd": {"tno_type": "fd", "fd_resolution": 128},
    "explicit": {"tno_type": "explicit", "max_position_embeddings": 75},
    "hyena": {"tno_type": "hyena", "hyena_filter_length": 61} | MIXED["hyena"],
}


@pytest.fixture(autouse=True)
def few_taps(monkeypatch):
    """Tails beyond the taps that are compared matter."""
    monkeypatch.setattr(recurrent, "MOST_TAPS", 301)
    monkeypatch.setattr(recurrent, "MOST_NUMBERS", 1)


@torch.no_grad()
def model_of(name):
    model = lively_language_model(**(REDUCED | OTHERS)[name])
    for layer in (
        model.model.layers if name == "rpe-late" else ()
    ):  # kernels that are nearly zero where they are fitted
        rpe = layer.mixer.tno.rpe
        rpe.in_proj.bias.mul_(1e4)
        rpe.out.linear.bias.copy_(-rpe.out.linear.weight @ rpe.features(torch.zeros(1))[0])
    return model


def converted(model, **options):
    """The operators of both models, in float64, and the report of each layer."""
    reduced, reports = model.to_recurrent(**options)
    layers = zip(model.model.layers, reduced.model.layers, reports, strict=True)
    return [(before.mixer.tno.double(), after.mixer.tno.double(), report) for before, after, report in layers]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("order", [1, 2, 7])
@pytest.mark.parametrize("name", REDUCED | OTHERS)
@torch.no_grad()
def test_no_input_breaks_a_bound(name, order, dtype):
    """The worst input has the signs of the reversed error; the worst frequency is the largest of its transform."""
    for before, after, report in converted(model_of(name).to(dtype), order=order, window=2):
        error = after.coefficients(4097) - before.coefficients(4097)  # (D, L)
        signs = error[error.abs().sum(dim=1).argmax()].sign().flip(0)
        x = torch.stack([signs, 2 * torch.rand(4097, dtype=torch.float64) - 1])[..., None].repeat(
            1, 1, before.channels
        )
        reached = (after(x) - before(x)).abs().amax(dim=(1, 2))
        rounding = torch.finfo(dtype).eps * before.coefficients(4097).abs().sum(dim=1).max()
        assert reached[1] < reached[0] <= report.output_bound * (1 + 1e-6) + rounding
        if name in REDUCED:
            assert torch.fft.rfft(error, n=2**15).abs().max() <= report.hankel_bound * (1 + 1e-6) + rounding


@pytest.mark.parametrize("name", ["rtf", "s4d", "exponential", "modal"])
@torch.no_grad()
def test_singular_values_are_those_of_the_hankel_matrix(name):
    """That of the taps of a channel, or of all channels together if they share poles."""
    operator = model_of(name).model.layers[1].mixer.tno
    if name == "modal":
        operator.log_rate.clamp_(min=-2)
    found = recurrent.reduce_layer(operator, 3, None, torch.float64)[0].values
    size = 200 if name == "modal" else 800  # M, by which the kernels have faded
    hankel = operator.coefficients(2 * size)[:, getattr(operator, "window", 1) :].unfold(
        1, size, 1
    )  # (D, M - w + 1, M)
    hankel = hankel.flatten(0, 1)[None] if name == "modal" else hankel[:5]
    squares = torch.linalg.eigvalsh(hankel.mT @ hankel).flip(1)[:, : found.shape[1]]
    assert relative_error(found[: len(squares)] ** 2, squares) < 1e-9


def test_tolerance_unchanged_models_and_refused_poles():
    model = model_of("s4d")
    assert all(report.l2_layer <= 0.3 and report.order < 16 for *_, report in converted(model, tolerance=0.3))
    assert model.to_recurrent(order=16) == (model, []), "no more states than that"
    assert all(report.l2_layer < 1e-9 for *_, report in converted(model, tolerance=1e-12))
    model = lively_language_model(tno_type="rtf", rtf_constraint=None)
    for radius, fades in ((1 - 1e-9, True), (1.0, False), (1.1, False)):
        with torch.no_grad():
            model.model.layers[1].mixer.tno.denominator[2] = 0
            model.model.layers[1].mixer.tno.denominator[2, -1] = -(radius**8)
        if fades:
            assert all(0 < report.largest_pole < 1 for *_, report in converted(model, order=3))
        else:
            with pytest.raises(ValueError, match=f"Layer 1, filter 32: a pole of radius {radius:.6f} does not fade"):
                model.to_recurrent(order=3)
