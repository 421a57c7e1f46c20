"""Derivatives of derivatives through the fast products: those of PyTorch's own operations, `implementation="eager"`.

A custom function with one derivative gives wrong second ones without an error, unless its own node happens to be
executed again. Compared in float64.
"""

from functools import partial

import pytest
import torch
from torch.autograd.functional import hessian, hvp, jacobian
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from helpers.derivatives import WAYS, every_operator, gated, language_model, mask_of, operator_and_input, plain_taps
from helpers.models import checkpoint_activations, random, relative_error
from modeling_tnn import toeplitz_fused
from modeling_tnn.tno_rtf import RationalTaps
from modeling_tnn.tno_ski import InducingGrid, Prolong, Restrict
from modeling_tnn.toeplitz import causal_toeplitz_matmul, gated_convolution, toeplitz_matmul
from modeling_tnn.toeplitz_fused import Gate, activated_product

LENGTHS = [1, 2, 3, 17, 63]


@pytest.fixture(params=[False, True], ids=["one window", "windows"])
def short_windows(request, monkeypatch):
    """Several windows at lengths that a test can afford."""
    if request.param:
        monkeypatch.setattr(toeplitz_fused, "SHORTEST_WINDOW", 8)


def waves(like: torch.Tensor) -> torch.Tensor:
    """Fixed weights that no symmetry cancels."""
    return torch.arange(1, like.numel() + 1, dtype=like.dtype).sin().view(like.shape)


def derivatives(function, inputs, orders: int = 3) -> list[torch.Tensor]:
    """The gradients of a functional of `function`, of one of those gradients, and so on."""
    y, found = function(*inputs), []
    value = (y.square() * waves(y)).sum()
    for _ in range(orders):
        gradients = torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True)
        found += gradients
        value = sum((g.square() * waves(g)).sum() for g in gradients)
    return [g.detach() for g in found]


def compare(ways, inputs, tolerance=1e-10, orders=3):
    """First, second and third derivatives of two functions."""
    for actual, expected in zip(*(derivatives(function, inputs, orders) for function in ways), strict=True):
        assert relative_error(actual, expected) < tolerance


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
def test_gated_product(causal, length, masked, short_windows):
    matmul, taps = (causal_toeplitz_matmul, 2) if causal else (toeplitz_matmul, 3)
    inputs = (random(2, length, 3), random(3, taps), random(2, length, 3) * 0.9)
    mask = mask_of(length) if masked else None
    compare([partial(gated, product, matmul=matmul, mask=mask) for product in WAYS], inputs)


@pytest.mark.parametrize("length", LENGTHS)
def test_product_without_a_gate(length):
    inputs = (random(2, length, 3), random(3, 2 * length - 1))
    compare([partial(toeplitz_matmul, implementation=product) for product in WAYS], inputs)


@pytest.mark.parametrize("length", [3, 8])
def test_product_with_a_response(length):
    def filtered(product, v, response, u):
        return gated_convolution(v, response, 0, product, Gate(u, silu))

    inputs = (random(2, length, 3), random(2, 3, 9), random(2, length, 3) * 0.9)
    compare([partial(filtered, product) for product in WAYS], inputs)


def test_a_long_sequence():
    inputs = (random(2, 601, 3), random(3, 33), random(2, 601, 3) * 0.9)
    assert toeplitz_fused.windows_of(torch.empty(1, 601, 1), torch.empty(1, 33), 0).count > 1
    compare([partial(gated, product, mask=mask_of(601)) for product in WAYS], inputs)


def test_activated_product():
    inputs = (random(2, 9, 2), random(2, 9, 2) * 0.9)
    compare([lambda a, b, way=way: activated_product(a, b, silu, way) for way in WAYS], inputs)


@pytest.mark.parametrize("denominators", [1, 2, 6])
@pytest.mark.parametrize("size, length", [(8, 1), (8, 7), (18, 18)])
def test_rational_taps(denominators, size, length):
    inputs = (random(denominators, 3) * 0.2, random(6, 3), random(6))
    ways = (
        lambda *x: RationalTaps.apply(*x, size, length, torch.float64),
        partial(plain_taps, size=size, length=length),
    )
    compare(ways, inputs)


@pytest.mark.parametrize("length", [1, 2, 17, 63])
def test_interpolation(length):
    grid = InducingGrid(length, 5, 62)
    weights = grid.matrix(torch.zeros(1, dtype=torch.float64))
    inputs = (random(3, grid.num_points), random(3, length))
    compare(
        (
            lambda z, x: Prolong.apply(z.sin() * Restrict.apply(x.sin(), grid), x, grid),
            lambda z, x: (z.sin() * (x.sin() @ weights)) @ weights.t() + x,
        ),
        inputs,
    )


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs(frozen):
    inputs = [random(2, 9, 2), random(2, 4), random(2, 9, 2)]
    inputs[frozen].requires_grad_(False)

    def of_the_others(product, *others):
        return gated(product, *others[:frozen], inputs[frozen], *others[frozen:])

    compare([partial(of_the_others, product) for product in WAYS], [x for x in inputs if x.requires_grad])


def test_inputs_that_depend_on_one_another():
    """A gradient that reaches one input through another is not counted twice."""

    def of_one(product, x):
        v = x.sin()
        kernel = (v[:, :3].sum(0) * v.sum(1)[:1]).t()  # (3, 3)
        return gated(product, v, kernel, v * x) + activated_product(v, v, silu, product)

    compare([partial(of_one, product) for product in WAYS], (random(2, 7, 3),))


def test_low_precision():
    inputs = [random(2, 17, 3).bfloat16(), random(3, 17).float(), random(2, 17, 3).bfloat16()]
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = [derivatives(partial(gated, product), inputs, 2) for product in WAYS]
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert relative_error(actual, expected) < 0.05


def test_gradgradcheck(short_windows):
    inputs = (random(1, 17, 1), random(1, 2), random(1, 17, 1) * 0.9)
    assert torch.autograd.gradgradcheck(partial(gated, "fused", mask=mask_of(17)[:1]), inputs)
    assert torch.autograd.gradgradcheck(lambda v, k: toeplitz_matmul(v, k), (random(1, 5, 2), random(2, 9)))
    assert torch.autograd.gradgradcheck(partial(gated_convolution, first=0), (random(1, 4, 2), random(2, 2, 5)))
    assert torch.autograd.gradgradcheck(lambda a, b: activated_product(a, b, silu, "fused"), inputs[::2])
    parameters = (random(2, 3) * 0.2, random(4, 3), random(4))
    assert torch.autograd.gradgradcheck(lambda *x: RationalTaps.apply(*x, 8, 7, torch.float64), parameters)
    grid = InducingGrid(7, 3, 6)
    assert torch.autograd.gradgradcheck(lambda x: Restrict.apply(x, grid).sin(), (random(2, 7),))
    assert torch.autograd.gradgradcheck(lambda z, x: Prolong.apply(z, x, grid).sin(), (random(2, 4), random(2, 7)))


@pytest.mark.parametrize("vectorize", [False, True])
def test_functional(vectorize):
    """hvp, hessian and jacobian, the latter two also with all their products at once."""
    inputs = (random(1, 5, 2).detach(), random(2, 3).detach(), random(1, 5, 2).detach() * 0.9)
    found = []
    for product in WAYS:

        def loss(*x, product=product):
            return gated(product, *x).square().sum()

        blocks = hessian(loss, inputs, vectorize=vectorize)
        rows = jacobian(partial(gated, product), inputs, vectorize=vectorize)
        forward = jacobian(partial(gated, product), inputs, vectorize=True, strategy="forward-mode")
        found.append([*hvp(loss, inputs, inputs)[1], *(block for row in blocks for block in row), *rows, *forward])
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected) < 1e-12


def test_once_is_still_once():
    """Without `create_graph` the gradients have no graph."""
    inputs = [random(2, 9, 2), random(2, 4), random(2, 9, 2)]
    gradients = torch.autograd.grad(gated("fused", *inputs).sum(), inputs)
    assert not any(g.requires_grad for g in gradients)


@every_operator
@pytest.mark.parametrize("masked", [False, True])
def test_operators(operator, masked):
    """With respect to inputs, gates and parameters."""
    found = []
    for product in WAYS:
        tno, v = operator_and_input(operator, product)
        u, length = random(*v.shape) * 0.9, v.shape[1]
        gating = Gate(u, silu, mask_of(length) if masked else None)
        inputs = (v, u, *tno.parameters())
        found.append(derivatives(lambda *_, tno=tno, v=v, gating=gating: tno(v, gating), inputs, 2))
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected) < 1e-9


def penalty_gradients(model, length: int, mask=None) -> list[torch.Tensor]:
    """A gradient penalty on the embeddings, and its gradients."""
    embeddings = random(2, length, 8)
    logits = model(inputs_embeds=embeddings, attention_mask=mask).logits
    (gradient,) = torch.autograd.grad(logits.square().mean(), embeddings, create_graph=True)
    penalty = gradient.square().sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(penalty, parameters, materialize_grads=True)
    return [penalty.detach(), *gradients]


@every_operator
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_penalty_of_a_model(operator, masked):
    length = 25 if "spatial_dims" in operator[2] else 17
    mask = mask_of(length) if masked and "spatial_dims" not in operator[2] else None
    found = [penalty_gradients(language_model(operator, product), length, mask) for product in WAYS]
    largest = max(g.abs().max().item() for g in found[1][1:])
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected, scale=max(largest, 1e-300)) < 1e-9


@every_operator
def test_gradient_penalty_with_checkpointing(operator):
    length = 25 if "spatial_dims" in operator[2] else 17
    found = []
    for product in WAYS:
        model = language_model(operator, product).train()
        model.config.hidden_dropout_prob = 0.0
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if product == "fused":
            checkpoint_activations(model, {"use_reentrant": False})
        found.append(penalty_gradients(model, length))
    largest = max(g.abs().max().item() for g in found[1][1:])
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected, scale=largest) < 1e-9


def test_checkpointing_of_one_product():
    inputs = (random(2, 17, 3), random(3, 5), random(2, 17, 3) * 0.9)
    ways = (
        lambda *x: checkpoint(partial(gated, "fused"), *x, use_reentrant=False),
        partial(gated, "eager"),
    )
    compare(ways, inputs)


def test_penalty_against_differences():
    """An oracle without our derivatives: the penalty of a two-layer model along a line of its parameters."""
    model = language_model(("rpe", True, {}), "fused")
    parameters = list(model.parameters())
    direction = [waves(p) for p in parameters]
    slope = sum((g * d).sum() for g, d in zip(penalty_gradients(model, 17)[1:], direction, strict=True)).item()
    values, step = [], 1e-5
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=sign * step)
        values.append(penalty_gradients(model, 17)[0].item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5)
