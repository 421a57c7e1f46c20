"""Kernels that are kept from pass to pass while the parameters of a model do not change.

    y = K(theta) v:  K(theta) is computed once for each number of positions L, instead of once for each pass

theta parameters of an operator, K its kernel, `(D, L)` or a response of it, v inputs `(B, L, D)`. A kernel does not
depend on the inputs. For one short text, the kernels take as long as the rest of the pass with some operators.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Numbers that the kernels of one operator may hold together. The latest one is always kept.
MOST = 2**22


class KeptKernels:
    """The latest kernels of one operator. A copy of the operator, in memory or on the disk, has none."""

    def __init__(self):
        self._kernels: dict[Hashable, torch.Tensor] = {}

    def __reduce__(self):
        return type(None), ()

    def get(self, key: Hashable, operator: nn.Module, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The kernel of `operator` for `key`, from `make()` where there is none for the present parameters."""
        key = key, tuple(map(state_of, operator.parameters()))
        kernels = dict(self._kernels)  # in the order of use; other threads may be reading the present one
        kernel = kernels.pop(key, None)
        kernels[key] = kernel = make() if kernel is None else kernel
        while len(kernels) > 1 and sum(map(torch.Tensor.numel, kernels.values())) > MOST:
            del kernels[next(iter(kernels))]
        self._kernels = kernels
        return kernel


def state_of(parameter: torch.Tensor) -> tuple:
    """What differs when a parameter has other values: their place, and the changes that PyTorch has counted."""
    return parameter.data_ptr(), parameter.dtype, None if parameter.is_inference() else parameter._version


class FixedKernelsMixin:
    """What a model inherits to keep its kernels."""

    @contextmanager
    def fixed_kernels(self) -> Iterator[None]:
        """A context in which passes without gradients compute each kernel once, and keep it for later passes.

        Within it, parameters should stay as they are. Changes that PyTorch counts (an optimizer step,
        `load_state_dict`) are noticed, but those through `parameter.data` are not. Passes with gradients compute their
        kernels as always.

        Example:
            >>> with model.fixed_kernels(), torch.no_grad():
            ...     scores = [model(**tokenizer(text, return_tensors="pt")).logits for text in texts]
        """
        operators = [module for module in self.modules() if hasattr(module, "kept_kernels")]
        ours = [operator for operator in operators if operator.kept_kernels is None]  # not those of an outer context
        for operator in ours:
            operator.kept_kernels = KeptKernels()
        try:
            yield
        finally:
            for operator in ours:
                operator.kept_kernels = None
