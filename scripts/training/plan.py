"""Count the memory of training steps and of reading on tensors without values, and estimate speed from operations."""

import argparse
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from modeling_tnn import modeling_tnn, numerics, tno_rtf, toeplitz_fused
from modeling_tnn.cache_tnn import CACHE
from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.parallel.sequence import SequenceParallel
from tnn_programs.cli.atomic import write_json
from tnn_programs.cli.tables import markdown_table
from tnn_programs.cli.training_arguments import PretrainArguments
from tnn_programs.training.costs import PEAKS, flops_of_token
from tnn_programs.training.models import build_model, change_config
from tnn_programs.training.optimizers import build_optimizer, decayed_parameters
from tnn_programs.training.passes import summed_loss
from tnn_programs.training.processes import shard_operators

USABLE = 0.9  # of the memory of a GPU
PARTS = ("states", "weights", "activations", "cache", "working", "peak")


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all storages that operations of PyTorch make, `now` and at most, without reading values."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in (torch.Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # DTensor computes with its local tensors, which are seen
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in self.sizes:
                self.resize(id(storage), storage.nbytes())
                weakref.finalize(storage, self._free, id(storage)).atexit = False
        return result

    def resize(self, key: int, size: int):
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _free(self, key: int):
        self.now -= self.sizes.pop(key)


def copies(model: PreTrainedModel, mesh, precision: str) -> tuple:
    """Stand in for DDP, which fails on tensors without values: its buckets are a second copy of all gradients."""
    return model, nullcontext([torch.empty_like(parameter) for parameter in model.parameters()])


def shards(model: PreTrainedModel, mesh, precision: str) -> tuple:
    """Shard as `tnn pretrain` does with `fsdp2.yaml`. accelerate reads these fields of an `Accelerator`."""
    options = {} if precision == "no" else {"mixed_precision_policy": precision}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={("shard",): mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shard",)),
        mixed_precision=precision,
        is_main_process=False,
    )
    shard_operators(model, mesh, reshards=True)
    return fsdp2_prepare_model(accelerator, model), nullcontext()


# Divides a model over a mesh of GPUs. Returns the model to call, and the context of its step.
ENGINES = {"ddp": copies, "fsdp2": shards, "sp": lambda model, mesh, precision: (model, SequenceParallel(model, mesh))}


def build_example(args: PretrainArguments, config: TnnConfig) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Build a model and a batch for it. One of real values has the head that its preset names."""
    rows, length = args.per_device_train_batch_size, args.block_size
    if config.input_channels is None:
        ids = torch.zeros(rows, length, dtype=torch.long)
        return build_model(args, config), {"input_ids": ids, "labels": ids}
    head = getattr(modeling_tnn, (config.architectures or ["TnnForSequenceClassification"])[0])
    values, labels = torch.zeros(rows, length, config.input_channels), torch.zeros(rows, dtype=torch.long)
    batch = {"input_values": values, "labels": labels}
    if head is modeling_tnn.TnnForTimeSeriesPrediction:
        future = torch.zeros(rows, config.prediction_length, config.input_channels)
        batch = {"past_values": values, "future_values": future}
    return build_model(args, config, head), batch


def training_step(args: PretrainArguments, config: TnnConfig, engine: str, mesh) -> Iterator:
    """Do a step with states of the optimizer. Yields the model, then the loss before its backward pass."""
    model, batch = build_example(args, config)
    model.train()
    called, context = ENGINES[engine](model, mesh, args.mixed_precision) if mesh else (model, nullcontext())
    optimizer = build_optimizer(model, args, decayed_parameters(model))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    yield model
    with context:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.mixed_precision == "bf16"):
            loss = summed_loss(called, config, batch, config.causal) if "input_ids" in batch else called(**batch).loss
        yield loss
        loss.backward()
    optimizer.step()


def reading(args: PretrainArguments, config: TnnConfig, dtype: torch.dtype) -> Iterator:
    """Read a batch without gradients. Yields the model before it has weights, then with them, and last its cache."""
    with torch.device("meta"):
        model, batch = build_example(args, config)
    yield model.to(dtype).eval()
    model._apply(lambda one: torch.zeros(one.shape, dtype=one.dtype)).tie_weights()
    yield model
    name, given = next(iter(batch.items()))  # the others are targets
    options = {"logits_to_keep": 1} if isinstance(model, modeling_tnn.TnnForCausalLM) else {}
    with torch.no_grad():
        yield model(**{name: torch.zeros(given.shape, dtype=given.dtype)}, **options).get(CACHE)


def count_reading(args: PretrainArguments, config: TnnConfig, dtype: torch.dtype, on_cpu: bool) -> dict[str, int]:
    """Count the bytes when a pass without gradients takes most, by part; `cache` is what continues the text."""
    memory, step = PeakMemory(), reading(args, config, dtype)
    # The code of a GPU reads no values; what differs in memory is the size of its parts.
    large = "" if on_cpu else "LARGE_"
    part = mock.patch.object(numerics, "LARGE_PART", getattr(numerics, f"{large}PART"))
    chunk = mock.patch.object(toeplitz_fused, "LARGE_CHUNK", getattr(toeplitz_fused, f"{large}CHUNK"))
    poles = mock.patch.object(tno_rtf, "is_contracting", return_value=True)
    found = {"parameters": next(step).num_parameters()}
    with pretended_gpus(1), part, chunk, poles, FakeTensorMode(), memory:
        next(step)
        memory.peak = weights = memory.now
        _cache = next(step)
        held, peak = memory.now - weights, memory.peak
    return found | {"weights": weights, "cache": held, "working": peak - weights - held, "peak": peak}


def count(args: PretrainArguments, config: TnnConfig, engine: str, processes: int) -> dict[str, float]:
    """Count the bytes on the first GPU when a step takes most, by part, and the operations of a token.

    `states` are weights, states of the optimizer and DDP's buckets, `activations` what the forward pass leaves for the
    backward pass, and `working` all else.
    """
    memory, resize = PeakMemory(), torch.UntypedStorage.resize_

    def resize_counted(storage: torch.UntypedStorage, size: int):  # not an operation; FSDP2 frees gathered weights so
        resize(storage, size)
        if id(storage) in memory.sizes:
            memory.resize(id(storage), size)

    patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_counted)
    with pretended_gpus(processes) as mesh, FakeTensorMode(), patch, memory:
        step = training_step(args, config, engine, mesh)
        model, states = next(step), memory.now
        flops = flops_of_token(model, args.block_size) * (4 / 3 if args.gradient_checkpointing else 1)
        found = {"parameters": model.num_parameters(), "flops_per_token": flops, "states": states}
        memory.peak = states
        next(step)
        found["activations"] = memory.now - states
        next(step, None)
    working = memory.peak - states - found["activations"]
    return found | {"working": working, "peak": memory.peak}


@contextmanager
def pretended_gpus(number: int) -> Iterator:
    """Run the code of accelerators on the CPU, as one of several processes without messages. Yields their mesh."""

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p > 0 else x  # a mask of bytes, not of numbers

    patched = {"HOST_DEVICES": (), "PLAIN_TENSORS": (*numerics.PLAIN_TENSORS, FakeTensor)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        with mock.patch.multiple(numerics, **patched), mock.patch.object(nn.functional, "dropout", dropout):
            yield init_device_mesh("cpu", (number,), mesh_dim_names=("shard",)) if number > 1 else None
    finally:
        dist.destroy_process_group()


def rows_of(args: argparse.Namespace) -> Iterator[dict]:
    """Count and estimate all steps, memory in GiB."""
    speed = args.model_flop_use * 1e12 * PEAKS[args.gpu][args.mixed_precision == "no"]
    given = {name: value for name, value in vars(args).items() if name in PretrainArguments.__dataclass_fields__}
    for length in args.lengths:
        options = PretrainArguments(**given, block_size=length, learning_rate=1e-3)
        config = change_config(options)
        if config.model_type != "tnn":
            raise ValueError(f"--config_name must be a TNN, got {config.model_type}")
        if "TnnForImageClassification" in (config.architectures or ()):
            raise ValueError(f"--config_name must be a model of sequences, got {args.config_name}, one of images")
        if config.input_channels is not None and max(args.processes) > 1 and "sp" in args.engines:
            raise ValueError("--engines must be ddp or fsdp2 for a model of real values, got sp")
        for number in args.processes:
            for engine in args.engines if number > 1 else [""]:
                if args.read:
                    row = {"length": length} | count_reading(options, config, getattr(torch, args.dtype), args.use_cpu)
                else:
                    row = {"engine": engine, "gpus": number, "length": length} | count(options, config, engine, number)
                    row["tokens_per_second"] = round(number * speed / row["flops_per_token"])
                row |= {part: row[part] / 2**30 for part in PARTS if part in row}
                if args.device_memory is not None:
                    row["fits"] = "yes" if row["peak"] <= USABLE * args.device_memory else "no"
                yield row


def run(args: argparse.Namespace):
    """Count all steps, and write them as a table."""
    rows = list(rows_of(args))
    heads = [name for name in ("engine", "gpus", "length", *PARTS, "fits", "tokens_per_second") if name in rows[0]]
    shapes = {int: "{:,}", float: "{:,.2f}", str: "{}"}
    lines = [[shapes[type(row[name])].format(row[name]) for name in heads] for row in rows]
    device = f"a {'CPU' if args.use_cpu else 'GPU'} when a pass" if args.read else "each GPU when a step"
    speed = f"{args.model_flop_use:.1%} of the peak of {args.gpu}, without communication"
    speed = "" if args.read else f"; tokens a second on all GPUs, an estimate:\n{speed}"
    sys.stdout.write(
        f"{rows[0]['parameters']:,} parameters. GiB on {device} takes most{speed}.\n\n"
        f"{markdown_table([head.replace('_', ' ') for head in heads], lines)}\n"
    )
    if args.output_file is not None:
        settings = {name: value for name, value in vars(args).items() if name != "output_file"}
        write_json(args.output_file, {"settings": settings, "versions": {"torch": torch.__version__}, "rows": rows})
