"""Poles of RTF denominators near, on and outside the unit circle: found, named, projected, trained with, decoded."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import signal
from torch import nn
from transformers import Trainer, TrainingArguments

from helpers.models import RandomTexts, relative_error, seeded, tiny_config
from helpers.operators import advance, random_input, random_operator
from helpers.strategies import noise, seeds
from modeling_tnn import PoleCallback, TnnConfig, TnnForCausalLM, find_unstable, project_poles
from modeling_tnn.cache_tnn import TnnCacheLayer
from modeling_tnn.recurrence import DivergenceError
from modeling_tnn.tno_rtf import reciprocal_series
from modeling_tnn.tools import poles
from modeling_tnn.tools.poles import is_stable, spectral_radius

UNCONSTRAINED = {"tno_type": "rtf", "rtf_constraint": None, "rtf_initializer": "zeros", "eos_token_id": None}


def denominator_of(*poles: complex) -> torch.Tensor:
    """`(1, N)` for these poles and the conjugates of the complex ones."""
    roots = [*poles, *(np.conj(pole) for pole in poles if np.iscomplex(pole))]
    return torch.from_numpy(np.poly(roots).real[1:].copy())[None]


def model_with_pole(radius: float, angle: float = 0.4, layer: int = 1, **fields) -> TnnForCausalLM:
    """One pair of poles in channel 3 of `layer`, all else zero."""
    model = seeded(TnnForCausalLM, tiny_config(**UNCONSTRAINED | fields))
    with torch.no_grad():
        denominator = model.model.layers[layer].mixer.tno.denominator
        denominator[3 % len(denominator), :2] = denominator_of(radius * np.exp(1j * angle))[0]
        model.model.layers[layer].mixer.tno.numerator.normal_()
    return model


# Stable denominators whose series rises before it falls, up to a factor of 1e7.
HARD = {
    "Butterworth": signal.butter(4, 0.03)[1], "Butterworth of order 8": signal.butter(8, 0.03)[1],
    "band": signal.butter(4, [0.1, 0.12], "band")[1], "Chebyshev": signal.cheby1(8, 1, 0.1)[1],
    "elliptic": signal.ellip(6, 1, 60, 0.05)[1], "near 0.999": np.poly([0.999, 0.9985, 0.998, 0.9975]),
    **{f"random of order {2 * half}": np.poly((roots := 0.999 * np.sqrt(np.random.default_rng(0).uniform(size=half))
       * np.exp(1j * np.random.default_rng(1).uniform(0, np.pi, half))).tolist() + roots.conj().tolist()).real
       for half in (2, 8, 16, 32)},
}  # fmt: skip
HARD_FIELDS = {"rtf_constraint": None, "rtf_num_denominators": None, "max_position_embeddings": 96}


def hard_operator(name: str, causal: bool):
    """An operator with one of these denominators in all channels, and its impulse responses, `(D, T)`."""
    denominator = HARD[name][1:]
    operator = random_operator("rtf", causal, **HARD_FIELDS, rtf_state_size=len(denominator))
    series = signal.lfilter([1.0], [1.0, *denominator], np.eye(1, 2**16)[0])
    with torch.no_grad():
        operator.denominator.copy_(torch.from_numpy(denominator))
        operator.numerator.div_(np.abs(series).max())
    return operator, np.stack([np.convolve([0, *b], series)[: 2**16] for b in operator.numerator.detach().numpy()])


@pytest.mark.parametrize("name", HARD)
def test_stable_filters_are_those_of_the_recursion(name):
    """The series at any length, the kernel beyond the trained length in both directions, and decoding, not refused."""
    denominator = torch.from_numpy(HARD[name][None, 1:])
    expected = torch.from_numpy(signal.lfilter([1.0], HARD[name], np.eye(1, 2**16)[0]))[None]
    for length in (1, 63, 512, 1024, 2**16):
        assert relative_error(reciprocal_series(denominator, length), expected[:, :length]) < 3e-6
    for causal in (True, False):
        operator, responses = hard_operator(name, causal)
        kernel, half = operator.coefficients(1100).detach(), len(responses) if causal else len(responses) // 2
        folded = torch.from_numpy(np.stack([responses[:, lag::96].sum(1) for lag in range(1100)], 1))  # by the samples
        assert relative_error(kernel[:, -1099:], folded[:half, 1:]) < 1e-4
        if not causal:
            assert relative_error(kernel[:, :1098].flip(1), folded[half:, 1:-1]) < 1e-4
    operator, _ = hard_operator(name, True)
    v, layer = random_input(1, 1105, operator.channels), TnnCacheLayer()
    found = torch.cat([advance(layer, part, operator) for part in v.split([1000, 100, *[1] * 5], dim=1)], dim=1)
    assert relative_error(found, operator(v)) < 1e-4
    with torch.no_grad():
        assert find_unstable(nn.ModuleList([operator])) == []


@pytest.mark.parametrize("causal", [True, False])
def test_a_kernel_that_would_drown_the_first_outputs_is_refused(causal):
    """Beyond the trained length, and only where poles are outside the circle."""
    operator = random_operator("rtf", causal, **HARD_FIELDS, rtf_state_size=2)
    with torch.no_grad():
        operator.denominator.copy_(denominator_of(1.05 * np.exp(0.4j)))
    v = random_input(1, 400, operator.channels).float()
    assert relative_error(operator.float()(v[:, :150])[:, :96], operator(v[:, :96])) < 1e-4 or not causal
    with pytest.raises(
        DivergenceError, match="a pole of radius 1.05.* beyond the trained length. Read at most 96 tokens"
    ):
        operator(v)


@given(st.integers(1, 24), st.floats(0.2, 3.0), st.floats(0.5, 1.5), seeds)
def test_reflection_coefficients_agree_with_the_roots(order, scale, radius, seed):
    denominator = noise(8, order, seed=seed) * scale / order
    radii = spectral_radius(denominator)
    clear = (radii / radius - 1).abs() > 1e-6
    assert torch.equal(is_stable(denominator, radius)[clear], (radii < radius)[clear])


def test_poles_near_the_circle():
    for angle in (0.0, 1e-3, 1.0, np.pi):
        for radius in (0.5, 0.999, 1 - 1e-9, 1 + 1e-9, 1.001, 3.0):
            pole = radius * np.exp(1j * angle) if angle not in (0.0, np.pi) else radius * np.cos(angle)
            assert is_stable(denominator_of(pole)).item() == (radius < 1)
            assert spectral_radius(denominator_of(pole)).item() == pytest.approx(radius, abs=1e-7)
    nothing = torch.tensor([[0.1, float("nan")], [float("inf"), 0.0], [0.1, 0.1]])
    assert is_stable(nothing).tolist() == [False, False, True], "what is no number is outside"
    assert spectral_radius(nothing)[:2].tolist() == [float("inf")] * 2


def test_layer_and_radius_are_named():
    """A pole on the circle or outside leaves the gradients of a training step finite: it lies between the samples."""
    assert find_unstable(model_with_pole(0.99)) == []
    (found,) = find_unstable(model_with_pole(1.25))
    assert (found.layer, found.denominators) == (1, 1) and found.radius == pytest.approx(1.25, rel=1e-6)
    assert find_unstable(model_with_pole(1.25, rtf_constraint="l1_montel")) == []
    assert find_unstable(seeded(TnnForCausalLM, tiny_config("rpe"))) == []
    ids = torch.randint(99, (2, 40), generator=torch.Generator().manual_seed(0))
    for radius in (0.999, 1.0, 1.1, 2.0):
        model = model_with_pole(radius).train()
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_projection_keeps_angles_and_what_is_inside():
    model = model_with_pole(1.25)
    untouched = model.model.layers[1].mixer.tno.denominator.detach().clone()
    project_poles(model, 0.9)
    after = model.model.layers[1].mixer.tno.denominator
    assert relative_error(after[3:4, :2], denominator_of(0.9 * np.exp(0.4j))) < 1e-6
    assert torch.equal(after[:3], untouched[:3]) and torch.equal(after[4:], untouched[4:])
    assert find_unstable(model, 0.9001) == []


def test_a_projection_that_fails_changes_no_layer():
    model = model_with_pole(1.25, layer=0)
    with torch.no_grad():
        model.model.layers[1].mixer.tno.denominator[0, 0] = float("nan")
    before = model.model.layers[0].mixer.tno.denominator.detach().clone()
    with pytest.raises(ValueError, match="must be finite to be projected, got others in layer 1"):
        project_poles(model, 0.9)
    for radius in (0.0, 1.0, -1, float("nan")):
        with pytest.raises(ValueError, match="`radius` must be in \\(0, 1\\), got"):
            project_poles(model, radius)
    assert torch.equal(model.model.layers[0].mixer.tno.denominator, before)


def train(model, callbacks, folder, steps=4, **options):
    options = {"learning_rate": 1e-3, "use_cpu": True, "report_to": "none", "disable_tqdm": True} | options
    args = TrainingArguments(str(folder), max_steps=steps, **options)
    trainer = Trainer(model=model, args=args, train_dataset=RandomTexts(), callbacks=callbacks)
    return trainer.train()


@pytest.fixture
def warnings(caplog):
    """The warnings of the library, in order."""
    caplog.set_level(logging.WARNING, logger="modeling_tnn")
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("modeling_tnn.")]


def test_callback_warns_once(tmp_path, warnings):
    train(model_with_pole(1.25), [PoleCallback(every=1)], tmp_path)
    (message,) = warnings()
    assert message.startswith("Step 1, layer 1: 1 denominators") and "radius 1.2" in message and "l1_montel" in message


def test_default_rtf_generates_after_training(tmp_path):
    """What a user gets who names nothing but the operator: poles stay inside, and the cache gives the same tokens."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "rtf_state_size": 16, "max_position_embeddings": 64}
    model = seeded(TnnForCausalLM, TnnConfig(vocab_size=99, tno_type="rtf", eos_token_id=None, **sizes))
    train(model, [], tmp_path, steps=25, learning_rate=3e-2, lr_scheduler_type="constant", save_strategy="no")
    model.eval()
    radii = [spectral_radius(layer.mixer.tno.denominators()).max().item() for layer in model.model.layers]
    assert max(radii) < 1
    prompt, options = torch.arange(2, 9)[None], {"max_new_tokens": 100, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options))


def test_old_folders_keep_what_their_configuration_says(tmp_path):
    """Those of before the constraint was the default; whatever else is overridden at load."""
    model_with_pole(0.9).save_pretrained(tmp_path)
    assert '"rtf_constraint": null' in (tmp_path / "config.json").read_text()
    for options in ({}, {"max_position_embeddings": 128}):
        config = TnnConfig.from_pretrained(tmp_path, **options)
        assert (config.rtf_constraint, config.rtf_initializer) == (None, "zeros")
    assert TnnConfig(tno_type="rtf").rtf_constraint == "l1_montel"


def test_trainer_projects(tmp_path, monkeypatch):
    """In each step; on an accelerator every few steps, and at the end."""
    model = model_with_pole(1.25)
    train(model, [PoleCallback(max_radius=0.95)], tmp_path)
    assert find_unstable(model.eval(), 0.9501) == []
    assert spectral_radius(model.model.layers[1].mixer.tno.denominator[3:4]).item() > 0.9
    prompt, options = torch.arange(2, 9)[None], {"max_new_tokens": 100, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options))
    steps = []
    monkeypatch.setattr(poles, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(poles, "project_poles", lambda model, radius: steps.append(radius))
    train(model, [PoleCallback(max_radius=0.95, every=3)], tmp_path)
    assert steps == [0.95] * 2, "after steps 3 and 4"
