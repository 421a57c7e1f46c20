"""Products with an activation: the gates of the gated units.

    gated Toeplitz unit    h = act(u) * T(mask * act(v))
    gated linear unit      h = act(a) * b

B batch, L length, D channels. The fused functions save only their inputs for the backward pass. PyTorch's own
operations save each activation as well, which is as large.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from .numerics import is_fused, is_transformed

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
            function = partial(eager_activated_product, act=ctx.act)
            return *differentiable_gradients(function, (a, b), ctx.needs_input_grad, gradient), None
        value, pull_back = value_and_vjp(ctx.act, a)
        return pull_back(gradient * b), value * gradient, None


def eager_activated_product(a: torch.Tensor, b: torch.Tensor, act: Activation) -> torch.Tensor:
    """act(a) * b by autograd."""
    return act(a) * b


def activated_product(a: torch.Tensor, b: torch.Tensor, act: Activation, implementation: str) -> torch.Tensor:
    """act(a) * b for two tensors of one shape; `implementation` as for `toeplitz.toeplitz_matmul`."""
    fused = is_fused(implementation) and torch.is_grad_enabled() and not has_parameters(act)
    return (ActivatedProduct.apply if fused else eager_activated_product)(a, b, act)


class Gate(NamedTuple):
    """The gate of a gated Toeplitz unit around its operator. Without arguments it changes nothing.

    Attributes:
        u: `(B, L, D)`, the gate before its activation.
        act: the elementwise activation of `u` and `v`.
        mask: `(B, L)` of booleans, False where `v` is set to zero; None if there is no padding.
    """

    u: torch.Tensor | None = None
    act: Activation | None = None
    mask: torch.Tensor | None = None

    def inputs(self, v: torch.Tensor) -> torch.Tensor:
        """The inputs of the operator, `(B, L, D)`: act(v), zero where the mask is False."""
        v = v if self.act is None else self.act(v)
        return v if self.mask is None else v.masked_fill(~self.mask[..., None], 0)

    def apply(self, mixed: torch.Tensor, implementation: str) -> torch.Tensor:
        """The gated outputs of the operator, `(B, L, D)`; `implementation` as for `activated_product`."""
        return mixed if self.u is None else activated_product(self.u, mixed, self.act, implementation)


NO_GATE = Gate()


def has_parameters(act: Activation) -> bool:
    """Whether the activation learns (as PReLU does), so that autograd must see it."""
    return isinstance(act, nn.Module) and any(True for _ in act.parameters())


def value_and_vjp(act: Activation, x: torch.Tensor) -> tuple[torch.Tensor, Activation]:
    """act(x) and its pull-back, from a gradient of act(x) to a gradient of `x`. For use inside a backward pass."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = act(x)
    return value.detach(), lambda gradient: torch.autograd.grad(value, x, gradient)[0]


def must_differentiate(gradient: torch.Tensor) -> bool:
    """Whether a backward pass must be differentiable: with `create_graph=True`, or under a transform of torch.func."""
    return torch.is_grad_enabled() or is_transformed(gradient)


def differentiable_gradients(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    needed: Sequence[bool],
    gradient: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a backward pass that can be differentiated again, computed by autograd.

    Args:
        function: the forward computation in PyTorch's own operations.
        inputs: the inputs of the forward pass from `ctx.saved_tensors`, with their graph.
        needed: which inputs need a gradient; entries beyond the number of inputs are not read.
        gradient: the gradient of the result.

    Returns:
        For each input its gradient, or None if it needs none.
    """
    create_graph = torch.is_grad_enabled()
    needed = needed[: len(inputs)]
    with torch.enable_grad():
        # One input may be computed from another. A view of each separates its own contribution.
        views = [x.view_as(x) if wanted else x for x, wanted in zip(inputs, needed, strict=True)]
        wanted = [view for view, one in zip(views, needed, strict=True) if one]
        found = iter(torch.autograd.grad(function(*views), wanted, gradient, create_graph=create_graph))
    return tuple(next(found) if one else None for one in needed)
