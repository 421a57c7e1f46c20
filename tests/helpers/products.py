"""The promises of the Toeplitz product that every implementation inherits. The dense matrices are the oracle.

    class TestFused(ProductTests):
        implementation = "fused"

pytest then runs each test below. What an implementation does not promise, its class says in the fields.
"""

from functools import partial

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import silu
from torch.utils._pytree import tree_leaves
from transformers.activations import ACT2FN

from helpers.models import random, relative_error
from modeling_tnn.toeplitz import gated_convolution
from modeling_tnn.toeplitz_fused import NO_GATE, Gate, is_response

# Length, taps, and the first lag, which is -first: shorter and longer than one another, for one transform and several.
CAUSAL = [(1, 1, 0), (2, 1, 0), (3, 3, 0), (17, 5, 0), (63, 63, 0), (130, 64, 0), (257, 31, 0), (600, 3, 0)]
TWO_SIDED = [(1, 1, 0), (2, 3, 1), (3, 5, 2), (17, 7, 3), (64, 127, 63), (191, 139, 69), (257, 1, 0), (600, 75, 37)]

# Of functions of v, the kernel and the gate.
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


def dense_product(v, kernel, first: int = 0, gate: Gate = NO_GATE) -> torch.Tensor:
    """By definition: the taps of the lags from -`first` on, or those of a frequency response."""
    position = torch.arange(v.shape[1], device=v.device)
    lag = position[:, None] - position + first
    if is_response(kernel):
        inner = torch.ones_like(kernel[1])
        inner[:, [0, -1]] = 0
        taps = torch.fft.irfft(torch.complex(kernel[0], kernel[1] * inner))
        matrices = taps[:, lag % taps.shape[1]]
    else:
        matrices = kernel[:, lag.clamp(0, kernel.shape[1] - 1)] * ((lag >= 0) & (lag < kernel.shape[1]))
    return gate.apply(torch.einsum("dij,bjd->bid", matrices, gate.inputs(v)), "eager")


def mask_of(batch: int, length: int, device="cpu") -> torch.Tensor:
    return torch.arange(batch * length, device=device).view(batch, length) % 3 != 1


def waves(like: torch.Tensor) -> torch.Tensor:
    """Fixed weights that no symmetry cancels."""
    return torch.arange(1, like.numel() + 1, dtype=like.dtype, device=like.device).sin().view(like.shape)


def derivatives(function, inputs, orders: int = 3) -> list[torch.Tensor]:
    """The gradients of a functional of `function`, of one of those gradients, and so on."""
    y, found = function(*inputs), []
    value = (y.square() * waves(y)).sum()
    for _ in range(orders):
        gradients = torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True)
        found += gradients
        value = sum((g.square() * waves(g)).sum() for g in gradients)
    return [g.detach() for g in found]


def assert_close(actual, expected, tolerance: float, note=""):
    """All tensors of two results."""
    for one, other in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        assert relative_error(one, other) <= tolerance, note


def compare_derivatives(ways, inputs, tolerance: float = 1e-10, orders: int = 3):
    """First, second and third derivatives of two functions."""
    assert_close(*(derivatives(way, inputs, orders) for way in ways), tolerance)


class ProductTests:
    """The promises of one implementation; see above.

    Attributes:
        implementation: its name.
        tolerances: of each dtype that it takes, relative; twice as much for gradients.
        acts: the names of the activations that it computes.
        orders: how often it can be differentiated.
        takes_responses: whether a kernel can be a frequency response.
        transforms: whether functions under torch.func can call it.
    """

    implementation = ""
    device = "cpu"
    tolerances = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
    acts = ("silu", "linear", "relu2", "gelu", "tanh")
    orders = 3
    takes_responses = True
    transforms = tuple(TRANSFORMS)

    def pytest_generate_tests(self, metafunc):
        values = {"dtype": self.tolerances, "act": self.acts, "transform": self.transforms, "frozen": range(3)}
        for name in values:  # in this order: processes of xdist must collect the same
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, [*values[name]])

    def product(self, v, kernel, first: int = 0, gate: Gate = NO_GATE) -> torch.Tensor:
        return gated_convolution(v, kernel, first, self.implementation, gate)

    @property
    def precise(self) -> torch.dtype:
        return next(iter(self.tolerances))

    def inputs(self, length: int, taps: int, batch: int = 2, channels: int = 3) -> list[torch.Tensor]:
        """v, the kernel and the gate."""
        given = (
            random(batch, length, channels),
            random(channels, taps) / taps**0.5,
            random(batch, length, channels).flip(1) * 0.9,
        )
        return [x.detach().to(self.device, self.precise).requires_grad_() for x in given]

    def check(self, v, kernel, first: int, gate: Gate = NO_GATE, dtype=None, layout=lambda x: x):
        """Values and gradients are those of the dense matrices, and no input is changed.

        Args:
            layout: gives the inputs and the gradient of the result another memory layout.
        """
        dtype = dtype or self.precise
        given = [x if x is None else layout(x.detach().to(dtype)).detach().requires_grad_() for x in (v, gate.u)]
        given.append(kernel.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_())
        exact = [x if x is None else x.detach().double().requires_grad_() for x in given]
        y, expected = (
            way(x[0], x[2], first, gate._replace(u=x[1])) for way, x in ((self.product, given), (dense_product, exact))
        )
        note, tolerance = f"length {v.shape[1]}, taps {kernel.shape[-1]}, first {first}", self.tolerances[dtype]
        assert y.dtype == dtype
        assert_close(y.double(), expected, tolerance, note)
        cotangent = layout(waves(y.double()).to(dtype))
        gradients = [
            torch.autograd.grad((one * cotangent.to(one)).sum(), [x for x in inputs if x is not None])
            for one, inputs in ((y, given), (expected, exact))
        ]
        assert_close([g.double() for g in gradients[0]], gradients[1], 2 * tolerance, note)
        assert all(x is None or torch.equal(x.double(), copy) for x, copy in zip(given, exact, strict=True))

    @pytest.mark.parametrize("shapes", [CAUSAL, TWO_SIDED], ids=["causal", "two-sided"])
    def test_equals_the_dense_matrix(self, shapes, dtype):
        """In values and all gradients, at odd lengths, with short and long kernels, inside a gate with padding."""
        for length, taps, first in shapes:
            v, kernel, u = self.inputs(length, taps)
            self.check(v, kernel, first, Gate(u, silu, mask_of(2, length, self.device)), dtype)

    def test_every_gate(self, act):
        """And without a gate, an activation and a mask; of one sequence and of several."""
        for length, batch in ((1, 2), (65, 1), (65, 3)):
            v, kernel, u = self.inputs(length, 1 if length == 1 else 9, batch)
            for mask in (None, mask_of(batch, length, self.device)):
                for gate in (Gate(u, ACT2FN[act], mask), Gate(None, ACT2FN[act], mask), Gate(mask=mask)):
                    self.check(v, kernel, 0 if length == 1 else 4, gate)

    def test_memory_layouts(self):
        """Every order of the three dimensions, of the gradient too, and views with gaps and of one number."""
        v, kernel, u = self.inputs(70, 9, channels=4)
        gate = Gate(u, silu, mask_of(2, 70, self.device))
        for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
            back = [order.index(axis) for axis in range(3)]
            self.check(v, kernel, 0, gate, layout=lambda x, o=order, b=back: x.permute(o).contiguous().permute(b))
        self.check(v, kernel, 4, gate, layout=lambda x: torch.kron(x, torch.ones(2, 2, 2).to(x))[::2, ::2, ::2])
        self.check(v, kernel, 4, gate, layout=lambda x: x[:1, :1, :1].expand_as(x))
        self.check(v, torch.kron(kernel, torch.ones(2, 2).to(kernel))[::2, ::2], 4, gate)

    def test_a_frequency_response(self):
        if self.takes_responses:
            for length in (1, 3, 8):
                v, _, u = self.inputs(length, 1)
                response = random(2, 3, 9)
                self.check(v, response, 0, Gate(u, silu))
                ways = [lambda v, r, u, way=way: way(v, r, 0, Gate(u, silu)) for way in (self.product, dense_product)]
                compare_derivatives(ways, (v, response, u), orders=self.orders)

    def test_gradients_of_some_inputs(self, frozen):
        inputs = self.inputs(40, 9)
        gradients = []
        for wanted in (inputs, [x for i, x in enumerate(inputs) if i != frozen]):
            inputs[frozen].requires_grad_(len(wanted) == 3)
            y = self.product(*inputs[:2], 0, Gate(inputs[2], silu))
            gradients.append(torch.autograd.grad(y.square().sum(), wanted))
        assert_close(gradients[1], [g for i, g in enumerate(gradients[0]) if i != frozen], 1e-14)

    def test_nan_at_padding_reaches_nothing(self):
        v, kernel, u = (x.detach() for x in self.inputs(70, 20))
        mask = mask_of(2, 70, self.device)
        bad = v.masked_fill(~mask[..., None], torch.nan)
        assert torch.equal(*(self.product(x, kernel, 0, Gate(u, silu, mask)) for x in (v, bad)))

    def test_rows_are_independent(self):
        v, kernel, _ = self.inputs(70, 30, batch=3)
        together = self.product(v, kernel)
        for row in range(3):
            alone = self.product(v[row : row + 1], kernel)
            assert_close(alone, together[row : row + 1], self.tolerances[self.precise])

    def test_equal_bits(self, dtype):
        """Whatever the order in which its parts are computed."""
        v, kernel, u = self.inputs(700, 301)
        v, u, found = v.to(dtype), u.to(dtype), []
        for _ in range(2):
            y = self.product(v, kernel, 150, Gate(u, silu, mask_of(2, 700, self.device)))
            found.append([y, *torch.autograd.grad(y.square().sum(), (v, kernel, u))])
        assert all(map(torch.equal, *found))

    def test_derivatives_of_derivatives(self):
        """A custom function with one derivative gives wrong second ones without an error."""
        for length, taps, first in [(1, 1, 0), (2, 3, 1), (17, 2, 0), (33, 3, 1), (257, 31, 0)]:
            for mask in (None, mask_of(2, length, self.device)):
                compare_derivatives(
                    [
                        lambda v, kernel, u, way=way, f=first, m=mask: way(v, kernel, f, Gate(u, silu, m))
                        for way in (self.product, dense_product)
                    ],
                    self.inputs(length, taps),
                    1e-10 if self.precise == torch.float64 else 1e-5,
                    self.orders,
                )

    def test_inputs_that_depend_on_one_another(self):
        """A gradient that reaches one input through another is not counted twice."""

        def of_one(way, x):
            v = x.sin()
            kernel = (v[:, :3].sum(0) * v.sum(1)[:1]).t()  # (3, 3)
            return way(v, kernel, 0, Gate(v * x, silu))

        ways = [partial(of_one, way) for way in (self.product, dense_product)]
        x = random(2, 7, 3).detach().to(self.device, self.precise).requires_grad_()
        compare_derivatives(ways, (x,), 1e-10 if self.precise == torch.float64 else 1e-4, self.orders)

    def test_derivatives_are_differences(self):
        """An oracle without derivatives of PyTorch."""
        if self.precise == torch.float64:
            inputs = tuple(self.inputs(9, 2, batch=1, channels=1))
            checks = (torch.autograd.gradcheck, torch.autograd.gradgradcheck)[: min(2, self.orders)]
            assert all(check(lambda v, k, u: self.product(v, k, 0, Gate(u, silu)), inputs) for check in checks)

    def test_without_create_graph_gradients_have_no_graph(self):
        inputs = self.inputs(9, 4)
        gradients = torch.autograd.grad(self.product(*inputs[:2], 0, Gate(inputs[2], silu)).sum(), inputs)
        assert not any(g.requires_grad for g in gradients)

    def test_under_torch_func(self, transform):
        """Several windows too, but for matrices of a thousand columns."""
        for length, mask in ((1, False), (3, True), (17, False), (601, True)):
            if length == 601 and transform in ("jacrev", "jacfwd", "hessian"):
                continue
            mask = mask_of(1, length) if mask else None
            inputs = tuple(x.detach() for x in self.inputs(length, 3, batch=1, channels=2))
            found = [
                TRANSFORMS[transform](lambda v, kernel, u, w=way, m=mask: w(v, kernel, 1, Gate(u, silu, m)), inputs)
                for way in (self.product, dense_product)
            ]
            assert_close(*found, 1e-12, f"length {length}")
