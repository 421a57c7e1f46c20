"""Gradients of a text that is continued, with what its cache holds as a constant.

    y = f(h, v, theta)

h what the state holds before the call, v the new inputs, theta the parameters of the operator. y comes from the
recurrence, as fast as without gradients; the backward pass computes f again by differentiable operations. So the
gradients of v and theta are those of this call alone: back-propagation through time, truncated where the cache was.
For a kernel that is decoded from its past inputs that is the whole product with these inputs detached; for a
recurrence (RTF, modal) the derivative with its state detached, as of any recurrent network.
"""

import torch
from transformers.utils.generic import maybe_autocast

from .recurrence import Recurrence


class Continuation(torch.autograd.Function):
    """`recurrence.advance(state, v)` `(B, L, D)`, differentiable in `v` and the parameters of the operator."""

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
    """`recurrence.advance(state, v)`, with gradients where they are enabled."""
    if not torch.is_grad_enabled():
        return recurrence.advance(state, v)
    return Continuation.apply(v, recurrence, state, *recurrence.operator.parameters())
