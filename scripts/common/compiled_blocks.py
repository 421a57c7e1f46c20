"""`torch.compile` for the blocks of a model: one graph, which all its layers share."""

import contextlib
import logging
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tnn_scripts.common.pretrain_arguments import PretrainArguments
from tnn_scripts.common.trial import try_passes

logger = logging.getLogger("pretrain")
# What earlier versions put before the names of weights in the checkpoints of a compiled model.
PREFIX = "_orig_mod."


def compile_blocks(args: PretrainArguments, accelerator: Accelerator, model: PreTrainedModel):
    """Compile the blocks of a model that is not prepared yet, on a GPU or if asked; sets `args.torch_compile`.

    They keep their places and the names of their weights. Where it fails they run as they are, after one warning.
    """
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if args.torch_compile is None:
        args.torch_compile = accelerator.device.type == "cuda" and not sharded
    if not args.torch_compile:
        return
    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer):  # the class of transformers' blocks
            block.compile(dynamic=False)
    if sharded:  # the whole may not fit
        return
    try:
        try_passes(args, accelerator, model, args.per_device_train_batch_size)
    except Exception as error:  # compilers and what they call have many
        reason = " ".join(str(error).split())[:300]
        logger.warning("The model cannot be compiled and is trained without (--torch_compile false): %s", reason)
        args.torch_compile = False
        for block in model.modules():
            block._compiled_call_impl = None


def uncompiled(args: PretrainArguments) -> contextlib.AbstractContextManager:
    """A context in which compiled blocks run as they are: to compile for a few other batches would take longer."""
    return torch.compiler.set_stance("force_eager") if args.torch_compile else contextlib.nullcontext()


def load_compiled(models: list[torch.nn.Module], folder: str):
    """Load the weights of a checkpoint that names them as those of a compiled model. A hook of `load_state`."""
    file = Path(folder) / "model.safetensors"
    weights = load_file(file) if file.is_file() else {}
    if any(PREFIX in name for name in weights):
        # Tied weights are there once.
        models.pop().load_state_dict({name.replace(PREFIX, ""): one for name, one in weights.items()}, strict=False)
