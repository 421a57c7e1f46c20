"""The pictures of kernels: their numbers, and the script on a saved model."""

import json
import math

import numpy as np
import pytest
import torch

from helpers.models import seeded, slow, tiny_config
from helpers.scripts import run
from modeling_tnn import TnnForCausalLM, TnnForImageClassification, TnnForMaskedLM
from modeling_tnn.tno_auto import build_tno
from tnn_programs.plotting.reading import Kernel, octave_shares, octaves, poles_of, read_layer, summary


def test_horizon_and_shares_of_known_kernels():
    one_sided = Kernel("layer", np.array([[8.0, -1, 1, 0, 0], [0, 0, 0, 0, -3], [0, 0, 0, 0, 0]]), np.arange(5))
    assert one_sided.horizons.tolist() == [1, 4, 0]
    assert octave_shares(one_sided) == pytest.approx({"0": 0.8 / 3, "1": 0.1 / 3, "2–3": 0.1 / 3, "4": 1 / 3})
    two_sided = Kernel("layer", np.array([[3.0, 0, 0, 6, 1]]), np.arange(-2, 3))
    assert two_sided.horizons.tolist() == [2] and not two_sided.causal
    expected = {"2 ahead": 0.3, "1 ahead": 0, "0": 0, "1 back": 0.6, "2 back": 0.1}
    assert octave_shares(two_sided) == pytest.approx(expected)
    assert octaves(0) == [(0, 0)] and octaves(5) == [(0, 0), (1, 1), (2, 3), (4, 5)]


def test_open_channels_make_lower_bounds():
    """The two longest of five channels are open: the median is known, the 90th percentile is not."""
    taps = np.zeros((5, 40))
    taps[range(5), [3, 30, 10, 20, 5]] = 1
    kernel = Kernel("layer", taps, np.arange(40), open=np.array([False, True, False, True, False]))
    assert [kernel.horizon_percentile(percent) for percent in (10, 50, 90)] == [(3.8, False), (10, False), (26, True)]
    assert summary(kernel)["lower_bounds"] == ["horizon_90_percent", "horizon_longest"]
    kernel.open[0] = True  # it may belong at the other end, so that the median is 10 at least
    assert kernel.horizon_percentile(50) == (10, True) and kernel.horizon_percentile(10) == (7, False)


def read_summary(operator, shown: int) -> dict:
    ((kernel, row),) = read_layer(operator, shown, "layer 0")
    assert kernel.taps.shape[1] == (shown if operator.causal else 2 * shown - 1)
    return row


@pytest.mark.parametrize("causal", [True, False])
def test_what_is_drawn_does_not_change_the_figures(causal):
    """Decays of the kernel itself are those of its 64 parameters a side: horizon h has 1 - r^(h+1) of 1 - r^64."""
    operator = build_tno(tiny_config("explicit", causal, decay=None))
    rates = torch.linspace(0.5, 0.99, operator.channels)[:, None]
    with torch.no_grad():
        operator.taps.copy_(rates ** torch.arange(0 if causal else -63, 64).abs())
    rows = [read_summary(operator, shown) for shown in (2, 16, 64, 200)]
    assert all(row == rows[0] for row in rows) and rows[0]["lower_bounds"] == [] and rows[0]["positions"] == 64
    weight = rates ** torch.arange(64) * (1 if causal else (torch.arange(64) > 0).add(1))
    expected = (weight.cumsum(1) < 0.9 * weight.sum(1, keepdim=True)).sum(1)
    assert rows[0]["horizon_median"] == expected.double().quantile(0.5).item()
    assert rows[0]["horizon_longest"] == expected.max().item()


def test_a_filter_is_read_until_it_has_faded():
    """One pole at 0.999, far behind the trained length of 64: 90% of the weight is within ln(0.1) / ln(0.999)."""
    operator = seeded(build_tno, tiny_config("modal", num_modes=1, modal_window=1))
    with torch.no_grad():
        operator.head.fill_(1), operator.angle.zero_(), operator.log_rate.fill_(math.log(-math.log(0.999)))
        operator.residues.copy_(torch.tensor([0.999, 0.0]).expand_as(operator.residues))
    row = read_summary(operator, 64)
    assert row["lower_bounds"] == [] and row["positions"] == 16384
    assert row["horizon_median"] == math.ceil(math.log(0.1) / math.log(0.999)) - 1 == 2301


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.filterwarnings("error")
def test_a_kernel_without_an_end_has_a_lower_bound(growing):
    """A constant kernel and a filter that explodes: neither has a lag within which most of the weight lies."""
    operator = seeded(build_tno, tiny_config("rtf" if growing else "explicit", rtf_state_size=2, rtf_constraint=None))
    operator.reset_parameters()
    if growing:
        with torch.no_grad():
            operator.denominator.copy_(torch.tensor([-1.1, 0.0]).expand_as(operator.denominator))
            operator.numerator.fill_(1)
    else:
        operator.coefficients = lambda length: torch.ones(operator.channels, length)
        operator.kernel_length = lambda exact: None
    ((drawn, row),) = read_layer(operator, 16, "layer 0")
    assert drawn.shares().sum(axis=1).max() < 0.1 and sum(octave_shares(drawn).values()) == pytest.approx(1)
    assert row["positions"] == 2**15 and set(row["lower_bounds"]) >= {"horizon_median", "horizon_longest"}
    assert row["horizon_median"] >= 100 and (growing or row["horizon_median"] == math.ceil(0.9 * 2**15) - 1)


IMAGES = {"image_size": 24, "patch_size": 4, "max_position_embeddings": 36, "spatial_dims": 2}


@pytest.mark.parametrize("tno_type", ["rtf", "s4d"])
def test_the_largest_pole_is_one_of_those_of_many_kernels(tno_type):
    operator = seeded(build_tno, tiny_config(tno_type, hidden_size=64, rtf_num_denominators=None, rtf_constraint=None))
    operator.reset_parameters()
    with torch.no_grad():
        if tno_type == "rtf":
            operator.denominator[1] = 0
            operator.denominator[1, 0] = -1.5
            expected = 1.5
        else:
            operator.log_real[1] -= 5
            expected = operator.powers(torch.ones(1))[1].abs().max().item()
        assert poles_of(operator).abs().max().item() == pytest.approx(expected)
        assert len(poles_of(operator)) <= 65 < operator.channels


@pytest.mark.parametrize(("head", "fields", "names"), [
    (TnnForCausalLM, {"tno_type": "modal"}, ["layer-0"]),
    *slow((TnnForMaskedLM, {"tno_type": "ski", "causal": False}, ["layer-0"]),
          (TnnForImageClassification, {"causal": False, **IMAGES}, ["layer-0-rows", "layer-0-columns"])),
])  # fmt: skip
def test_script(head, fields, names, tmp_path):
    """An image model has two kernels a layer, whose longest lag is a side of the image."""
    seeded(head, tiny_config(**fields, num_hidden_layers=1)).save_pretrained(tmp_path / "model")
    output, length = tmp_path / "pictures", 6 if "spatial_dims" in fields else 33
    given = ["--model_name_or_path", tmp_path / "model", "--output_dir", output, "--length", length]
    shown = run("plot_kernels", *given).stdout
    assert {path.stem for path in output.glob("*.png")} == {"overview", *names}
    found = json.loads((output / "kernels.json").read_text())
    layer = found["layers"][0]
    assert [row["label"] for row in found["layers"]] == ["layer 0" + name[7:].replace("-", " ") for name in names]
    assert found["length"] == length and sum(layer["share_by_distance"].values()) == pytest.approx(1)
    assert layer["positions"] == 6 or "spatial_dims" not in fields
    assert (layer["largest_pole"] is not None) == (fields.get("tno_type") == "modal")
    bound = ">= " if "horizon_median" in layer["lower_bounds"] else ""
    assert f"horizon {bound}{layer['horizon_median']:.0f} positions" in shown
