"""torch.func and forward-mode differentiation through the fused products, against eager ones, in float64."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import cross_entropy, silu
from torch.utils._pytree import tree_leaves

from helpers.derivatives import WAYS, every_operator, gated, language_model, mask_of, operator_and_input
from helpers.models import random, relative_error
from modeling_tnn.tno_rtf import RationalTaps
from modeling_tnn.tno_ski import InducingGrid, Prolong, Restrict
from modeling_tnn.toeplitz_fused import Gate, activated_product


def inputs_of(length: int = 5):
    return random(1, length, 2).detach(), random(2, 3).detach(), (random(1, length, 2) * 0.9).detach()


TRANSFORMS = {
    "vjp": lambda f, x: vjp(f, *x)[1](f(*x).cos()),
    "jvp": lambda f, x: jvp(f, x, tuple(t.cos() for t in x)),
    "grad": lambda f, x: grad(lambda *y: f(*y).square().sum(), argnums=(0, 1, 2))(*x),
    "jacrev": lambda f, x: jacrev(f, argnums=(0, 1, 2))(*x),
    "jacfwd": lambda f, x: jacfwd(f, argnums=(0, 1, 2))(*x),
    "hessian": lambda f, x: hessian(lambda *y: f(*y).square().sum(), argnums=(0, 1, 2))(*x),
    "vmap": lambda f, x: vmap(f)(*(torch.stack([t, t.sin(), t + 1]) for t in x)),
    "vmap of grad": lambda f, x: vmap(grad(lambda v: f(v, *x[1:]).square().sum()))(torch.stack([x[0], x[0] + 1])),
    "grad of vmap": lambda f, x: grad(lambda v: vmap(f, (0, None, None))(v, *x[1:]).square().sum())(
        torch.stack([x[0], x[0] + 1])
    ),
}


def compare(ways, tolerance=1e-12):
    actual, expected = (tree_leaves(way) for way in ways)
    for one, other in zip(actual, expected, strict=True):
        assert relative_error(one, other) < tolerance


@pytest.mark.parametrize("length", [1, 3, 17])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gated_product(transform, masked, length):
    mask = mask_of(length)[:1] if masked else None
    ways = [partial(gated, product, mask=mask) for product in WAYS]
    compare([TRANSFORMS[transform](way, inputs_of(length)) for way in ways])


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_long_sequence(transform):
    """For which the fast product takes several windows."""
    if transform in ("jacrev", "jacfwd", "hessian"):
        pytest.skip("a matrix of 1,200 columns")
    compare([TRANSFORMS[transform](partial(gated, product), inputs_of(601)) for product in WAYS])


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_activated_product(transform):
    def units(product, a, b, c):
        return activated_product(a, c, silu, product) + b.sum()

    compare([TRANSFORMS[transform](partial(units, product), inputs_of()) for product in WAYS])


def dual_tangent(function, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


@every_operator
def test_operators(operator):
    found = []
    for product in WAYS:
        tno, v = operator_and_input(operator, product)
        v, parameters = v.detach(), {name: p.detach() for name, p in tno.named_parameters()}
        gate = v.cos()

        def mixed(p, v, tno=tno, gate=gate):
            return functional_call(tno, p, (v, Gate(gate, silu)))

        def loss(p, v, mixed=mixed):
            return mixed(p, v).square().sum()

        def penalty(p, v, loss=loss):
            return grad(loss, argnums=1)(p, v).square().sum()

        tangents = {name: p.cos() for name, p in parameters.items()}
        found.append(
            [
                grad(loss, argnums=(0, 1))(parameters, v),
                grad(penalty)(parameters, v),
                jvp(mixed, (parameters, v), (tangents, v.cos())),
                jvp(grad(loss), (parameters, v), (tangents, v.cos())),
                vmap(mixed, (None, 0))(parameters, torch.stack([v, v.sin(), v + 1])),
                dual_tangent(partial(mixed, parameters), v, v.cos()),
            ]
        )
    compare(found, 1e-9)


@every_operator
def test_gradients_of_each_example(operator):
    """`vmap` of `grad` over the rows of a batch, of a whole language model."""
    if "spatial_dims" in operator[2]:
        pytest.skip("an image is no text")
    found = []
    for product in WAYS:
        model = language_model(operator, product)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        ids = torch.arange(34).view(2, 17) * 7 % 23

        def loss(p, row, mask, model=model):
            inputs = {"input_ids": row[None], "attention_mask": mask[None]}
            return cross_entropy(functional_call(model, p, kwargs=inputs).logits[0], row)

        found.append(vmap(grad(loss), (None, 0, 0))(parameters, ids, mask_of(17)))
        single = grad(loss)(parameters, ids[1], mask_of(17)[1])
        compare([{name: g[1] for name, g in found[-1].items()}, single], 1e-9)
    compare(found, 1e-9)


def test_batched_backward():
    """Many vectors at once through a graph that the fast functions have made."""
    grid = InducingGrid(7, 3, 6)
    cases = [
        (partial(gated, "fused"), [x.requires_grad_() for x in inputs_of()]),
        (lambda a, b: activated_product(a, b, silu, "fused"), [random(2, 3), random(2, 3) * 0.9]),
        (lambda *x: RationalTaps.apply(*x, 8, 7, torch.float64), [random(2, 3) * 0.2, random(4, 3), random(4)]),
        (lambda x: Restrict.apply(x, grid), [random(2, 7)]),
        (lambda z, x: Prolong.apply(z, x, grid), [random(2, 4), random(2, 7)]),
    ]
    for function, inputs in cases:
        y = function(*inputs)
        vectors = torch.stack([y.detach().sin(), y.detach().cos()])
        for create_graph in (False, True):
            batched = torch.autograd.grad(
                y, inputs, vectors, is_grads_batched=True, retain_graph=True, create_graph=create_graph
            )
            singly = [torch.autograd.grad(y, inputs, vector, retain_graph=True) for vector in vectors]
            compare([batched, [torch.stack(parts) for parts in zip(*singly, strict=True)]])
