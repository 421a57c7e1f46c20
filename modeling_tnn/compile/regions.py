"""Regional compilation: a training step as one graph for the kernels of all layers, and one that every block runs.

    K_1 .. K_N = graph_K(theta_1 .. theta_N),    h_n = graph_B(h_{n-1}, K_n, block n),   n = 1 .. N

N blocks, h_n the hidden states after block n, K_n the kernel of its operator, theta_n the parameters of that kernel.
Blocks differ in the values of their parameters alone, so the first one compiles the graph for all of them, in an N-th
of the time of a graph of the whole model. Only training is compiled, without a cache. Evaluation and decoding run as
they are, and so do blocks with batch norm, whose statistics a checkpointed block would update twice.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import nn
from transformers.utils import logging

from ..norms import BatchNorm

logger = logging.get_logger(__name__)


class Regions:
    """Functions compiled with the `options` of `torch.compile` at their first call, or as they are once that fails."""

    def __init__(self, **options):
        self.options, self.has_failed = options, False
        self.compiled = cache(partial(torch.compile, **options))

    def __reduce__(self):
        return partial(Regions, **self.options), ()  # a copy of a model compiles anew

    def __call__(self, function: Callable, *arguments):
        """`function(*arguments)`, which runs again after a failure to compile: nothing has been computed before."""
        if self.has_failed or torch.compiler.is_compiling():
            return function(*arguments)
        from torch._dynamo.exc import TorchDynamoException  # takes long to import

        try:
            return self.compiled(function)(*arguments)
        except TorchDynamoException as error:
            self.has_failed, reason = True, " ".join(str(error).split())[:300]
            logger.warning(f"The model cannot be compiled and is trained without: {reason}")
            return function(*arguments)


def compile_regions(model: nn.Module, **options) -> nn.Module:
    """Compile the training step of a model by regions, in place, with the `options` of `torch.compile`.

    Example:
        model = compile_regions(TnnForCausalLM(config).cuda())
    """
    regions = Regions(**options)
    for module in model.modules():
        if hasattr(module, "regions") and not any(isinstance(part, BatchNorm) for part in module.modules()):
            module.regions = regions
    return model
