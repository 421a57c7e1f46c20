"""A model and its optimizer, divided over processes as each engine does it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from modeling_tnn import SequenceParallel, TnnConfig, TnnForCausalLM, TnnForMaskedLM
from tnn_scripts.common.accelerate_loop import decayed_parameters
from tnn_scripts.common.optimizers import build_optimizer
from tnn_scripts.common.pretrain_arguments import PretrainArguments
from tnn_scripts.common.sharding import shard_operators


class Divided(NamedTuple):
    """A model that is divided over processes.

    Attributes:
        model: what is called.
        context: of forward and backward pass.
        adds: whether gradients are still to be added over the processes.
        buckets: a second copy of the gradients, if there is one to be counted.
    """

    model: nn.Module
    context: AbstractContextManager = nullcontext()
    adds: bool = False
    buckets: Sequence[torch.Tensor] = ()


class Engine(NamedTuple):
    """How several processes train one model.

    Attributes:
        mesh: makes the mesh of a kind of device and a number of processes.
        divide: divides a model over it, in a precision.
        texts: whether each process has texts of its own.
    """

    mesh: Callable
    divide: Callable[..., Divided]
    texts: bool


def plain_mesh(device: str, count: int):
    return init_device_mesh(device, (count,), mesh_dim_names=("shard",))


def tensor_mesh(device: str, count: int) -> tuple:
    """transformers' configuration of a division, and its mesh."""
    config = DistributedConfig(tp_plan="auto", tp_size=count)
    config, _, mesh = PreTrainedModel.prepare_distribute_model(config)
    return config, mesh


def copies(model: PreTrainedModel, mesh, precision: str) -> Divided:
    if not isinstance(next(model.parameters()), FakeTensor):
        return Divided(DistributedDataParallel(model, process_group=mesh.get_group()))
    # DDP reads sizes in C++, where tensors without memory fail. Its buckets are a second copy of all gradients.
    return Divided(model, adds=True, buckets=[torch.empty_like(one) for one in model.parameters()])


def shards(model: PreTrainedModel, mesh, precision: str) -> Divided:
    """Shards as `pretrain.py` makes them with `fsdp2.yaml`."""
    shard_operators(model, mesh, reshards=True)
    return Divided(shard_blocks(model, mesh, precision))


def shard_blocks(model: PreTrainedModel, mesh, precision: str) -> nn.Module:
    """What accelerate does with FSDP2."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=model._no_split_modules,
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    if precision != "no":
        plugin.set_mixed_precision(precision, override=True)
    accelerator = SimpleNamespace(  # what this function reads of one
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={("shard",): mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shard",)),
        mixed_precision=precision,
        is_main_process=False,
    )
    return fsdp2_prepare_model(accelerator, model)


def parts_of_layers(model: PreTrainedModel, mesh: tuple, precision: str) -> Divided:
    # transformers divides weights before it ties them.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model = type(model).maybe_distribute_model(model, *mesh)
    model.tie_weights()
    return Divided(model)


def parts_of_texts(model: PreTrainedModel, mesh, precision: str) -> Divided:
    return Divided(model, SequenceParallel(model, mesh), adds=True)


def shards_and_parts_of_texts(model: PreTrainedModel, mesh, precision: str) -> Divided:
    shard_blocks(model, mesh, precision)  # operators in shards of their own cannot be divided
    return Divided(model, SequenceParallel(model, mesh))


ENGINES = {
    "ddp": Engine(plain_mesh, copies, texts=True),
    "fsdp2": Engine(plain_mesh, shards, texts=True),
    "tp": Engine(tensor_mesh, parts_of_layers, texts=False),
    "sp": Engine(plain_mesh, parts_of_texts, texts=False),
    "fsdp2+sp": Engine(plain_mesh, shards_and_parts_of_texts, texts=False),
}


def build_model(config: TnnConfig, gradient_checkpointing: bool) -> PreTrainedModel:
    """A language model in training mode."""
    model = (TnnForCausalLM if config.causal else TnnForMaskedLM)(config).train()
    if gradient_checkpointing:
        # transformers 5.17 has one name, of which later releases warn; they have another.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def optimizer_of(model: PreTrainedModel, name: str) -> torch.optim.Optimizer:
    """The optimizer of `pretrain.py`; fused optimizers take groups of divided parameters, or of others."""
    optimizer = build_optimizer(model, PretrainArguments(optim=name, learning_rate=1e-3), decayed_parameters(model))
    groups = list(optimizer.param_groups)
    optimizer.param_groups.clear()
    for group in groups:
        for divided in (True, False):
            chosen = [one for one in group["params"] if isinstance(one, DTensor) is divided]
            if chosen:
                optimizer.param_groups.append(group | {"params": chosen})
    return optimizer
