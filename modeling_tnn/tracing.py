"""Whether a graph is being recorded: then PyTorch's own operations are used, which one graph can hold."""

import torch


def is_traced() -> bool:
    """True inside torch.compile, torch.export and torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
