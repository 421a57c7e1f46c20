"""Devices: their names, memory and peaks, and the operations of a training step.

Counted is what the model asks for, whatever computes it. A token takes, forward and backward,

    6 for each weight of a matrix that tokens pass, the logits' included but not tables of embeddings,
    12 d L for each layer of attention of width d over L tokens, or those of its window (as in the PaLM paper; causal
        attention is not halved),
    20 D log2(2 L) for each Toeplitz operator of D channels: four transforms of 2 L numbers, each 5/2 N log2 N.

The encoders of the kernels, elementwise work, the optimizer and what checkpointing computes again do not count.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tnn_scripts.common.errors import UserError

import torch

from modeling_tnn import ToeplitzOperator

# Words in the name of a GPU -> 10^12 operations a second at most: on tensor cores in bfloat16 or float16 without
# sparsity, and in float32 without TF32, from NVIDIA's data sheets. The first line whose words are all in it counts.
PEAKS = {
    "H100 PCIe": (756, 51), "H100 NVL": (835, 60), "H100": (989, 67), "H200 NVL": (835, 60), "H200": (989, 67),
    "GH200": (989, 67), "B200": (2250, 75), "A100": (312, 19.5), "A10": (125, 31.2), "L40S": (362, 91.6),
    "L4": (121, 30.3), "4090": (165, 82.6), "5090": (210, 105),
}  # fmt: skip


def check_device(name: str | None) -> str:
    """The name of a device, for a command line: the accelerator if there is one, else the CPU, unless given.

    Raises:
        ValueError: the name is not that of a device, or this machine does not have it.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device must be a device of this machine, got {name}: {reason}") from error
    return name


class MemoryExceededError(UserError):
    """The error for a lack of memory. Its message names options that help."""


@contextmanager
def suggest_smaller(what: str, advice: str) -> Iterator[None]:
    """Turn all errors of failed allocations into one, whose message names options that help.

    Raises:
        MemoryExceededError: the machine or an accelerator ran out of memory in the block.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise MemoryExceededError(f"There is not enough memory for {what}: {advice} ({first_line}).") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is a failed allocation. Some libraries below PyTorch have messages of their own."""
    from accelerate.utils.memory import should_reduce_batch_size  # not installed with the package alone

    return (
        isinstance(error, MemoryError)
        or should_reduce_batch_size(error)
        or any(text in str(error) for text in ("bad_alloc", "MKL FFT error"))
    )


def reserved_memory(device: torch.device) -> float | None:
    """The most memory of a GPU in GiB that PyTorch has taken so far, CUDA graphs included; None for other devices."""
    return torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None


def resident_peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def flops_of_token(model: torch.nn.Module, length: int) -> float:
    """The operations that a token of blocks of `length` takes in a training step."""
    modules = list(model.modules())
    operators = [module for module in modules if isinstance(module, ToeplitzOperator)]
    apart = [*operators, *(module for module in modules if isinstance(module, torch.nn.Embedding))]
    left_out = {id(parameter) for module in apart for parameter in module.parameters()}
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1 and id(p) not in left_out)
    head = model.get_output_embeddings().weight
    matrices += head.numel() if id(head) in left_out else 0  # tied to the embeddings
    seen = [getattr(module, "sliding_window", None) or length for module in modules if is_attention(module)]
    transforms = 20 * sum(operator.channels for operator in operators) * math.log2(2 * length)
    return 6 * matrices + 12 * model.config.hidden_size * sum(min(length, n) for n in seen) + transforms


def is_attention(module: torch.nn.Module) -> bool:
    """Whether a module is the attention of a layer, by the names of transformers' classes."""
    inner = list(module.modules())[1:]
    return "Attention" in type(module).__name__ and not any("Attention" in type(part).__name__ for part in inner)


def peak_of(device: torch.device, precision: str) -> float | None:
    """The operations a second of a device at most, in a --mixed_precision; None if this is not known."""
    if device.type != "cuda":
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    half, single = next((peaks for name, peaks in PEAKS.items() if set(name.split()) <= words), (math.nan, math.nan))
    peak = 1e12 * (single if precision == "no" else half)
    return None if math.isnan(peak) else peak
