"""The cross entropy of a language model's head, without the logits of the whole batch.

    loss = sum_n [ logsumexp_v(z_nv) - z_n,y_n ],   z = h W^T + b

    dh = (p - e_y) W,   dW = (p - e_y)^T h,   p = softmax(z)          e_y: one-hot rows of the labels

N tokens with a label, d hidden size, V words. The logits z `(N, V)` are the largest tensor of a training step. Here a
few rows of them exist at a time; their gradients are computed in the forward pass, while they exist.
"""

import torch
from torch.nn.functional import cross_entropy, linear, pad
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.utils.generic import maybe_autocast

from .deferred_logits import DeferredLogits
from .gating import differentiable_gradients, must_differentiate
from .inputs import check_labels
from .linear import apply_linear, is_plain_linear
from .numerics import compute_dtype, is_fused, is_on_host

# Rows of logits at a time on the CPU (measured), and numbers in them on other devices.
CPU_ROWS = 256

LARGE_CHUNK = 2**27


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the loss above over rows; its oracle, and its derivatives of higher order: `eager_loss`.

    Inputs: `hidden` `(N, d)`, `weight` `(V, d)`, `bias` `(V,)` or None, `labels` `(N,)`; the products are in `dtype`.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, dtype: torch.dtype, ignore_index: int) -> torch.Tensor:
        wide, inputs = compute_dtype(dtype), (hidden, weight, bias)
        total = hidden.new_zeros((), dtype=wide)
        needed = [x is not None and need for x, need in zip(inputs, ctx.needs_input_grad, strict=False)]
        # The rows of dh are written once; dW and db are sums over rows.
        gradients = [torch.zeros_like(x, dtype=wide) if need else None for x, need in zip(inputs, needed, strict=True)]
        rows = CPU_ROWS if is_on_host(hidden) else max(CPU_ROWS, LARGE_CHUNK // len(weight))
        with maybe_autocast(device_type=hidden.device.type, enabled=False):
            w = weight.to(dtype)
            # One buffer for all chunks: on a CPU, the memory of each would be taken from the system and given back.
            buffer = None if dtype == wide else hidden.new_empty(min(rows, len(hidden)), len(w), dtype=wide)
            for chosen in (slice(start, start + rows) for start in range(0, len(hidden), rows)):
                h, y = hidden[chosen].to(dtype), labels[chosen]
                z = linear(h, w, None if bias is None else bias.to(dtype))  # (rows, V)
                z = z if buffer is None else buffer[: len(z)].copy_(z)
                losses, dz = row_losses(z, y, ignore_index)
                total += losses.sum()
                if any(needed):
                    add_gradients(gradients, chosen, h, w, dz)
        ctx.save_for_backward(*inputs, labels, *gradients)
        ctx.ignore_index = ignore_index
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        *inputs, labels, dh, dw, db = ctx.saved_tensors
        if must_differentiate(gradient):

            def function(*given):
                return eager_loss(*given, labels=labels, ignore_index=ctx.ignore_index)

            given = inputs if inputs[2] is not None else inputs[:2]
            found = differentiable_gradients(function, given, ctx.needs_input_grad, gradient)
            return *found, *[None] * (6 - len(found))
        pairs = zip((dh, dw, db), inputs, strict=True)
        return *[None if g is None else (g * gradient).to(x.dtype) for g, x in pairs], None, None, None


def row_losses(z: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses `(N, 1)` of logits `(N, V)`; the gradient of their sum is written over the logits, and returned."""
    real = (labels != ignore_index)[:, None]
    words = labels[:, None].where(real, 0)  # (N, 1)
    z = z.sub_(z.amax(1, keepdim=True))
    own = z.gather(1, words)  # (N, 1)
    sums = z.exp_().sum(1, keepdim=True)  # (N, 1)
    losses = (sums.log() - own).where(real, 0)
    dz = z.mul_(sums.reciprocal()).scatter_add_(1, words, -torch.ones_like(losses))
    return losses, dz.masked_fill_(~real, 0)


def add_gradients(
    gradients: list[torch.Tensor | None], chosen: slice, h: torch.Tensor, w: torch.Tensor, dz: torch.Tensor
):
    """Write dh of the chosen rows, and add their part to dW and db, where each is wanted."""
    dh, dw, db = gradients
    if db is not None:
        db += dz.sum(0)
    dz = dz.to(h.dtype)
    if dh is not None:
        dh[chosen] = dz @ w
    if dw is not None and dz.dtype == dw.dtype:
        dw.addmm_(dz.t(), h)
    elif dw is not None:
        dw += dz.t() @ h


def eager_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    labels: torch.Tensor,
    ignore_index: int = -100,
) -> torch.Tensor:
    """The sum of the loss above by autograd, with all logits. Shapes as for `linear_cross_entropy`."""
    logits = linear(hidden, weight, bias)
    return cross_entropy(logits.to(compute_dtype(logits.dtype)), labels, ignore_index=ignore_index, reduction="sum")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignore_index: int = -100,
) -> torch.Tensor:
    """The sum of the cross entropy over rows, without their logits, in the precision of autocast.

    Args:
        hidden: `(N, d)`.
        weight: `(V, d)`.
        bias: `(V,)` or None.
        labels: `(N,)`; rows with `ignore_index` have no part in it.
    """
    device, dtype = hidden.device.type, hidden.dtype
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    # An accelerator would have to wait for the number of real labels.
    if is_on_host(labels):
        chosen = labels != ignore_index
        hidden, labels = hidden[chosen], labels[chosen]
    return LinearCrossEntropy.apply(hidden, weight, bias, labels, dtype, ignore_index)


def language_model_head(
    model: PreTrainedModel,
    hidden_states: torch.Tensor,
    labels: torch.Tensor | None,
    skip_logits: bool | None = None,
    shift_labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    num_items_in_batch: torch.Tensor | int | None = None,
    **kwargs,
) -> tuple[torch.Tensor | None, torch.Tensor | DeferredLogits | None]:
    """Loss and logits `(B, L, V)` of hidden states `(B, L, d)`; None for what is not asked for.

    In training with labels the logits are computed when they are read, if they are: see `deferred_logits.py`.

    Args:
        model: a language model with `lm_head`, `loss_function` and `config`.
        labels: `(B, L)`; a causal model shifts them.
        skip_logits: whether the logits are left out; None: whether they are deferred.
        shift_labels: `(B, L)`, labels that are shifted already.
        num_items_in_batch: what the sum over labels is divided by; their number unless given.

    Raises:
        TypeError, ValueError: those of `check_labels`.
        ValueError: `skip_logits` leaves nothing to compute.
    """
    for name, given in (("labels", labels), ("shift_labels", shift_labels)):
        if given is not None:
            check_labels(given, hidden_states, model.config.vocab_size, name, ignore_index)
    if labels is None and shift_labels is None:
        if skip_logits:
            raise ValueError("`labels` must be given with skip_logits=True, got None")
        return None, apply_linear(model.lm_head, hidden_states)
    deferred = skip_logits is None and model.training
    if (skip_logits or deferred) and can_skip_logits(model):
        if shift_labels is None:
            shift_labels = pad(labels[:, 1:], (0, 1), value=ignore_index) if model.config.causal else labels
        head, shift_labels = model.lm_head, shift_labels.flatten()
        loss = linear_cross_entropy(hidden_states.flatten(0, 1), head.weight, head.bias, shift_labels, ignore_index)
        logits = DeferredLogits(head, hidden_states) if deferred else None
        return loss / count_items(num_items_in_batch, shift_labels, ignore_index), logits
    logits = apply_linear(model.lm_head, hidden_states)
    shifted = {} if shift_labels is None else {"shift_labels": shift_labels}
    options = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index} | shifted | kwargs
    loss = model.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[2], **options)
    return loss, None if skip_logits else logits


def can_skip_logits(model: PreTrainedModel) -> bool:
    """Whether the head is a plain linear layer, without adapter, quantizer, shard or hook, before the usual loss."""
    head = model.lm_head
    return (
        is_fused(model.config.tno_implementation)
        and model.loss_function is (ForCausalLMLoss if model.config.causal else ForMaskedLMLoss)
        and is_plain_linear(head)
    )


def count_items(given: torch.Tensor | int | None, labels: torch.Tensor, ignore_index: int) -> torch.Tensor | int:
    """What the sum over labels is divided by."""
    if given is None:
        return (labels != ignore_index).sum()
    return given.to(labels.device) if isinstance(given, torch.Tensor) else given
