"""What a training step takes of memory and sends to other processes, recorded operation by operation.

A `Recorder` sees each operation of PyTorch below autograd. It notes when the memory of a result is taken and when it
is given back, and the numbers of each message. It does not look at values, so tensors without memory do
(`FakeTensorMode`). It does not see what an operation takes and gives back inside, such as the workspace of a library.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)

# The forward pass; the backward pass of the last layer, of others, of the first; the step of the optimizer. Over the
# layers between, activations become fewer and gradients more, each by the same number for a layer.
PHASES = ("forward", "last layer", "between", "first layer", "optimizer")

PARTS = ("weights", "gradients", "optimizer", "activations", "working")


@dataclass(eq=False, slots=True)
class Life:
    """The time of a storage, in events, and its bytes. `end` is None while it exists."""

    bytes: int
    start: int
    end: int | None = None
    part: str | None = None


class Recorder(TorchDispatchMode):
    """Records storages and messages while it is active.

    Attributes:
        lives: all storages that there have been.
        sent: the numbers that this process has sent to others, by their bytes, since `mark("forward")`.
        marks: events by name.
    """

    def __init__(self):
        super().__init__()
        self.lives: list[Life] = []
        self.sent: Counter[int] = Counter()
        self.marks: dict[str, int] = {}
        self.events = 0
        self.of_storage: dict[int, Life] = {}
        original = torch.UntypedStorage.resize_  # no operation: FSDP2 takes and frees whole weights so
        resize = mock.patch.object(torch.UntypedStorage, "resize_", lambda *given: self._resize(original, *given))
        self.resizing = resize

    def __enter__(self):
        self.resizing.start()
        return super().__enter__()

    def __exit__(self, *exception):
        self.resizing.stop()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a DTensor: it does operations with its local part, which come here
        result = func(*args, **kwargs or {})
        if func.name() == "_c10d_functional::wait_tensor":
            result = args[0]  # tensors without memory would be copied
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.life_of(tensor)
        if func.namespace in ("c10d", "_c10d_functional") and (message := message_of(func, args)):
            numbers, size = message
            self.sent[size] += numbers
        return result

    def life_of(self, tensor: torch.Tensor) -> Life:
        """The life of the storage of a tensor, which begins now if it is new."""
        storage = local(tensor).untyped_storage()
        if id(storage) not in self.of_storage:
            self._begin(storage)
            weakref.finalize(storage, self._end, id(storage)).atexit = False
        return self.of_storage[id(storage)]

    def mark(self, name: str):
        """Remember this moment."""
        self.marks[name] = self.events
        if name == "forward":
            self.sent.clear()

    def assign(self, part: str, tensors: Iterable[torch.Tensor]):
        """Say which part of the memory some tensors are."""
        for tensor in tensors:
            self.life_of(tensor).part = part

    def peaks(self, layers: int) -> dict[str, dict[str, int]]:
        """The bytes of each part when they are most together, in each of the `PHASES`, with so many layers."""
        begin, end = self.marks["backward"], self.marks["optimizer"]
        born = sorted(life.start for life in self.lives if life.part == "gradients" and begin < life.start < end)
        first = min(len(born) // layers, (len(born) - 1) // 2)  # gradients of a layer
        inside = [born[first], born[-first - 1]] if first > 0 else [begin, end]
        bounds = [self.marks["forward"], begin, *inside, end, self.marks["end"]]
        totals = self._totals()
        return {
            name: self._parts_at(max(range(start, stop + 1), key=totals.__getitem__))
            for name, start, stop in zip(PHASES, bounds, bounds[1:], strict=False)
        }

    def _totals(self) -> list[int]:
        """All bytes after each event."""
        changes = [0] * (self.events + 1)
        for life in self.lives:
            changes[life.start] += life.bytes
            if life.end is not None:
                changes[life.end] -= life.bytes
        return list(accumulate(changes))

    def _parts_at(self, event: int) -> dict[str, int]:
        found = dict.fromkeys(PARTS, 0)
        for life in self.lives:
            if lives_at(life, event):
                found[self.part_of(life)] += life.bytes
        return found

    def part_of(self, life: Life) -> str:
        """What was assigned; else from before the step, kept by the forward pass for the backward pass, or neither."""
        if life.part is not None:
            return life.part
        if lives_at(life, self.marks["forward"]):
            return "optimizer"
        return "activations" if lives_at(life, self.marks["backward"]) else "working"

    def bytes_at(self, name: str) -> int:
        """All bytes at a mark."""
        return sum(life.bytes for life in self.lives if lives_at(life, self.marks[name]))

    def _begin(self, storage: torch.UntypedStorage, part: str | None = None):
        self.events += 1
        life = self.of_storage[id(storage)] = Life(storage.nbytes(), self.events, part=part)
        self.lives.append(life)

    def _end(self, key: int):
        self.events += 1
        self.of_storage.pop(key).end = self.events

    def _resize(self, original: Callable, storage: torch.UntypedStorage, size: int):
        original(storage, size)
        if id(storage) in self.of_storage:
            self.of_storage[id(storage)].part = "working"
            self._end(id(storage))
            self._begin(storage, "working")


def lives_at(life: Life, event: int) -> bool:
    """Whether a storage exists right after an event."""
    return life.start <= event and (life.end is None or life.end > event)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Operations that send: which argument is sent, and how many of its numbers each of P processes sends to others.
# Sums go around a ring twice, everything else once.
ONCE, TWICE = (lambda count: (count - 1) / count), (lambda count: 2 * (count - 1) / count)
MESSAGES = {
    "c10d::allreduce_": (0, TWICE),
    "c10d::_allgather_base_": (0, ONCE),  # the result
    "c10d::_reduce_scatter_base_": (1, ONCE),
    "c10d::alltoall_base_": (1, ONCE),
    "_c10d_functional::all_reduce": (0, TWICE),
    "_c10d_functional::all_reduce_": (0, TWICE),
    "_c10d_functional::all_gather_into_tensor": (0, lambda count: count - 1),
    "_c10d_functional::reduce_scatter_tensor": (0, ONCE),
    "_c10d_functional::all_to_all_single": (0, ONCE),
}
SILENT = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "c10d::barrier"}


def message_of(func, args: tuple) -> tuple[float, int] | None:
    """The numbers that an operation sends to other processes, and the bytes of each; None if it sends nothing."""
    name = func.name().partition(".")[0]
    if name in SILENT:
        return None
    place, share = MESSAGES[name]
    tensors = tree_leaves(args[place])
    numbers = sum(tensor.numel() for tensor in tensors) * share(dist.get_world_size())
    return round(numbers), tensors[0].element_size()
