"""Products with an activation, as the gated units of a block have them.

    gated Toeplitz unit    h = act(u) * T(mask * act(v))
    gated linear unit      h = act(a) * b

B batch, L length, D channels. The fast ways keep for the backward pass what they are computed from and nothing else;
PyTorch's own operations keep each activation as well, which is as large.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from .tracing import is_transformed, needs_plain

Activation = Callable[[torch.Tensor], torch.Tensor]


class ActivatedProduct(torch.autograd.Function):
    """act(a) * b, with the activation computed again in the backward pass."""

    @staticmethod
    def forward(ctx, a: torch.Tensor, b: torch.Tensor, act: Activation) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.act = act
        return act(a) * b

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        a, b = ctx.saved_tensors
        if must_differentiate(gradient):
            function = partial(plain_activated_product, act=ctx.act)
            return *differentiable_gradients(function, (a, b), ctx.needs_input_grad, gradient), None
        value, pull_back = linearize(ctx.act, a)
        return pull_back(gradient * b), value * gradient, None


def plain_activated_product(a: torch.Tensor, b: torch.Tensor, act: Activation) -> torch.Tensor:
    """act(a) * b by autograd."""
    return act(a) * b


ACTIVATED_PRODUCTS = {"chunked": ActivatedProduct.apply, "plain": plain_activated_product}


def activated_product(a: torch.Tensor, b: torch.Tensor, act: Activation, product: str) -> torch.Tensor:
    """act(a) * b for two tensors of one shape; `product` as in `toeplitz.PRODUCTS`."""
    plain = needs_plain() or not torch.is_grad_enabled() or has_parameters(act)
    return ACTIVATED_PRODUCTS["plain" if plain else product](a, b, act)


class Gating(NamedTuple):
    """What a gated Toeplitz unit does around its operator.

    Attributes:
        u: `(B, L, D)`, the gate before its activation.
        act: the activation of `u` and `v`, elementwise.
        mask: `(B, L)` of booleans, false where `v` is to be zero; None if it never is.
    """

    u: torch.Tensor
    act: Activation
    mask: torch.Tensor | None = None

    def open(self, v: torch.Tensor) -> torch.Tensor:
        """What the operator is applied to, `(B, L, D)`."""
        return activate(v, self.act, self.mask)

    def close(self, mixed: torch.Tensor, product: str) -> torch.Tensor:
        """The gated result of the operator, `(B, L, D)`; `product` as in `toeplitz.PRODUCTS`."""
        return activated_product(self.u, mixed, self.act, product)


def activate(v: torch.Tensor, act: Activation, mask: torch.Tensor | None) -> torch.Tensor:
    """act(v), zero where the mask `(B, L)` is: `(B, L, D)`."""
    v = act(v)
    return v if mask is None else v.masked_fill(~mask[..., None], 0)


def has_parameters(act: Activation) -> bool:
    """Whether the activation learns (as PReLU does), so that autograd must see it."""
    return isinstance(act, nn.Module) and any(True for _ in act.parameters())


def linearize(act: Activation, x: torch.Tensor) -> tuple[torch.Tensor, Activation]:
    """act(x), and the map from a gradient of it to the gradient of `x`; to be used inside a backward pass."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = act(x)
    return value.detach(), lambda gradient: torch.autograd.grad(value, x, gradient)[0]


def must_differentiate(gradient: torch.Tensor) -> bool:
    """Whether a backward pass must consist of differentiable operations: `create_graph=True`, or it is transformed."""
    return torch.is_grad_enabled() or is_transformed(gradient)


def differentiable_gradients(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    needed: Sequence[bool],
    gradient: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """What a backward pass returns if it is to be differentiated again, by autograd.

    Args:
        function: what the forward pass computes, by PyTorch's own operations.
        inputs: what it was computed from, as `ctx.saved_tensors` gives them: with the graph they come from.
        needed: which of them need a gradient; only as many entries as there are inputs are read.
        gradient: that of the result.

    Returns:
        A gradient for each of the inputs that needs one, else None.
    """
    create_graph = torch.is_grad_enabled()
    needed = needed[: len(inputs)]
    with torch.enable_grad():
        # One input may be computed from another. Through views of their own, each counts for what it does itself.
        views = [x.view_as(x) if wanted else x for x, wanted in zip(inputs, needed, strict=True)]
        wanted = [view for view, one in zip(views, needed, strict=True) if one]
        found = iter(torch.autograd.grad(function(*views), wanted, gradient, create_graph=create_graph))
    return tuple(next(found) if one else None for one in needed)
