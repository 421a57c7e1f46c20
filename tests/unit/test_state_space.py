"""State-space models, transfer functions and Toeplitz matrices are each other. scipy is the oracle."""

import numpy as np
import pytest
import torch
from scipy import signal

from helpers.models import relative_error, seeded, tiny_config
from helpers.operators import random_operator
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tno_rtf import CompanionForm, multiply_series, reciprocal_series
from modeling_tnn.toeplitz import dense_toeplitz, two_sided
from modeling_tnn.tools.state_space import (
    PartialFractions,
    StateSpace,
    from_partial_fractions,
    from_state_space,
    from_zeros,
    long_division,
    polynomial,
    set_filter,
    set_kernel,
    to_partial_fractions,
    to_state_space,
    to_zeros,
)

ORDERS = pytest.mark.parametrize("order", [1, 2, 5, 8])


def random_system(order: int, filters: int = 3) -> StateSpace:
    """Dense and stable."""
    generator = torch.Generator().manual_seed(order)
    shapes = ((filters, order, order), (filters, order), (filters, order), (filters,))
    transition, *others = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return StateSpace(0.9 * transition / torch.linalg.matrix_norm(transition, 2)[:, None, None], *others)


def matrices(system: StateSpace, channel: int) -> tuple[np.ndarray, ...]:
    """A, B, C and D of scipy."""
    transition, given, read, direct = (part[channel].numpy() for part in system)
    return transition, given[:, None], read[None], np.array([[direct]])


def whole(form: CompanionForm, channel: int) -> tuple[np.ndarray, np.ndarray]:
    """The numerator with h_0 a in it, as scipy and equation 5 of the paper have it, and the denominator."""
    below = np.concatenate([[1.0], form.denominator[channel].numpy()])
    above = np.concatenate([[0.0], form.numerator[channel].numpy()])
    return above + form.direct[channel].item() * below, below


def in_order(roots) -> np.ndarray:
    return np.sort_complex(np.round(np.asarray(roots), 9))


@ORDERS
def test_transfer_function_of_matrices(order):
    """RTF equation 5 against scipy's, its kernel against scipy's impulse response and the powers of A."""
    system = random_system(order)
    form = from_state_space(system)
    taps = long_division(form, 40)
    for channel in range(3):
        above, below = signal.ss2tf(*matrices(system, channel))
        found = whole(form, channel)
        assert np.allclose(found[0], above[0], atol=1e-10) and np.allclose(found[1], below, atol=1e-10)
        impulse = np.eye(1, 40)[0]
        assert np.allclose(taps[channel], signal.lfilter(*found, impulse), atol=1e-10)
        _, (response,) = signal.dimpulse((*matrices(system, channel), 1), n=40)
        assert np.allclose(taps[channel], response[:, 0], atol=1e-10)


@ORDERS
def test_matrices_of_a_transfer_function(order):
    """The companion form (A.4) is another system with the same function, and so is any change of coordinates."""
    form = from_state_space(random_system(order))
    system = to_state_space(form)
    for channel in range(3):
        _, (response,) = signal.dimpulse((*matrices(system, channel), 1), n=30)
        assert np.allclose(long_division(form, 30)[channel], response[:, 0], atol=1e-10)
    change = torch.randn(3, order, order, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    transition = change @ system.transition @ change.inverse()
    given, read = (change @ system.input[..., None])[..., 0], (system.output[:, None] @ change.inverse())[:, 0]
    for actual, expected in zip(from_state_space(StateSpace(transition, given, read, form.direct)), form, strict=True):
        assert torch.allclose(actual, expected, atol=1e-7)  # lemma 3.1


@ORDERS
def test_partial_fractions(order):
    """Modal form (A.2.4): there and back, against scipy's residues; a diagonal A is its own modal form."""
    system = random_system(order)
    form = from_state_space(system)
    fractions = to_partial_fractions(form)
    for channel in range(3):
        above, below = whole(form, channel)
        residues, poles, _ = signal.residue(above - form.direct[channel].item() * below, below)
        found = dict(zip(in_order(fractions.poles[channel]), fractions.residues[channel].numpy(), strict=False))
        assert np.allclose(in_order(poles), in_order(fractions.poles[channel]), atol=1e-7)
        assert len(found) == order and np.allclose(sum(residues), fractions.residues[channel].sum(), atol=1e-6)
    for actual, expected in zip(from_partial_fractions(fractions), form, strict=True):
        assert torch.allclose(actual, expected, atol=1e-9)
    diagonal = torch.diag_embed(torch.linspace(-0.8, 0.9, order, dtype=torch.float64).expand(3, order))
    dense = StateSpace(diagonal, *system[1:])
    own = PartialFractions(
        diagonal.diagonal(dim1=1, dim2=2).to(torch.complex128),
        (system.input * system.output).to(torch.complex128),
        system.direct,
    )
    for actual, expected in zip(from_partial_fractions(own), from_state_space(dense), strict=True):
        assert torch.allclose(actual, expected, atol=1e-10)


@ORDERS
def test_zeros_and_poles(order):
    """Zero-pole-gain form (A.2.5) against scipy's, and back."""
    form = from_state_space(random_system(order))
    parts = to_zeros(form)
    for channel in range(3):
        zeros, poles, gain = signal.tf2zpk(form.numerator[channel].numpy(), whole(form, channel)[1])
        assert np.allclose(in_order(parts.zeros[channel]), in_order(zeros), atol=1e-7)
        assert np.allclose(in_order(parts.poles[channel]), in_order(poles), atol=1e-7)
        assert np.isclose(parts.gain[channel], gain)
    for actual, expected in zip(from_zeros(parts), form, strict=True):
        assert torch.allclose(actual, expected, atol=1e-9)


def test_a_numerator_that_begins_with_zero_has_fewer_zeros():
    form = CompanionForm(torch.zeros(2, 3), torch.tensor([[1.0, 2, 3], [0, 1, 2]]), torch.ones(2))
    with pytest.raises(ValueError, match="`form` must have numerators whose first coefficient is not 0"):
        to_zeros(form)


@ORDERS
@pytest.mark.parametrize("length", [1, 2, 3, 17, 63])
def test_long_division_and_power_series(order, length):
    """Two ways to the same kernel: B.3.1, and the one of `tno_rtf.py`."""
    form = from_state_space(random_system(order))
    series = multiply_series(form.numerator, reciprocal_series(form.denominator, length), length)
    expected = torch.cat([form.direct[:, None], series], dim=1)[:, :length]
    assert relative_error(long_division(form, length), expected) < 1e-12


def test_polynomial():
    roots = torch.tensor([[0.5 + 1j, 0.5 - 1j, -2.0]], dtype=torch.complex128)
    assert np.allclose(polynomial(roots)[0], np.poly(roots[0].numpy()))


@ORDERS
def test_a_state_space_model_is_a_toeplitz_matrix(order):
    """TNN equations 13 to 16: u_i = A u_{i-1} + B x_i and y_i = C u_i are y = T x with T_{i-j} = C A^{i-j} B."""
    transition, given, read, _ = random_system(order)
    x = torch.randn(3, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state, outputs = torch.zeros_like(given), []
    for now in x.unbind(1):
        state = (transition @ state[..., None])[..., 0] + given * now[:, None]
        outputs.append((read * state).sum(-1))
    # C u_i counts the input of the same step: it is C A x + C B in the form with a delay.
    later = (read[:, None] @ transition)[:, 0]
    taps = long_division(from_state_space(StateSpace(transition, given, later, (read * given).sum(-1))), 33)
    matrix = dense_toeplitz(two_sided(taps))  # (3, 33, 33)
    assert relative_error((matrix @ x[..., None])[..., 0], torch.stack(outputs, dim=1)) < 1e-10


def rtf_operator(causal: bool = True, order: int = 8, size: int = 64, **fields):
    settings = {"rtf_constraint": None, "rtf_num_denominators": None, "hidden_size": 2} | fields
    settings |= {"rtf_state_size": order, "max_position_embeddings": size}
    operator = seeded(build_tno, tiny_config("rtf", causal, **settings)).double()
    operator.reset_parameters()  # memory of any content otherwise, and `set_kernel` leaves the slacks as they are
    return operator


@pytest.mark.parametrize("size", [16, 63, 64])
def test_a_filter_of_an_operator(size):
    """Its kernel and its recurrence, beyond the samples too; the tail of a slow kernel wraps around in the samples."""
    poles = torch.polar(torch.tensor([0.98, 0.95, 0.5]), torch.tensor([0.3, 1.0, 2.0])).to(torch.complex128)
    poles = torch.cat([poles, poles.conj()]).expand(4, 6)
    residues = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.complex128)
    residues = torch.cat([residues, residues.conj()], dim=1)
    form = from_partial_fractions(PartialFractions(poles, residues, torch.arange(4).double()))
    operator = rtf_operator(order=6, size=size)
    set_filter(operator, form)
    assert relative_error(operator.coefficients(200), long_division(form, 200)) < 1e-9
    for actual, expected in zip(operator.companion_form(), form, strict=True):
        assert relative_error(actual, expected) < 1e-9
    shared = rtf_operator(order=6, size=size, rtf_num_denominators=2)
    set_filter(shared, form._replace(denominator=form.denominator[:2]))
    assert relative_error(shared.coefficients(200), long_division(form, 200)) < 1e-9


@pytest.mark.parametrize("fields", [{}, {"rtf_constraint": "l1_montel", "rtf_num_denominators": 2}])
@pytest.mark.parametrize("count", [1, 5, 9])
def test_a_kernel_of_an_operator(count, fields):
    """B.2: an explicit kernel of at most N + 1 taps, on both sides."""
    taps = torch.randn(8, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    operator = rtf_operator(causal=False, **fields)
    set_kernel(operator, taps)
    kernel = operator.coefficients(70)  # (4, 139): lags -69 .. 69
    assert relative_error(kernel[:, 69 : 69 + count], taps[:4]) < 1e-12
    assert relative_error(kernel[:, 69 - count : 69].flip(1), taps[4:]) < 1e-12
    others = torch.cat([kernel[:, : 69 - count], kernel[:, 69 + count :]], dim=1)
    assert others.abs().max() < 1e-12


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_an_s4d_layer_is_an_rtf_layer(discretization):
    """The same transfer function: kernels agree at any length."""
    fields = {"hidden_size": 2, "s4d_dt_min": 0.1, "s4d_dt_max": 0.5, "s4d_discretization": discretization}
    own = seeded(build_tno, tiny_config("s4d", **fields)).double()
    own.reset_parameters()
    poles, residues = own.powers(torch.ones(1))[..., 0], own.complex_residues()  # (4, 3) each
    both = [torch.cat([part, part.conj()], dim=1) for part in (poles, residues / 2)]
    form = from_partial_fractions(PartialFractions(*both, own.coefficients(1)[:, 0]))
    operator = rtf_operator(order=6)
    set_filter(operator, form)
    assert relative_error(operator.coefficients(300), own.coefficients(300)) < 1e-8


def test_what_an_operator_does_not_take():
    form = CompanionForm(torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4))
    with pytest.raises(ValueError, match="`operator` must have rtf_constraint=None .*, got 'l1_montel'"):
        set_filter(random_operator("rtf", True), form)
    with pytest.raises(ValueError, match=r"`form.numerator` must be of shape \(4, 8\), got \(4, 7\)"):
        set_filter(rtf_operator(), form._replace(numerator=torch.zeros(4, 7)))
    for shape in [(4, 10), (3, 8), (4, 0), (4,)]:
        with pytest.raises(ValueError, match=r"`taps` must be of shape \(4, 1 to 9\), got"):
            set_kernel(rtf_operator(), torch.zeros(shape))
