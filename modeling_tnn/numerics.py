"""Precision, transform lengths, and when custom functions may be used.

torch.compile records another graph where a branch on a length goes the other way. torch.export and torch.jit.trace
record one graph for all lengths: no branch may ask for a length then (torch.jit.trace would keep one side of it).
While a graph is recorded or a function transformed, only PyTorch's own operations are used.
"""

import torch
from torch.autograd import forward_ad

# Two ways to the same results, both with derivatives of every order: "eager" consists of PyTorch's own operations,
# "fused" of custom functions that are faster and keep less for the backward pass.
IMPLEMENTATIONS = ("fused", "eager")


def is_traced() -> bool:
    """True inside torch.compile, torch.export and torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_exported() -> bool:
    """True inside torch.export, and so inside torch.onnx.export, and inside torch.jit.trace."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_exported_to_onnx() -> bool:
    """True inside torch.onnx.export: no transforms and no complex numbers then, see `fourier.py`."""
    return is_exported() and torch.onnx.is_in_onnx_export()


def is_transformed(*gradients: torch.Tensor) -> bool:
    """True inside the transforms of torch.func (`vmap`, `grad`, `jvp` and so on) and in forward-mode differentiation.

    Also if one of the `gradients` stands for many, as in `torch.autograd.grad(..., is_grads_batched=True)`. PyTorch
    has no public question for any of them; the first is the one that `torch.autograd.Function` asks.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling():  # which cannot trace the next question
        return False
    return any(torch._C._functorch.is_legacy_batchedtensor(gradient) for gradient in gradients)


def must_be_eager() -> bool:
    """Whether PyTorch's own operations must be used: a custom function can be neither recorded nor transformed."""
    return is_traced() or is_transformed()


def is_fused(implementation: str) -> bool:
    """Whether custom functions are used: `implementation` asks for them, and nothing is recorded or transformed.

    Raises:
        ValueError: there is no such implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation={implementation!r} is not possible: it must be one of {names}.")
    return implementation == "fused" and not must_be_eager()


def next_fast_len(minimum: int) -> int:
    """A transform length of at least `minimum` that is fast: a power of two, or 9/16, 5/8 or 3/4 of one.

    Transforms of other smooth lengths take longer per entry than they save, lengths with large prime factors
    several times as long. While a graph is traced, the next multiple of 64, so that one graph serves all lengths.
    """
    if is_traced():
        return (minimum + 63) // 64 * 64
    power = 1 << (minimum - 1).bit_length()
    shorter = [power * sixteenths // 16 for sixteenths in (9, 10, 12)] if power >= 256 else []
    return next((length for length in shorter if length >= minimum), power)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of transforms and kernels for inputs of `dtype`: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def float64_or_widest(device: torch.device) -> torch.dtype:
    """float64 where the device has it (MPS does not)."""
    return torch.float32 if device.type == "mps" else torch.float64
