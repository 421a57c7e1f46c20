"""`torch.compile` for the blocks of a model: one graph that all its layers share, and one for the kernels of a TNN."""

import contextlib
import logging
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from modeling_tnn import TnnConfig
from modeling_tnn.compile.regions import compile_regions
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
    if isinstance(model.config, TnnConfig):
        compile_regions(model, dynamic=False)
    else:
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
            if getattr(block, "regions", None) is not None:
                block.regions = None


def uncompiled(args: PretrainArguments) -> contextlib.AbstractContextManager:
    """A context in which compiled blocks run as they are: to compile for a few other batches would take longer."""
    return torch.compiler.set_stance("force_eager") if args.torch_compile else contextlib.nullcontext()


def load_compiled(models: list[torch.nn.Module], folder: str):
    """Load the weights of a checkpoint that names them as those of a compiled model. A hook of `load_state`."""
    file = Path(folder) / "model.safetensors"
    if not file.is_file():  # in shards, which the engine has loaded
        return
    with safe_open(file, "pt") as opened:
        if not any(PREFIX in name for name in opened.keys()):  # noqa: SIM118 - it is no mapping
            return
    weights = {name.replace(PREFIX, ""): tensor for name, tensor in load_file(file).items()}
    models.pop().load_state_dict(weights, strict=False)  # tied weights are there once
