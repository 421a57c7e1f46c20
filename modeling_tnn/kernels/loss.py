"""The cross entropy of a language model's head, without the logits of the whole batch.

    loss = sum_n [ logsumexp_v(z_nv) - z_n,y_n ],   z = h W^T + b

    dh = (p - e_y) W,   dW = (p - e_y)^T h,   p = softmax(z)          e_y: one-hot rows of the labels

N tokens with a label, d hidden size, V words. The logits z `(N, V)` are the largest tensor of a training step. Here a
chunk of their rows exists at a time; its gradients are computed in the forward pass, while it exists.

On an accelerator the logits have C columns: V and zeros up to a multiple of 128. With an odd V their rows are not
aligned, and the products take several times as long (measured on an H100). Where Triton is installed, one kernel turns
a chunk of logits into losses and p - e_y (`loss_triton.py`). A graph of torch.compile has all logits, aligned too.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, pad
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.utils import is_triton_available
from transformers.utils.generic import maybe_autocast

from ..extensions import extensions
from ..linear import is_plain_linear
from ..numerics import compute_dtype, is_fused, is_on_host, is_traced
from ..toeplitz_fused import differentiable_gradients, must_differentiate
from .fallback import attempt, runs_on

# Rows of a chunk on the CPU (measured). On an accelerator: rows, unless they take more bytes. The gradient of the
# weight is read and written once for each chunk, which would take more time with fewer rows.
CPU_ROWS = 256
LARGE_ROWS = 4096
LARGE_BYTES = 2**29

# On an accelerator the columns of the logits are a multiple of this.
ALIGNMENT = 128


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the loss above over rows, by products in `dtype`; its oracle and higher derivatives: `eager_loss`."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, dtype: torch.dtype, ignore_index: int) -> torch.Tensor:
        inputs = (hidden, weight, bias)
        total, gradients = loss_and_gradients(*inputs, labels, dtype, ignore_index, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*inputs, labels, *gradients)
        ctx.ignore_index = ignore_index
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        *inputs, labels, dh, dw, db = ctx.saved_tensors
        if must_differentiate(gradient):
            function = partial(eager_loss, labels=labels, ignore_index=ctx.ignore_index)
            found = differentiable_gradients(function, inputs, ctx.needs_input_grad, gradient)
        else:
            pairs = zip((dh, dw, db), inputs, strict=True)
            found = [None if g is None else (g * gradient).to(x.dtype) for g, x in pairs]
        return *found, None, None, None


def loss_and_gradients(hidden, weight, bias, labels, dtype: torch.dtype, ignore_index: int, needed: Sequence[bool]):
    """The loss, and its gradients of hidden, weight and bias where they are `needed`, in float32 or float64."""
    w, b = aligned(*(None if x is None else x.to(dtype) for x in (weight, bias)))
    words, columns, wide = len(weight), len(w), compute_dtype(dtype)
    fill = find_kernel(hidden.device, dtype, words, columns) or fill_by_pytorch
    copied = fill is fill_by_pytorch and dtype != wide
    row_bytes = columns * (dtype.itemsize + copied * wide.itemsize)
    rows = min(LARGE_ROWS, max(1, LARGE_BYTES // row_bytes // ALIGNMENT) * ALIGNMENT)
    rows = CPU_ROWS if is_on_host(hidden) else rows
    shapes = zip((hidden.shape, (columns, weight.shape[1]), (columns,)), needed, strict=True)
    dh, dw, db = (hidden.new_zeros(shape, dtype=wide) if need else None for shape, need in shapes)
    losses, labels = hidden.new_empty(len(hidden), dtype=wide), labels.contiguous()
    with maybe_autocast(device_type=hidden.device.type, enabled=False):
        # The same buffers for all chunks: on a CPU, memory of their own would be taken from the system and given back.
        buffer = hidden.new_empty(min(rows, len(hidden)), columns, dtype=dtype)
        wide_buffer = torch.empty_like(buffer, dtype=wide) if copied else None
        for start in range(0, len(hidden), rows):
            chosen = slice(start, start + rows)
            h = hidden[chosen].to(dtype)
            z = buffer[: len(h)]
            torch.mm(h, w.t(), out=z) if b is None else torch.addmm(b, h, w.t(), out=z)
            logits = wide_buffer[: len(h)].copy_(z) if copied else z
            fill(logits, words, labels[chosen], losses[chosen], ignore_index, any(needed))
            if db is not None:
                db += logits.sum(0, dtype=wide)
            if copied and any(needed):
                z.copy_(logits)
            if dh is not None:
                add_product(dh[chosen], z, w)
            if dw is not None:
                add_product(dw, z.t(), h)
    return losses.sum(), [dh, *(None if g is None else g[:words] for g in (dw, db))]


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
    """Add a b to `total`, summed in the dtype of `total` where the device can."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


@cache
def find_kernel(device: torch.device, dtype: torch.dtype, words: int, columns: int) -> Callable | None:
    """The kernel in place of `fill_by_pytorch`, unless it fails when it is tried, once for each shape of a row."""
    if dtype == torch.float64 or not runs_on(device) or not is_triton_available():
        return None
    from .loss_triton import fill_by_kernel

    z, labels = torch.zeros(1, columns, dtype=dtype, device=device), torch.zeros(1, dtype=torch.long, device=device)
    fill = partial(fill_by_kernel, z, words, labels, z.new_empty(1, dtype=torch.float32), -100, True)
    has_failed = attempt("The Triton kernel of the loss", fill, lambda: True)
    return None if has_failed else fill_by_kernel


def fill_by_pytorch(z, words: int, labels, losses, ignore_index: int, write: bool):
    """Write the `losses` `(N,)` of logits `(N, C)`, and over them, if to `write`, the gradient of the losses' sum."""
    real = (labels != ignore_index)[:, None]
    own_words = labels[:, None].where(real, 0)  # (N, 1)
    z[:, words:].zero_()
    z = z[:, :words]
    z.sub_(z.amax(1, keepdim=True))
    own = z.gather(1, own_words)  # (N, 1)
    sums = z.exp_().sum(1, keepdim=True)  # (N, 1)
    losses.copy_((sums.log() - own).where(real, 0)[:, 0])
    if write:
        z.mul_(sums.reciprocal()).scatter_add_(1, own_words, -torch.ones_like(own)).masked_fill_(~real, 0)


def aligned(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight `(C, d)` and bias `(C,)` of aligned rows of logits, from those of V words."""
    missing = 0 if is_on_host(weight) else -len(weight) % ALIGNMENT
    if missing:
        weight, bias = pad(weight, (0, 0, 0, missing)), None if bias is None else pad(bias, (0, missing))
    return weight, bias


def aligned_linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The logits `(..., V)`, on an accelerator as a part of aligned rows. A compiler fuses the padding."""
    return linear(hidden, *aligned(weight, bias))[..., : len(weight)]


def eager_loss(hidden, weight, bias=None, *, labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """The sum of the loss above by autograd, with all logits. Shapes as for `linear_cross_entropy`."""
    logits = aligned_linear(hidden, weight, bias)
    return cross_entropy(logits.to(compute_dtype(logits.dtype)), labels, ignore_index=ignore_index, reduction="sum")


def linear_cross_entropy(hidden, weight, bias, labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """The sum of the loss above over rows, without their logits, in the precision of autocast.

    `hidden` `(N, d)`, `weight` `(V, d)`, `bias` `(V,)` or None, `labels` `(N,)`: rows with `ignore_index` count 0.
    """
    if is_traced():  # a compiler fuses what follows the products
        return eager_loss(hidden, weight, bias, labels=labels, ignore_index=ignore_index)
    if is_on_host(labels):  # an accelerator would have to wait for the number of real labels
        chosen = labels != ignore_index
        hidden, labels = hidden[chosen], labels[chosen]
    return LinearCrossEntropy.apply(hidden, weight, bias, labels, projected_dtype(hidden), ignore_index)


def projected_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of a linear map of `x` under the present autocast."""
    kind = x.device.type
    if x.is_meta or x.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def head_loss(model, hidden_states, labels, shift_labels, ignore_index: int, num_items_in_batch):
    """The loss of a language model's hidden states `(B, L, d)`, or None where it needs the logits."""
    if not can_skip_logits(model):
        return None
    if shift_labels is None:
        shift_labels = pad(labels[:, 1:], (0, 1), value=ignore_index) if model.config.causal else labels
    head, shift_labels = model.lm_head, shift_labels.flatten()
    loss = linear_cross_entropy(hidden_states.flatten(0, 1), head.weight, head.bias, shift_labels, ignore_index)
    count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)


def head_logits(head: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """The logits in a graph of torch.compile, or None elsewhere."""
    if extensions.keeps_products() and is_plain_linear(head):
        return aligned_linear(hidden_states, head.weight, head.bias)


def can_skip_logits(model: PreTrainedModel) -> bool:
    """Whether the head is a plain linear layer, without adapter, quantizer, shard or hook, before the usual loss."""
    usual = ForCausalLMLoss if model.config.causal else ForMaskedLMLoss
    plain = model.loss_function is usual and is_plain_linear(model.lm_head)
    return plain and is_fused(model.config.tno_implementation)


extensions.register(head_loss=head_loss, head_logits=head_logits)
