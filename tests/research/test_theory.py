"""What the papers state: theorems, special cases (convolutions, ALiBi), state-space models. scipy is an oracle."""

import numpy as np
import pytest
import torch
from scipy import signal
from torch.nn.functional import conv1d, pad
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from helpers.models import random, relative_error, seeded, tiny_config, two_sided
from helpers.operators import advance
from modeling_tnn import causal_toeplitz_matmul, dense_toeplitz, toeplitz_matmul
from modeling_tnn.cache_tnn import TnnCacheLayer
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tno_rtf import companion_matrix, monic, rational_kernel

pytestmark = pytest.mark.slow


SIZES = (1, 2, 17, 40)


def convolved(v: torch.Tensor, filters: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """PyTorch's convolution of `v` `(B, L, D)`, one filter `(K,)` for each channel, padded with zeros."""
    x = pad(v.transpose(1, 2), (left, right))
    return conv1d(x, filters[:, None], groups=len(filters)).transpose(1, 2)


def check(product, expected, inputs):
    """In values and gradients."""
    actual, expected = product(*inputs), expected(*inputs)
    assert relative_error(actual, expected) < 1e-13
    weights = torch.randn_like(actual)
    for one, other in zip(
        *(torch.autograd.grad((y * weights).sum(), inputs) for y in (actual, expected)), strict=True
    ):
        assert relative_error(one, other) < 1e-13


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_convolutions(size):
    """PyTorch's filters are in the order of the positions, so the last tap of a causal one is that of lag 0.

    With `padding="same"`, an even filter reaches one position further to the right, and lacks a lag.
    """
    left = (size - 1) // 2

    def product(v, filters):
        lags = filters.flip(1)  # from lag -(size - 1 - left) to left
        return toeplitz_matmul(v, pad(lags, (0, size - 1 - 2 * left)))

    for length in (1, 17, 64):
        inputs = [random(2, length, 3), random(3, size)]
        check(
            lambda v, filters: causal_toeplitz_matmul(v, filters.flip(1)),
            lambda v, filters: convolved(v, filters, size - 1, 0),
            inputs,
        )
        check(product, lambda v, filters: convolved(v, filters, left, size - 1 - left), inputs)
        same = conv1d(inputs[0].transpose(1, 2), inputs[1][:, None], groups=3, padding="same")
        assert relative_error(product(*inputs), same.transpose(1, 2)) < 1e-13


@pytest.mark.parametrize("heads", [1, 3])
def test_alibi_is_a_decay_of_the_exponentials(heads):
    """Equations 6 to 8: it multiplies them, entry by entry, with the Toeplitz matrix of lambda^(i - j)."""
    length = 33
    bias, rates = alibi(heads, length)
    scores, kernel = random(heads, length, length), rates[:, None] ** torch.arange(length)
    future = ~torch.ones(length, length).tril().bool()
    expected = (scores.exp() * dense_toeplitz(two_sided(kernel))).tril()
    weights = (scores + bias).masked_fill(future, -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(weights, expected / expected.sum(dim=-1, keepdim=True))
    weights = bias.masked_fill(future, -torch.inf).softmax(dim=-1)
    assert (weights[:, -1, -1] / weights[:, 0, 0] < 0.7).all(), "so the matrix of the softmax is no Toeplitz matrix"


@pytest.mark.parametrize("causal", [True, False])
def test_relative_positions_without_queries_and_keys(causal):
    """Equation 9 with any T: the product of exp(T) with the values over that with ones, by which softmax divides."""
    lags, v = random(3, 65), random(2, 33, 3)
    lags = lags.where(torch.arange(65) >= (32 if causal else 0), -torch.inf)
    expected = torch.einsum("hij,bjh->bih", dense_toeplitz(lags).softmax(dim=-1), v)
    actual = toeplitz_matmul(v, lags.exp()) / toeplitz_matmul(torch.ones_like(v), lags.exp())
    assert relative_error(actual, expected) < 1e-13


def alibi(heads: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' bias of each head, `(H, L, L)`, and the rates lambda = exp(m), `(H,)`.

    Its bias grows with the column instead of falling with the distance: rows differ by a constant, which softmax
    does not see. Its slopes are bfloat16 in the model and exact here.
    """
    bias = build_alibi_tensor(torch.ones(1, length), heads, torch.float64)  # (H, 1, L)
    return bias.expand(-1, length, -1), (bias[:, 0, 0] - bias[:, 0, 1]).exp()


def random_system(order: int, seed: int) -> tuple[np.ndarray, ...]:
    """Matrices A, B, C and D of scipy, dense and stable."""
    random = np.random.default_rng(seed)
    transition, given, read, direct = (random.normal(size=s) for s in ((order, order), (order, 1), (1, order), (1, 1)))
    return 0.9 * transition / np.linalg.norm(transition, 2), given, read, direct


def impulse_response(system: tuple, length: int) -> np.ndarray:
    return signal.dimpulse((*system, 1), n=length)[1][0][:, 0]


def rtf_operator(causal: bool = True, order: int = 8, size: int = 64, **fields):
    """Four filters (eight of a bidirectional operator) in float64."""
    settings = {"rtf_constraint": None, "rtf_num_denominators": None, "hidden_size": 2} | fields
    settings |= {"rtf_state_size": order, "max_position_embeddings": size}
    operator = seeded(build_tno, tiny_config("rtf", causal, **settings)).double()
    operator.reset_parameters()
    return operator


@torch.no_grad()
def set_filter(operator, denominator: torch.Tensor, taps: torch.Tensor):
    """Give the parameters whose F samples are `taps` `(D, F)`, of filters with the denominators `(D, N)`.

    The tail of each kernel wraps around in the samples.
    """
    below, size = monic(denominator), operator.size
    above = torch.fft.irfft(torch.fft.rfft(below, n=size) * torch.fft.rfft(taps, n=size), n=size)  # (D, F)
    operator.denominator.copy_(denominator)
    operator.direct.copy_(above[:, 0])
    operator.numerator.copy_(above[:, 1 : below.shape[1]] - above[:, :1] * below[:, 1:])


@pytest.mark.parametrize(("order", "size"), [(1, 64), (2, 63), (5, 64)])
@torch.no_grad()
def test_a_state_space_model_is_an_rtf_operator(order, size):
    """RTF equation 5, listing 1, A.2, A.4 and B.3.1: every form of a system has the kernel of the operator."""
    systems = [random_system(order, seed) for seed in range(4)]
    below = np.stack([np.poly(transition) for transition, *_ in systems])  # a, from the eigenvalues of A
    above = np.stack([np.poly(a - b @ c) for a, b, c, _ in systems]) - below  # b, from those of A - B C
    taps = torch.from_numpy(np.stack([impulse_response(system, 200) for system in systems]))
    operator = rtf_operator(order=order, size=size)
    set_filter(operator, torch.from_numpy(below[:, 1:]), taps[:, : operator.size])
    assert relative_error(operator.coefficients(200), taps) < 1e-9
    form = operator.companion_form()
    for found, expected in ((monic(form.denominator), below), (form.numerator, above[:, 1:])):
        assert relative_error(found, torch.from_numpy(expected)) < 1e-9
    for channel, system in enumerate(systems):
        a, b, direct = below[channel], above[channel], system[3].item()
        assert np.allclose(signal.ss2tf(*system)[0][0], b + direct * a, atol=1e-10)
        long_division = signal.lfilter(b + direct * a, a, np.eye(1, 200)[0])
        residues, poles, _ = signal.residue(b, a)
        modal = np.array([direct, *((residues * poles**lag).sum().real for lag in range(199))])
        zeros_and_poles = impulse_response(signal.tf2zpk(b + direct * a, a), 200)
        companion = companion_matrix(form.denominator)[channel].numpy(), np.eye(order, 1), b[None, 1:], system[3]
        for response in (long_division, modal, zeros_and_poles, impulse_response(companion, 200)):
            assert np.allclose(response, taps[channel], atol=1e-9)


@pytest.mark.parametrize("size", [8, 9, 40])
@torch.no_grad()
def test_a_truncated_transfer_function(size):
    """RTF lemmas 3.2 to 3.4, equation 13: taps by samples without a tail. Of l = 8 samples tap l falls on tap 0."""
    length, roots = 8, np.exp(2j * np.pi * np.arange(size) / size)
    given, read, direct = (system := random_system(5, 0))[1:]
    transition, taps = system[0], impulse_response(system, 400)
    resolvents = np.linalg.inv(roots[:, None, None] * np.eye(5) - transition)
    whole = (read @ resolvents @ given + direct).ravel()
    assert np.allclose(whole, np.polynomial.polynomial.polyval(1 / roots, taps))  # it converges on the unit circle
    power = np.linalg.matrix_power(transition, length)
    tail = (read @ power @ resolvents @ given).ravel() * roots**-length
    expected = np.zeros(max(size, length + 1))
    expected[: length + 1] = taps[: length + 1]
    if size == length:
        expected[0] += expected[length]
        below, shorter = np.poly(transition), read @ (np.eye(5) - power)
        above = np.poly(transition - given @ shorter) - below
        samples = np.fft.fft(above, size) / np.fft.fft(below, size) + direct.item()  # of padded coefficients
        kernel = rational_kernel(*(torch.from_numpy(one[None, 1:]) for one in (below, above)), size)
        assert np.allclose(samples, whole - tail) and np.allclose(kernel[0, 1:], expected[1:length])
    assert np.allclose(np.fft.ifft(whole - tail), expected[:size])


@torch.no_grad()
def test_an_initial_state():
    """RTF A.1.5: after a prompt that leaves the state x, C A^t x is added to the outputs of what follows."""
    operator, layer, prompt, v = rtf_operator(rtf_constraint="l1_montel"), TnnCacheLayer(), *random(2, 2, 30, 4)
    advance(layer, prompt, operator)
    form, state, echo = operator.companion_form(), torch.zeros(2, 4, 8, 1, dtype=v.dtype), []
    matrix = companion_matrix(form.denominator)  # (D, N, N)
    for u in prompt.unbind(1):
        state = matrix @ state
        state[..., 0, 0] += u
    for _ in range(v.shape[1]):
        echo.append((form.numerator[:, None] @ state)[..., 0, 0])
        state = matrix @ state
    expected = causal_toeplitz_matmul(v, operator.coefficients(30)) + torch.stack(echo, dim=1)
    assert relative_error(advance(layer, v, operator), expected) < 1e-12
    assert torch.stack(echo).abs().max() > 1e-3


@pytest.mark.parametrize("size", [64, 63])
@torch.no_grad()
def test_a_repeated_pole(size):
    """What no diagonal form has (RTF 3.1): 1 / (1 - 0.9 / z)^2 has the taps (k + 1) 0.9^k."""
    operator = rtf_operator(order=2, size=size)
    lags = torch.arange(300, dtype=torch.float64)
    taps = ((lags + 1) * 0.9**lags).expand(4, -1)
    set_filter(operator, torch.tensor([[-1.8, 0.81]], dtype=torch.float64).expand(4, -1), taps[:, : operator.size])
    assert relative_error(operator.coefficients(300), taps) < 1e-9
    state = companion_matrix(operator.companion_form().denominator)[0]
    repeated = state - 0.9 * torch.eye(2, dtype=torch.float64)
    assert torch.linalg.matrix_rank(repeated, atol=1e-6) == 1, "a Jordan block: it has one eigenvector, not two"


@pytest.mark.parametrize(
    ("count", "fields"), [(1, {}), (9, {}), (5, {"rtf_constraint": "l1_montel", "rtf_num_denominators": 2})]
)
@torch.no_grad()
def test_an_explicit_kernel_is_an_rtf_operator(count, fields):
    """RTF appendix B.2: h_0 = k_0, a_i = 0 and b_i = k_i, at most N + 1 taps, on both sides, with any constraint."""
    taps = torch.randn(8, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    operator = rtf_operator(causal=False, **fields)
    for parameter in (operator.denominator, operator.numerator):
        parameter.zero_()
    operator.direct.copy_(taps[:, 0])
    operator.numerator[:, : count - 1] = taps[:, 1:]
    kernel = operator.coefficients(70)  # (4, 139): lags -69 .. 69
    assert relative_error(kernel[:, 69 : 69 + count], taps[:4]) < 1e-12
    assert relative_error(kernel[:, 69 - count : 69].flip(1), taps[4:]) < 1e-12
    assert torch.cat([kernel[:, : 69 - count], kernel[:, 69 + count :]], dim=1).abs().max() < 1e-12


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_an_s4d_layer_is_an_rtf_layer(discretization):
    """The same transfer function: kernels agree at any length."""
    fields = {"hidden_size": 2, "s4d_dt_min": 0.1, "s4d_dt_max": 0.5, "s4d_discretization": discretization}
    own = seeded(build_tno, tiny_config("s4d", **fields)).double()
    own.reset_parameters()
    poles = own.powers(torch.ones(1))[..., 0].detach().numpy()  # (4, 3): one of each conjugate pair
    denominator = np.stack([np.poly([*row, *row.conj()]).real[1:] for row in poles])
    operator = rtf_operator(order=6)
    set_filter(operator, torch.from_numpy(denominator), own.coefficients(operator.size))
    assert relative_error(operator.coefficients(300), own.coefficients(300)) < 1e-8
