"""Precision, transform lengths, and the conditions under which custom functions are used.

torch.compile records a new graph when a branch on a length changes. torch.export and torch.jit.trace record one graph
for all lengths, so code that they record must not branch on a length (torch.jit.trace would keep one side of it).
While a graph is recorded or a function is transformed, only PyTorch's own operations are used, except for the
Toeplitz product in a graph of torch.compile (`compile/product.py`).
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.autograd import forward_ad

from .extensions import IMPLEMENTATIONS

# Device types that can be read without a sync. Tests clear this tuple to run the accelerator path on a CPU.
HOST_DEVICES = ("cpu",)

# Numbers in a temporary of a long sequence without gradients, see `by_parts`: on the CPU, and on other devices.
PART, LARGE_PART = 2**22, 2**27

# Classes of plain tensors. `tnn plan` adds one whose tensors have no memory, to run the same code.
PLAIN_TENSORS = (nn.Parameter, torch.Tensor)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read without a device sync."""
    return tensor.device.type in HOST_DEVICES


def is_traced() -> bool:
    """Whether the code runs inside torch.compile, torch.export or torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_exported() -> bool:
    """Whether the code runs inside torch.export, torch.onnx.export (which uses it) or torch.jit.trace."""
    # Not torch.compiler.is_exporting(), which torch.compile of PyTorch 2.11 takes for True (pytorch/pytorch#176347).
    return torch.compiler._is_exporting_flag or torch.jit.is_tracing()


def is_exported_to_onnx() -> bool:
    """Whether the code runs inside torch.onnx.export: no transforms or complex numbers there, see `toeplitz.py`."""
    return is_exported() and torch.onnx.is_in_onnx_export()


def is_transformed(*gradients: torch.Tensor) -> bool:
    """Whether the code runs inside a transform of torch.func (`vmap`, `grad`, ...) or forward-mode differentiation.

    It is also True if one of the `gradients` is a batch, as in `torch.autograd.grad(..., is_grads_batched=True)`.
    PyTorch has no public test for these cases; `torch.autograd.Function` uses the first one below.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling():  # torch.compile cannot trace the next test
        return False
    return any(torch._C._functorch.is_legacy_batchedtensor(gradient) for gradient in gradients)


def must_be_eager() -> bool:
    """Whether only PyTorch's own operations work: a custom function can be neither recorded nor transformed."""
    return is_traced() or is_transformed()


def is_recomputed() -> bool:
    """Whether the code runs inside a backward pass, as that of a checkpointed layer does the second time."""
    return not is_traced() and torch._C._current_graph_task_id() != -1


def check_implementation(implementation: str):
    """Raise a ValueError if `implementation` is unknown."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"`implementation` must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")


def is_fused(implementation: str) -> bool:
    """Whether custom functions are used: `implementation` is known, not "eager", and `must_be_eager` is False."""
    check_implementation(implementation)
    return implementation != "eager" and not must_be_eager()


def is_plain(module: nn.Module) -> bool:
    """Whether calling a module only runs its class on plain weights: no hook, shard or quantizer.

    Then the same can be computed in another way. Callers check the class, which adapters replace.
    """
    return (
        "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and all(w is None or type(w) in PLAIN_TENSORS for w in module._parameters.values())
    )


def by_parts(function: Callable, count: int, width: int, like: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """`function(slice(None))`; without gradients, if the temporaries are large, in parts that are then joined.

    Temporaries of a million positions take gigabytes. While gradients are recorded, they would be kept anyway.

    Args:
        function: returns the entries of a slice along `dim`, which do not depend on the other entries.
        count: number of entries.
        width: number of numbers that a temporary has for each entry.
        like: a tensor on the device of the temporaries.
    """
    size = max(1, (PART if is_on_host(like) else LARGE_PART) // max(1, width))
    if torch.is_grad_enabled() or must_be_eager() or count <= size:
        return function(slice(None))
    first = function(slice(0, size))
    shape = list(first.shape)
    shape[dim] = count
    whole = first.new_empty(shape)
    whole.narrow(dim, 0, size).copy_(first)
    for start in range(size, count, size):
        part = function(slice(start, start + size))
        whole.narrow(dim, start, part.shape[dim]).copy_(part)
    return whole


def next_fast_len(minimum: int) -> int:
    """A fast transform length of at least `minimum`: a power of two, or 9/16, 5/8 or 3/4 of one.

    Other smooth lengths cost more time per entry than they save in entries. While a graph is traced, it is the next
    multiple of 64, so that one graph serves all lengths.
    """
    if is_traced():
        return (minimum + 63) // 64 * 64
    power = 1 << (minimum - 1).bit_length()
    shorter = [power * sixteenths // 16 for sixteenths in (9, 10, 12)] if power >= 256 else []
    return next((length for length in shorter if length >= minimum), power)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of transforms and kernels for inputs of `dtype`: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def parameter_dtype(module: nn.Module, like: torch.Tensor) -> torch.dtype:
    """The dtype that a layer computes in, also if its weight is quantized or another module wraps it."""
    return next((one.dtype for one in module.parameters() if one.is_floating_point()), like.dtype)


def without_narrowing(fn: Callable, kept: Iterable[torch.Tensor | None]) -> Callable:
    """`fn` of `nn.Module._apply`, such as a cast, changed so that the tensors `kept` stay in float32 or float64."""
    kept = [tensor for tensor in kept if tensor is not None]

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        moved = fn(tensor)
        wide = compute_dtype(moved.dtype)
        if moved.dtype == wide or not any(tensor is one for one in kept):
            return moved
        return tensor.to(moved.device, wide)

    return apply


def float64_or_widest(device: torch.device) -> torch.dtype:
    """float64 if the device supports it, else float32 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64
