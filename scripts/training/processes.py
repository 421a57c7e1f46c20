"""The processes of a run: signals that stop them, the loss of one, and a model in shards on all of them.

A process that ends by SIGTERM, which schedulers send some time before SIGKILL, has the exit status 143 (128 + 15), one
that ends by Ctrl-C has 130. FSDP2 by accelerate keeps parameters, gradients and states of the optimizer in shards. The
operators are sharded apart from their blocks, in float32 under every mixed precision: they make the kernels, which
bfloat16 cannot hold (`modeling_tnn/tno.py`).
"""

import os
import pickle
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from tnn_programs.cli.errors import UserError

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, gather_object, parse_flag_from_env
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from modeling_tnn.tno import ToeplitzOperator

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Messages of gloo's RuntimeErrors when a connection has ended or timed out.
OF_GLOO = ("gloo/transport", "[gloo]", "Connection closed by peer", "Connection reset by peer")
# Classes in the pickled table of a sharded checkpoint, besides dtypes.
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


class StopRequested(Exception):
    """The exception for a stop by a signal. It is raised where the state of the run can be saved."""


class StopRequest:
    """A context manager that remembers the first signal. `signal` is 0 without one."""

    def __init__(self):
        self.signal = 0
        self._previous = {}

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def status(self) -> int:
        """The exit status of the process. If another process got the signal, it is that of SIGTERM."""
        return 128 + (self.signal or signal.SIGTERM)

    def _remember(self, number, frame):
        self.signal = self.signal or number
        # A second Ctrl-C ends a single process at once. Launchers of several processes may send the first one twice.
        if number == signal.SIGINT and int(os.environ.get("WORLD_SIZE", 1)) == 1:
            signal.signal(number, self._previous[number])


class LostProcessError(UserError):
    """The error for a process of the run that has ended, or has not answered in time."""


@contextmanager
def watching_processes() -> Iterator[None]:
    """Turn the errors of communication into a LostProcessError."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, torch.distributed.DistError) or any(text in str(error) for text in OF_GLOO)):
            raise
        lost = "Another process of this run has ended, or has not answered within --ddp_timeout"
        raise LostProcessError(f"{lost} ({' '.join(str(error).split())[:200]}).") from error


def prepare_engine(on_cpu: bool, timeout: timedelta):
    """Let accelerate shard on CPUs too, over gloo, and refuse DeepSpeed. Call it before the `Accelerator` is made."""
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        # It would change weights before their gradients are known to be finite, and reads checkpoints from pickles.
        same = "configuration/accelerate/fsdp2.yaml divides the same states"
        raise ValueError(f"This program does not run with DeepSpeed: {same}.")
    shards_on_cpu = on_cpu and parse_flag_from_env("ACCELERATE_USE_FSDP")
    if shards_on_cpu and PartialState(cpu=True, timeout=timeout).distributed_type == DistributedType.MULTI_CPU:
        # The only name under which accelerate looks for FSDP, else it copies the model to each process unasked.
        # It is read nowhere else before it becomes FSDP.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def check_engine(accelerator: Accelerator):
    """Raise a ValueError if the launcher was asked for shards, and the model is not in any."""
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and accelerator.distributed_type != DistributedType.FSDP:
        runs = f"{accelerator.distributed_type.value} with {accelerator.num_processes} process"
        where = f"{runs} on {accelerator.device.type}. Start several with `accelerate launch`."
        raise ValueError(f"FSDP was asked for, but accelerate runs {where}")


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
    give_parameters(optimizer, model, groups)
    model, optimizer, *others = accelerator.prepare(model, optimizer, *others)
    # accelerate tells parameters apart by the address of their shard. Empty shards have none.
    give_parameters(optimizer, model, groups)
    return model, optimizer, *others


def give_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module, groups: list[list[str]]):
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [model.get_parameter(name) for name in own]


def shard_operators(model: torch.nn.Module, mesh: DeviceMesh | None, reshards: bool):
    """Make each operator a group of shards in float32; `reshards` gives its gathered parameters back after a pass."""
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
        is_dtype = module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        if is_dtype or name in OF_TABLES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the table of shards must hold sizes and places only, got {module}.{name}")


def check_tables(checkpoint: Path):
    """Raise an UnpicklingError if a table of shards, which PyTorch reads from an unrestricted pickle, holds more."""
    for table in checkpoint.rglob(".metadata"):
        with table.open("rb") as file:
            TableReader(file).load()
