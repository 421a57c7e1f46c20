"""Whether a graph is being recorded or a function transformed: then PyTorch's own operations are used.

torch.compile records another graph where a branch on a length goes the other way. torch.export and torch.jit.trace
record one graph for all lengths: no branch may ask for a length then (torch.jit.trace would keep one side of it).
"""

import torch
from torch.autograd import forward_ad


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


def needs_plain() -> bool:
    """Whether PyTorch's own operations must be used: a custom function can be neither recorded nor transformed."""
    return is_traced() or is_transformed()
