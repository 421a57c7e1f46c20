"""The floating-point operations of a training step, and which part of a device's peak they are.

Counted is what the model asks for, whatever computes it. A token takes, forward and backward,

    6 for each weight of a matrix that tokens pass, the logits' included but not tables of embeddings,
    12 d L for each layer of attention of width d over L tokens, or those of its window (as in the PaLM paper; causal
        attention is not halved),
    20 D log2(2 L) for each Toeplitz operator of D channels: four transforms of 2 L numbers, each 5/2 N log2 N.

The encoders of the kernels, elementwise work, the optimizer and what checkpointing computes again do not count.
"""

import math

import torch
from transformers import PreTrainedModel

from modeling_tnn import ToeplitzOperator

# Words in the name of a GPU -> 10^12 operations a second at most: on tensor cores in bfloat16 or float16 without
# sparsity, and in float32 without TF32, from NVIDIA's data sheets. The first line whose words are all in it counts.
PEAKS = {
    "H100 PCIe": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "H200 NVL": (835, 60),
    "H200": (989, 67),
    "GH200": (989, 67),
    "B200": (2250, 75),
    "A100": (312, 19.5),
    "A10": (125, 31.2),
    "L40S": (362, 91.6),
    "L4": (121, 30.3),
    "4090": (165, 82.6),
    "5090": (210, 105),
}


def flops_of_token(model: PreTrainedModel, length: int) -> float:
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
    """The operations a second that a device can do at most; None if this is not known.

    Args:
        precision: of matrix products: no (float32), bf16 or fp16.
    """
    if device.type != "cuda":
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    half, single = next((peaks for name, peaks in PEAKS.items() if set(name.split()) <= words), (math.nan, math.nan))
    peak = 1e12 * (single if precision == "no" else half)
    return None if math.isnan(peak) else peak
