"""What every operator of the table keeps: it is its dense matrix, causal if it says so, and the same for a prefix."""

import pytest
import scipy.signal
import torch
from conftest import BIDIRECTIONAL, CAUSAL, relative_error, seeded, tiny_config

from modeling_tnn.operators import build_tno
from modeling_tnn.toeplitz import dense_toeplitz

LENGTHS = [1, 2, 3, 17, 63, 64, 100, 257]


def random_operator(tno_type, causal, **fields):
    """An operator in float64 whose parameters are all random, biases too."""
    operator = seeded(build_tno, tiny_config(tno_type, causal, **fields)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        operator.reset_parameters()
        for parameter in operator.parameters():
            scale = 0.1 if tno_type == "rtf" else 0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return operator


def random_input(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_its_dense_matrix(variant, length):
    operator = random_operator(*variant)
    v = random_input(2, length, operator.channels).requires_grad_()
    cotangent = random_input(2, length, operator.channels) + 1
    inputs = [v, *operator.parameters()]

    def gradients(y):
        return torch.autograd.grad((y * cotangent).sum(), inputs, allow_unused=True, materialize_grads=True)

    fast, dense = operator(v), torch.einsum("dij,bjd->bid", operator.dense(length), v)
    assert relative_error(fast, dense) < 1e-12
    for actual, expected in zip(gradients(fast), gradients(dense), strict=True):
        assert (actual - expected).abs().max() <= 1e-11 * expected.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("length", LENGTHS)
def test_float32_is_close_to_float64(variant, length):
    operator = random_operator(*variant)
    v = random_input(2, length, operator.channels)
    exact = operator(v)
    assert relative_error(operator.float()(v.float()), exact) < 2e-5


def test_causality_by_gradients(variant):
    operator = random_operator(*variant)
    length, position = 33, 20
    v = random_input(1, length, operator.channels).requires_grad_()
    (gradient,) = torch.autograd.grad(operator(v)[0, position].sum(), v)
    assert gradient[0, : position + 1].abs().max() > 0
    after = gradient[0, position + 1 :].abs().max()
    assert after < 1e-12 if operator.causal else after > 1e-3


@pytest.mark.parametrize("tno_type", CAUSAL)
@pytest.mark.parametrize("shorter, longer", [(1, 2), (17, 64), (63, 100), (64, 257), (200, 300)])
def test_prefix_consistency(tno_type, shorter, longer):
    operator = random_operator(tno_type, True)
    prefix, kernel = operator.coefficients(shorter), operator.coefficients(longer)
    assert kernel.shape == (operator.channels, longer)
    assert relative_error(prefix, kernel[:, :shorter]) < 1e-12
    v = random_input(2, longer, operator.channels)
    assert relative_error(operator(v[:, :shorter]), operator(v)[:, :shorter]) < 1e-12


def test_bidirectional_coefficients_do_not_depend_on_the_length():
    for tno_type in BIDIRECTIONAL:
        operator = random_operator(tno_type, False)
        narrow, wide = operator.coefficients(20), operator.coefficients(50)
        assert relative_error(narrow, wide[:, 30:-30]) < 1e-12


def test_batch_independence(variant):
    operator = random_operator(*variant)
    v = random_input(5, 63, operator.channels)
    assert relative_error(operator(v)[3:4], operator(v[3:4])) < 1e-14


def test_kernel_is_computed_in_float32_whatever_the_model(variant):
    """bfloat16 parameters, and autocast: the coefficients stay those of the rounded parameters in float32."""
    operator = random_operator(*variant).bfloat16()
    v = random_input(2, 200, operator.channels, dtype=torch.bfloat16)
    rounded = operator(v)
    exact = operator.double()(v.double())
    assert rounded.dtype == torch.bfloat16
    assert relative_error(rounded, exact) < 1e-2
    operator.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(operator(v.float()), exact) < 2e-5


@pytest.mark.parametrize("decay", [None, 1, 0.9])
def test_decay(decay):
    plain, decayed = random_operator("rpe", False, decay=None), random_operator("rpe", False, decay=decay)
    lags = torch.arange(-49, 50, dtype=torch.float64).abs()
    expected = plain.coefficients(50) * (1.0 if decay is None else decay) ** lags
    assert relative_error(decayed.coefficients(50), expected) < 1e-14


def test_learnable_decay_stays_between_its_bound_and_one():
    operator = random_operator("rpe", True, decay=0.9, learnable_decay=True)
    with torch.no_grad():
        operator.decay_logit.copy_(torch.linspace(-50, 50, operator.channels))
    plain = random_operator("rpe", True, decay=None)
    plain.load_state_dict(operator.state_dict(), strict=False)
    ratio = (operator.coefficients(11) / plain.coefficients(11))[:, 10]
    assert ratio[0].item() == pytest.approx(0.9**10)
    assert ratio[-1].item() == pytest.approx(1.0)


def test_fd_causal_kernel_has_the_hilbert_transform_as_imaginary_part():
    """The response of the causal kernel is the analytic signal of the even one."""
    operator = random_operator("fd", True)
    size = 2 * operator.resolution
    real = operator.response()
    even = torch.fft.irfft(real, n=size)
    even[:, operator.resolution] = 0  # the lag of both signs, which we drop
    full = torch.fft.fft(even).real.detach().numpy()
    kernel = operator.coefficients(operator.resolution).detach()
    response = torch.fft.fft(kernel, n=size).numpy()
    assert abs(response - scipy.signal.hilbert(full, axis=-1).conj()).max() < 1e-12


def test_fd_kernel_ends_with_its_grid():
    operator = random_operator("fd", True, fd_resolution=32)
    kernel = operator.coefficients(100)
    assert kernel[:, :32].abs().min() > 0 and kernel[:, 32:].abs().max() == 0


def test_ski_is_exactly_toeplitz_at_full_rank():
    operator = random_operator("ski", False, ski_rank=64)
    assert relative_error(operator.dense(64), dense_toeplitz(operator.coefficients(64))) < 1e-13


def test_ski_approximates_its_kernel():
    """Linear interpolation of a smooth kernel: the error falls with the square of the distance of the points."""
    errors = []
    for rank in (9, 33):
        operator = random_operator("ski", False, ski_rank=rank, max_position_embeddings=65, ski_decay=0.99)
        ramp = torch.arange(1, rank + 1, dtype=torch.float64) / rank
        with torch.no_grad():
            operator.alphas.copy_(ramp)
            operator.betas.copy_(ramp.flip(0))
        errors.append(relative_error(operator.dense(65), dense_toeplitz(operator.coefficients(65))))
    assert errors[1] < errors[0] / 3


def test_rtf_with_montel_constraint_is_stable():
    operator = random_operator("rtf", True)
    with torch.no_grad():
        operator.denominator.mul_(100)
    form = operator.companion_form()
    assert (form.denominator.abs().sum(-1) < 1).all()
    assert operator.coefficients(1000).isfinite().all()


def test_only_causal_operators_have_a_recurrence():
    with pytest.raises(ValueError, match="causal"):
        random_operator("rtf", False).recurrence()


def test_unknown_operator():
    config = tiny_config()
    vars(config)["tno_type"] = "dct"  # an assignment is refused by the configuration
    with pytest.raises(ValueError, match="'dct'.*rpe, fd, ski, rtf, modal"):
        build_tno(config)
