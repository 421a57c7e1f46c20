"""FSDP2 by accelerate: parameters, gradients and optimizer states in shards, one for each process.

The operators are sharded apart from their blocks, in float32 under every mixed precision: they make the kernels, which
bfloat16 cannot hold (`modeling_tnn/tno.py`).
"""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, gather_object, parse_flag_from_env
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from modeling_tnn import ToeplitzOperator

# What the pickled table of a sharded checkpoint is made of, besides dtypes.
OF_TABLES = {
    "pathlib": {"PosixPath", "WindowsPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


def allow_on_cpu(timeout: timedelta):
    """Let accelerate shard on CPUs, over gloo. By itself it copies the model to each process, without a word.

    Call it before the `Accelerator` is made.

    Args:
        timeout: how long a process waits for the others.
    """
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return
    if PartialState(cpu=True, timeout=timeout).distributed_type == DistributedType.MULTI_CPU:
        # The only name under which accelerate looks for FSDP. It is read nowhere else before it becomes FSDP.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def refuse_deepspeed():
    """Check that the launcher was not asked for DeepSpeed, before accelerate starts it.

    Raises:
        ValueError: it was.
    """
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "This program does not run with DeepSpeed: it would change the weights before their gradients are known "
            "to be finite, and it reads checkpoints from pickles, which can run any code. "
            "configuration/accelerate/fsdp2.yaml divides the same states."
        )


def check_engine(accelerator: Accelerator):
    """Check that the model is in shards, if the launcher was asked for that.

    Raises:
        ValueError: it is not.
    """
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            f"FSDP was asked for, but accelerate runs {accelerator.distributed_type.value} with "
            f"{accelerator.num_processes} process on {accelerator.device.type}. Start several processes with "
            "`accelerate launch`."
        )


def prepare(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *others) -> tuple:
    """`accelerator.prepare`, and with FSDP2 the operators in shards of their own."""
    if not accelerator.is_fsdp2:
        return accelerator.prepare(model, optimizer, *others)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    reshards, mesh = accelerator.state.fsdp_plugin.reshard_after_forward, accelerator.torch_device_mesh
    if mesh is not None:  # of a ParallelismConfig
        mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    shard_operators(model, mesh, reshards)
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [model.get_parameter(name) for name in own]
    model, optimizer, *others = accelerator.prepare(model, optimizer, *others)
    # accelerate tells parameters apart by the address of their shard. Empty shards have none.
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [model.get_parameter(name) for name in own]
    return model, optimizer, *others


def shard_operators(model: torch.nn.Module, mesh: DeviceMesh | None, reshards: bool):
    """Make each operator a group of shards, in float32 under every mixed precision.

    Args:
        reshards: whether the gathered parameters are given back after the forward pass.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    # No code changes the outputs of an operator in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for operator in [module for module in model.modules() if isinstance(module, ToeplitzOperator)]:
        fully_shard(operator, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)


def held_parameters(model: torch.nn.Module) -> list[int]:
    """The number of parameters that each process holds, in the order of the processes."""
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return gather_object([sum(p.numel() for p in own)])


@contextmanager
def shard_errors(kind: type[Exception]) -> Iterator[None]:
    """Raise the errors of all processes about their shards, which PyTorch collects, as one of a `kind`."""
    try:
        yield
    except CheckpointException as error:
        process, (first, _) = next(iter(error.failures.items()))
        raise kind(f"process {process}: {' '.join(str(first).split())[:200]}") from error


class TableReader(pickle.Unpickler):
    """Reads the table of a sharded checkpoint, and refuses what it does not need."""

    def find_class(self, module: str, name: str):
        if name in OF_TABLES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the table of shards must hold sizes and places only, got {module}.{name}")


def check_tables(checkpoint: Path):
    """Check the tables of a sharded checkpoint, which PyTorch reads from an unrestricted pickle.

    Raises:
        pickle.UnpicklingError: a table holds something else than it should.
    """
    for table in checkpoint.rglob(".metadata"):
        with table.open("rb") as file:
            TableReader(file).load()
