"""Costs of training steps: operations and peaks of devices, blocks that fit into memory.

A global batch in tokens gives a step of the optimizer the same blocks, and the same mean loss, for any number of them
in a pass. So the largest that fits a GPU is taken. On other devices the number is small and fixed.

Of operations, what the model asks for is counted, whatever computes it. A token takes, forward and backward,

    6 for each weight of a matrix that tokens pass and each tap of a short convolution, the logits' included but not
        tables of embeddings; of a head on the pooled states, 6 / L,
    12 d L for each layer of attention whose heads have d numbers over L tokens, or those of its window (as in the PaLM
        paper; causal attention is not halved),
    20 D log2(2 L) for each Toeplitz operator of D channels: four transforms of 2 L numbers, each 5/2 N log2 N. Along
        each axis of an image L is its side.

The encoders of the kernels, elementwise work, the optimizer and what checkpointing computes again do not count.
"""

import math

from tnn_programs.cli.errors import MemoryExceededError, is_out_of_memory

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from accelerate.utils.memory import clear_device_cache

from modeling_tnn.mixers import ShortConvolution
from modeling_tnn.modeling_tnn import TnnForTokenClassification
from modeling_tnn.tno import ToeplitzOperator
from modeling_tnn.tno_auto import TwoAxisOperator
from tnn_programs.cli.training_arguments import DEFAULT_BLOCKS, PretrainArguments
from tnn_programs.training.passes import try_passes

# More tokens in a forward pass only take more memory.
MOST_TOKENS = 65_536
# The part of a GPU that a trial leaves free, for workspaces of libraries and memory between pieces.
FREE_SHARE = 0.05
# Bytes that an evaluation takes for each logit: in half precision, in float32 and shifted, and as probabilities.
BYTES_OF_LOGIT = 2 + 4 + 4 + 4


def blocks_of_process(args: PretrainArguments, processes: int) -> int:
    """The blocks of each process in a step; ValueError if the batch has no such number, or passes do not fit it."""
    if args.global_batch_tokens is None:
        return args.per_device_train_batch_size * args.gradient_accumulation_steps
    unit, size = args.block_size * processes, args.per_device_train_batch_size
    blocks, rest = divmod(args.global_batch_tokens, unit)
    if rest:
        of = f"{processes} x {args.block_size}, a block for each process" if processes > 1 else "the --block_size"
        raise ValueError(f"--global_batch_tokens must be a multiple of {unit} ({of}), got {args.global_batch_tokens}")
    if size is not None and blocks % size:
        raise ValueError(
            f"--per_device_train_batch_size must divide the {blocks} blocks of a process in a step "
            f"(--global_batch_tokens {args.global_batch_tokens}), got {size}"
        )
    return blocks


def choose_micro_batch(args: PretrainArguments, accelerator: Accelerator, model: torch.nn.Module) -> str:
    """Set the blocks of a forward pass and the number of passes of `args`, and say them.

    The `model` is not prepared by the accelerator yet; it moves to the device, and its gradients are removed. A
    MemoryExceededError if not even one block fits into the memory of a process.
    """
    blocks, size = blocks_of_process(args, accelerator.num_processes), args.per_device_train_batch_size
    if size is None:
        sharded = accelerator.distributed_type == DistributedType.FSDP
        if accelerator.device.type != "cuda" or sharded:  # a shard cannot be tried alone
            size = largest_divisor(blocks, DEFAULT_BLOCKS)
        else:
            size = largest_that_fits(args, accelerator, model, blocks)
    passes = blocks // size
    args.per_device_train_batch_size = size
    args.gradient_accumulation_steps = passes
    return f"{size} blocks of {args.block_size} tokens in a forward pass, {passes} passes in a step of each process"


def largest_that_fits(args: PretrainArguments, accelerator: Accelerator, model: torch.nn.Module, blocks: int) -> int:
    """The largest of `blocks`, their half and so on that fits into the memory of every process.

    Each process tries its own copy of the model, without messages: one that runs out of memory keeps none waiting.
    """
    size = largest_divisor(blocks, max(1, MOST_TOKENS // args.block_size))
    while size:
        clear_device_cache(garbage_collection=True)
        try:
            try_step(args, accelerator, model, size)
            break
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        size = largest_divisor(size, size // 2)
    clear_device_cache(garbage_collection=True)
    size = min(gather_object([size]))
    if not size:
        raise MemoryExceededError(
            f"There is not enough memory for a training step with one block: give a --block_size below "
            f"{args.block_size}, or --gradient_checkpointing."
        )
    return size


def try_step(args: PretrainArguments, accelerator: Accelerator, model: torch.nn.Module, size: int):
    """Compute passes of `size` blocks with the rest of a training in the memory of a GPU."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    copies = 2 + (accelerator.num_processes > 1)  # AdamW's moments; DDP's buckets
    # The memory of a pass that was recorded as a CUDA graph is not there for an evaluation.
    logits = args.per_device_eval_batch_size * args.block_size * model.config.vocab_size
    free = int(FREE_SHARE * torch.cuda.get_device_properties(accelerator.device).total_memory)
    size_of_others = copies * weights + BYTES_OF_LOGIT * logits + free
    others = torch.empty(size_of_others, dtype=torch.uint8, device=accelerator.device)
    try_passes(args, accelerator, model, size)
    del others


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`; 0 if there is none."""
    return next((divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0), 0)


# Words in the name of a GPU -> 10^12 operations a second at most: on tensor cores in bfloat16 or float16 without
# sparsity, and in float32 without TF32, from NVIDIA's data sheets. The first line whose words are all in it counts.
PEAKS = {
    "H100 PCIe": (756, 51), "H100 NVL": (835, 60), "H100": (989, 67), "H200 NVL": (835, 60), "H200": (989, 67),
    "GH200": (989, 67), "B200": (2250, 75), "A100": (312, 19.5), "A10": (125, 31.2), "L40S": (362, 91.6),
    "L4": (121, 30.3), "4090": (165, 82.6), "5090": (210, 105),
}  # fmt: skip


def flops_of_token(model: torch.nn.Module, length: int) -> float:
    """The operations that a token of blocks of `length` takes in a training step."""
    modules, config = list(model.modules()), model.config
    operators = [module for module in modules if isinstance(module, ToeplitzOperator)]
    long = [operator for operator in operators if not isinstance(operator, (ShortConvolution, TwoAxisOperator))]
    apart = [*long, *(module for module in modules if isinstance(module, torch.nn.Embedding))]
    left_out = {id(parameter) for module in apart for parameter in module.parameters()}
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1 and id(p) not in left_out)
    head = getattr(model.get_output_embeddings(), "weight", None)  # a classifier has none
    matrices += head.numel() if id(head) in left_out else 0  # tied to the embeddings
    if not isinstance(model, TnnForTokenClassification):
        pooled = [getattr(model, name, torch.nn.Identity()) for name in ("classifier", "prediction_head")]
        matrices -= (1 - 1 / length) * sum(p.numel() for one in pooled for p in one.parameters() if p.ndim > 1)
    seen = [getattr(module, "sliding_window", None) or length for module in modules if is_attention(module)]
    size = getattr(config, "head_dim", None)
    width = size * config.num_attention_heads if size and seen else config.hidden_size
    side = math.isqrt(length) if getattr(config, "spatial_dims", 1) == 2 else length
    transforms = 20 * sum(operator.channels * operator.group_size for operator in long) * math.log2(2 * side)
    return 6 * matrices + 12 * width * sum(min(length, n) for n in seen) + transforms


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
