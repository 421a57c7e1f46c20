"""A training step on several devices: counted in one process without memory, and measured in real processes.

Both do the same: the code of the package, of PyTorch's and of transformers' engines runs, with the branches that it
takes on an accelerator. To be counted, tensors have shapes but no memory, and messages go nowhere.
"""

import copy
import dataclasses
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from modeling_tnn import TnnConfig, numerics, stacking
from tnn_scripts.common.lm_loss import summed_loss
from tnn_scripts.planning.engines import ENGINES, Divided, build_model, optimizer_of
from tnn_scripts.planning.recorder import PLAIN, Recorder

# Numbers of layers that are counted of a deep model.
FEW = (3, 4)

MARKS = ("forward", "backward", "optimizer", "end")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A step: the model, `batch` texts of `length` tokens for each process or for all together, and how it is done."""

    config: TnnConfig
    length: int
    engine: str = "ddp"
    processes: int = 1
    batch: int = 1
    precision: str = "no"
    optim: str = "adamw_torch_fused"
    gradient_checkpointing: bool = False


class Step:
    """The model, the optimizer and the batch of a step on this process."""

    def __init__(self, settings: Settings, mesh, device: str = "cpu"):
        self.settings, engine = settings, ENGINES[settings.engine]
        with torch.device(device):
            self.base = build_model(settings.config, settings.gradient_checkpointing)
            ids = torch.randint(settings.config.vocab_size, (settings.batch, settings.length))
        self.batch = {"input_ids": ids, "labels": ids}
        several = settings.processes > 1
        self.divided = engine.divide(self.base, mesh, settings.precision) if several else Divided(self.base)
        self.optimizer = optimizer_of(self.base, settings.optim)
        self.autocast = torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=settings.precision == "bf16")

    def run(self, mark: Callable[[str], None]):
        """Do the step, and say where it is."""
        config = self.settings.config
        with self.divided.context:
            mark("forward")
            with self.autocast:
                loss = summed_loss(self.divided.model, config, self.batch, config.causal)
            mark("backward")
            loss.backward()
            if self.divided.adds:
                for parameter in self.base.parameters():  # as `add_gradients`, which reads which of them there are
                    dist.all_reduce(parameter.grad)
        mark("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark("end")

    def fill_states(self):
        """Make the states of the optimizer."""
        for parameter in self.base.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()


def count(settings: Settings) -> dict:
    """The bytes of a step on the first of the processes, by part, and the numbers that it sends to others.

    All layers are alike: of a deep model a few are counted, and what each adds in a phase counts for the rest.
    """
    layers = settings.config.num_hidden_layers
    if layers <= FEW[1] + 1:
        found = count_step(settings)
    else:
        few, more = (count_layers(settings, number) for number in FEW)
        found = tree_map(lambda one, other: extend(one, other, layers), few, more)
        del found["phases"]["between"]  # not more than at its ends
    parts = max(found.pop("phases").values(), key=lambda phase: sum(phase.values()))
    return {"parts": parts, "peak": sum(parts.values())} | found


def extend(few: int, more: int, layers: int) -> int:
    """What is so much for `FEW` layers, for so many `layers`."""
    first, second = FEW
    return more + (more - few) * (layers - second) // (second - first)


def count_layers(settings: Settings, layers: int) -> dict:
    """`count` for the model with so many layers, which does what that of `settings` does."""
    whole = settings.config.num_hidden_layers
    config = copy.deepcopy(settings.config)
    config.num_hidden_layers = layers
    settings = dataclasses.replace(settings, config=config)
    # Whether the kernels of all layers are made at once depends on their number.
    with mock.patch.object(stacking, "LARGEST", stacking.LARGEST * layers / whole):
        return count_step(settings)


def count_step(settings: Settings) -> dict:
    """The counts of a step with all layers, the parts of each phase apart."""
    with pretended_processes(settings.processes):
        mesh = mesh_of(settings)
        with as_on_accelerators(), FakeTensorMode(), Recorder() as recorder:
            step = Step(settings, mesh)
            step.fill_states()
            recorder.assign("weights", step.base.parameters())
            recorder.assign("gradients", step.divided.buckets)

            def mark(name: str):
                recorder.mark(name)
                if name == "optimizer":
                    recorder.assign("gradients", [one.grad for one in step.base.parameters()])

            step.run(mark)
    return {
        "phases": recorder.peaks(settings.config.num_hidden_layers),
        "kept": recorder.bytes_at("backward") - recorder.bytes_at("forward"),
        "sent_numbers": sum(recorder.sent.values()),
        "sent_bytes": sum(size * numbers for size, numbers in recorder.sent.items()),
    }


def measure(settings: Settings) -> dict:
    """The bytes of the second step on this process, which is one of those of `settings`, at their most.

    On a CPU it is what PyTorch's allocator has given out and not got back, by its profiler.
    """
    mesh = mesh_of(settings)
    profiled = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with as_on_accelerators(), profiled as profiler, Patience():
        step, now = Step(settings, mesh), []

        def mark(name: str):
            while now:
                now.pop().__exit__(None, None, None)
            if name != "end":
                now.append(record_function(f"step: {name}"))
                now[-1].__enter__()

        step.run(mark)
        step.run(mark)
    events = profiler.profiler.kineto_results.events()
    starts = {name: max(e.start_ns() for e in events if e.name() == f"step: {name}") for name in MARKS[:3]}
    total, peak, at = 0, 0, dict.fromkeys(starts, 0)
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()
        at |= {name: total for name, start in starts.items() if event.start_ns() <= start}
        peak = max(peak, total) if event.start_ns() > starts["forward"] else 0
    return {"peak": peak, "kept": at["backward"] - at["forward"]}


class Patience(TorchDispatchMode):
    """Waits for each message until the threads of gloo have let go of it. The profiler does not see what they free."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in PLAIN for kind in types):
            return NotImplemented
        result = func(*args, **kwargs or {})
        if func.namespace == "c10d":
            Work.unbox(tree_leaves(result)[-1]).wait()
        if func.namespace in ("c10d", "_c10d_functional"):
            time.sleep(0.002)
        return result


def mesh_of(settings: Settings):
    return ENGINES[settings.engine].mesh("cpu", settings.processes) if settings.processes > 1 else None


@contextmanager
def pretended_processes(count: int) -> Iterator[None]:
    """Be the first of so many processes, whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def as_on_accelerators() -> Iterator[None]:
    """Take the branches of accelerators on the CPU, and those of ordinary tensors with tensors without memory."""
    plain = (*numerics.PLAIN_TENSORS, FakeTensor)
    with (
        mock.patch.multiple(numerics, HOST_DEVICES=(), PLAIN_TENSORS=plain),
        mock.patch.object(torch.nn.functional, "dropout", dropout),
    ):
        yield


def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout that keeps a mask of bytes, as on an accelerator; on the CPU PyTorch keeps one of numbers."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def measure_all(plans: list[Settings]) -> list[dict]:
    """What `measure` finds for each of several steps: the most of all processes that were started."""
    started = "RANK" in os.environ
    if started:
        dist.init_process_group("gloo")
    try:
        found = []
        for plan in plans:
            gc.collect()  # what is given back later would be missing
            one = measure(plan)
            everywhere = [one] * plan.processes
            if started:
                dist.all_gather_object(everywhere, one)
            found.append({name: max(other[name] for other in everywhere) for name in one})
        return found
    finally:
        if started:
            dist.destroy_process_group()
