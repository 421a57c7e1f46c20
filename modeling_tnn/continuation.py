"""Gradients of a text that is continued from a cache.

    y = f(h, v, theta)

h is the state before the call (a constant), v the new inputs, theta the parameters of the operator. The recurrence
computes y, as fast as without gradients. The backward pass computes f again by differentiable operations. It gives the
gradients of v and theta in this call alone: back-propagation through time, truncated at the cache. For a kernel that
is decoded from its past inputs, f is the whole product with these inputs detached. For a recurrence (RTF, modal), f is
the recurrence with its state detached.
"""

import torch
from transformers.utils.generic import maybe_autocast

from .recurrence import Recurrence


class Continuation(torch.autograd.Function):
    """The function `recurrence.advance(state, v)`, differentiable in `v` and the parameters of the operator."""

    @staticmethod
    def forward(ctx, v: torch.Tensor, recurrence: Recurrence, state, *parameters) -> torch.Tensor:
        ctx.recurrence, ctx.held = recurrence, recurrence.hold(state)
        ctx.save_for_backward(v, *parameters)
        return recurrence.advance(state, v)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        needed = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]]
        inputs = [tensor for tensor, need in zip(ctx.saved_tensors, needed, strict=True) if need]
        again = torch.is_grad_enabled()
        with torch.enable_grad(), maybe_autocast(device_type=gradient.device.type, enabled=False):
            y = ctx.recurrence.replay(ctx.held, ctx.saved_tensors[0])  # (B, L, D)
            found = iter(torch.autograd.grad(y, inputs, gradient, allow_unused=True, create_graph=again))
        v_gradient, *rest = [next(found) if need else None for need in needed]
        return v_gradient, None, None, *rest


def advance(recurrence: Recurrence, state, v: torch.Tensor) -> torch.Tensor:
    """The outputs of `recurrence.advance(state, v)`, with gradients if they are enabled."""
    if not torch.is_grad_enabled():
        return recurrence.advance(state, v)
    return Continuation.apply(v, recurrence, state, *recurrence.operator.parameters())
