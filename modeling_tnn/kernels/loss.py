"""The cross entropy of a language model's head, without the logits of the whole batch.

    loss = sum_n [ logsumexp_v(z_nv) - z_n,y_n ],   z = h W^T + b

    dh = (p - e_y) W,   dW = (p - e_y)^T h,   p = softmax(z)          e_y: one-hot rows of the labels

N tokens with a label, d hidden size, V words. The logits z `(N, V)` are the largest tensor of a training step. Here a
chunk of their rows exists at a time; its gradients are computed in the forward pass, while it exists.

On an accelerator the logits have C columns: V and zeros up to a multiple of 128. With an odd V their rows are not
aligned, and the products take several times as long (measured on an H100). The weight of the model stays as it is.
Where Triton is installed, one kernel turns a chunk of logits into losses and p - e_y (`loss_triton.py`). A graph of
torch.compile has all logits, aligned too: what follows the products is fused by the compiler.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch.nn.functional import cross_entropy, linear, pad
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.utils.generic import maybe_autocast

from ..extensions import extensions
from ..mixers import is_plain_linear
from ..numerics import compute_dtype, is_fused, is_on_host, is_traced
from ..toeplitz_fused import differentiable_gradients, must_differentiate
from .deferred_logits import DeferredLogits
from .fallback import attempt, runs_on

# Rows of a chunk on the CPU (measured). On an accelerator: rows, unless they take more bytes. The gradient of the
# weight is read and written once for each chunk, which would take more time with fewer rows.
CPU_ROWS = 256
LARGE_ROWS = 4096
LARGE_BYTES = 2**29

# On an accelerator the columns of the logits are a multiple of this.
ALIGNMENT = 128


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the loss above over rows; its oracle, and its derivatives of higher order: `eager_loss`.

    Inputs: `hidden` `(N, d)`, `weight` `(V, d)`, `bias` `(V,)` or None, `labels` `(N,)`; the products are in `dtype`.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, dtype: torch.dtype, ignore_index: int) -> torch.Tensor:
        inputs = (hidden, weight, bias)
        needed = [x is not None and need for x, need in zip(inputs, ctx.needs_input_grad, strict=False)]
        total, gradients = loss_and_gradients(inputs, labels, dtype, ignore_index, needed)
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


def loss_and_gradients(
    inputs: Sequence[torch.Tensor | None],
    labels: torch.Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The loss, and its gradients of hidden, weight and bias where they are `needed`, in float32 or float64."""
    (hidden, weight, bias), wide = inputs, compute_dtype(dtype)
    words, size = weight.shape
    columns = words if is_on_host(hidden) else -(-words // ALIGNMENT) * ALIGNMENT
    fill = find_kernel(hidden.device, dtype, words, columns) or fill_by_pytorch
    converts = fill is fill_by_pytorch and dtype != wide
    rows = rows_of_chunk(hidden, columns * (dtype.itemsize + converts * wide.itemsize))
    # The rows of dh are written once; dW and db are sums over rows.
    shapes = [(hidden.new_empty, hidden.shape), (hidden.new_zeros, (columns, size)), (hidden.new_zeros, (columns,))]
    gradients = [make(shape, dtype=wide) if need else None for (make, shape), need in zip(shapes, needed, strict=True)]
    losses, labels = hidden.new_empty(len(hidden), dtype=wide), labels.contiguous()
    with maybe_autocast(device_type=hidden.device.type, enabled=False):
        w, b = lengthened(weight, columns, dtype), None if bias is None else lengthened(bias, columns, dtype)
        # One buffer for all chunks: on a CPU, the memory of each would be taken from the system and given back.
        buffer = hidden.new_empty(min(rows, len(hidden)), columns, dtype=dtype)
        wide_buffer = torch.empty_like(buffer, dtype=wide) if converts else buffer
        for start in range(0, len(hidden), rows):
            chosen = slice(start, start + rows)
            h = hidden[chosen].to(dtype)
            z = buffer[: len(h)]
            torch.mm(h, w.t(), out=z) if b is None else torch.addmm(b, h, w.t(), out=z)
            logits = wide_buffer[: len(h)].copy_(z) if converts else z
            fill(logits, words, labels[chosen], losses[chosen], ignore_index, any(needed))
            if any(needed):
                add_gradients(gradients, chosen, h, w, logits, z)
    dh, *sums = gradients
    return losses.sum(), [dh, *(None if g is None else g[:words] for g in sums)]


def rows_of_chunk(hidden: torch.Tensor, row_bytes: int) -> int:
    """The rows of a chunk of logits, for `hidden` `(N, d)`."""
    if is_on_host(hidden):
        return CPU_ROWS
    return min(LARGE_ROWS, max(1, LARGE_BYTES // row_bytes // ALIGNMENT) * ALIGNMENT)


def lengthened(x: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """`x` `(V, ...)` in `dtype`, with zeros up to so many rows."""
    if len(x) == rows:
        return x.to(dtype)
    longer = x.new_empty(rows, *x.shape[1:], dtype=dtype)
    longer[: len(x)].copy_(x)
    longer[len(x) :].zero_()
    return longer


@lru_cache
def find_kernel(device: torch.device, dtype: torch.dtype, words: int, columns: int) -> Callable | None:
    """The kernel that fills as `fill_by_pytorch` does, or None. It is tried once for each shape of a row."""
    if dtype == torch.float64 or find_spec("triton") is None:
        return None
    if not runs_on(device):
        return None
    from .loss_triton import fill_by_kernel

    def try_kernel() -> Callable:
        z = torch.zeros(1, columns, dtype=dtype, device=device)
        labels = torch.zeros(1, dtype=torch.long, device=device)
        fill_by_kernel(z, words, labels, z.new_empty(1, dtype=torch.float32), -100, True)
        return fill_by_kernel

    return attempt("The Triton kernel of the loss", try_kernel, lambda: None)


def fill_by_pytorch(
    z: torch.Tensor, words: int, labels: torch.Tensor, losses: torch.Tensor, ignore_index: int, write: bool
):
    """Write the `losses` `(N,)` of logits `(N, C)`, and over the logits the gradient of their sum.

    Both are 0 in rows with `ignore_index`. Without `write` the logits mean nothing afterwards.
    """
    real = (labels != ignore_index)[:, None]
    own_words = labels[:, None].where(real, 0)  # (N, 1)
    if words < z.shape[1]:
        z[:, words:].zero_()
        z = z[:, :words]
    z.sub_(z.amax(1, keepdim=True))
    own = z.gather(1, own_words)  # (N, 1)
    sums = z.exp_().sum(1, keepdim=True)  # (N, 1)
    losses.copy_((sums.log() - own).where(real, 0)[:, 0])
    if write:
        z.mul_(sums.reciprocal()).scatter_add_(1, own_words, -torch.ones_like(own)).masked_fill_(~real, 0)


def add_gradients(
    gradients: list[torch.Tensor | None],
    chosen: slice,
    h: torch.Tensor,
    w: torch.Tensor,
    dz: torch.Tensor,
    narrow: torch.Tensor,
):
    """Write dh of the chosen rows, and add their part to dW and db, where each is wanted.

    `narrow` is memory for dz in the dtype of the products, or dz itself.
    """
    dh, dw, db = gradients
    if db is not None:
        db += dz.sum(0, dtype=db.dtype)
    if narrow is not dz:
        narrow.copy_(dz)
    if dh is not None:
        multiply(narrow, w, dh[chosen], 0)
    if dw is not None:
        multiply(narrow.t(), h, dw, 1)


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, beta: int):
    """out = beta out + a b, summed in the dtype of `out` where the device can."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    elif beta:
        out += a @ b
    else:
        out.copy_(a @ b)


def aligned_linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The logits `(..., V)`, on an accelerator as a part of aligned rows. A compiler fuses the padding."""
    words = len(weight)
    missing = 0 if is_on_host(hidden) else -words % ALIGNMENT
    if missing:
        weight, bias = pad(weight, (0, 0, 0, missing)), None if bias is None else pad(bias, (0, missing))
    return linear(hidden, weight, bias)[..., :words]


def eager_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    labels: torch.Tensor,
    ignore_index: int = -100,
) -> torch.Tensor:
    """The sum of the loss above by autograd, with all logits. Shapes as for `linear_cross_entropy`."""
    logits = aligned_linear(hidden, weight, bias)
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
    if is_traced():  # a compiler fuses what follows the products
        return eager_loss(hidden, weight, bias, labels=labels, ignore_index=ignore_index)
    device, dtype = hidden.device.type, hidden.dtype
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    # An accelerator would have to wait for the number of real labels.
    if is_on_host(labels):
        chosen = labels != ignore_index
        hidden, labels = hidden[chosen], labels[chosen]
    return LinearCrossEntropy.apply(hidden, weight, bias, labels, dtype, ignore_index)


def head_loss(
    model: PreTrainedModel,
    hidden_states: torch.Tensor,
    labels: torch.Tensor | None,
    skip_logits: bool | None,
    shift_labels: torch.Tensor | None,
    ignore_index: int,
    num_items_in_batch: torch.Tensor | int | None,
) -> tuple[torch.Tensor, DeferredLogits | None] | None:
    """The loss without the logits of the whole batch, or None where all logits are needed.

    In training the logits are computed when they are read, if they are: see `deferred_logits.py`. The arguments are
    those of `modeling_tnn.language_model_head`.
    """
    deferred = skip_logits is None and model.training
    if not ((skip_logits or deferred) and can_skip_logits(model)):
        return None
    if shift_labels is None:
        shift_labels = pad(labels[:, 1:], (0, 1), value=ignore_index) if model.config.causal else labels
    head, shift_labels = model.lm_head, shift_labels.flatten()
    loss = linear_cross_entropy(hidden_states.flatten(0, 1), head.weight, head.bias, shift_labels, ignore_index)
    logits = DeferredLogits(head, hidden_states) if deferred else None
    return loss / count_items(num_items_in_batch, shift_labels, ignore_index), logits


def head_logits(head: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """The logits in a graph of torch.compile, or None elsewhere."""
    if extensions.keeps_products() and is_plain_linear(head):
        return aligned_linear(hidden_states, head.weight, head.bias)
    return None


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


extensions.register(head_loss=head_loss, head_logits=head_logits)
