"""The forward and backward pass of a training step as one CUDA graph.

A pass starts more than a thousand kernels, and a small batch takes longer to start them than to compute. A graph
starts them at once. It reads and writes memory at fixed places: a batch is copied to the one that was recorded,
gradients are set to zero and not removed, and the loss is overwritten by the next pass. All blocks have one shape.
"""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from tnn_scripts.common.trial import undone

logger = logging.getLogger("pretrain")
# PyTorch's notes on CUDA graphs: so that nothing is allocated, compiled or tuned for the first time while recording.
WARM_UP_PASSES = 3


class CudaRecorder:
    """Records what a function starts on a GPU."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A context for warm-up and recording, on a stream of their own; the default one cannot be recorded."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        # Also leaves the stream where the end of a failed recording raises.
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """The result of `function`, which has no values yet, and what computes them."""
        graph = torch.cuda.CUDAGraph()
        # Other threads pin the memory of the next batches meanwhile.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            result = function()
        return result, graph.replay


def recorder_for(accelerator: Accelerator) -> CudaRecorder | None:
    """The recorder of passes, on one GPU. Engines of several processes and the scaler of fp16 act within a pass."""
    alone = accelerator.distributed_type == DistributedType.NO and accelerator.scaler is None
    return CudaRecorder(accelerator.device) if alone and accelerator.device.type == "cuda" else None


class CapturedStep:
    """A function for the pass of a batch, which is recorded when it is first called.

    Where that fails it goes on as it is, after one warning.

    Args:
        compute: of a batch and a factor of its loss. Adds to the gradients of `model`, and returns the detached loss.
        passes: the passes of a step. If there is one, the recording writes gradients and adds to none.
        recorder: None to record nothing.
    """

    def __init__(
        self,
        compute: Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor],
        model: torch.nn.Module,
        passes: int,
        recorder: CudaRecorder | None,
    ):
        self.compute, self.model, self.passes, self.recorder = compute, model, passes, recorder
        self._replay = None

    @property
    def is_captured(self) -> bool:
        """Whether gradients have fixed places, and must be set to zero in place of being removed."""
        return self._replay is not None

    def __call__(self, batch: dict[str, torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
        if self.recorder is not None and self._replay is None:
            self._capture(batch, scale)
        if self._replay is None:
            return self.compute(batch, scale)
        for name, tensor in batch.items():
            self._batch[name].copy_(tensor)
        self._scale.copy_(scale)
        self._replay()
        return self._loss

    def _capture(self, batch: dict[str, torch.Tensor], scale: torch.Tensor):
        """Record a pass before the first step: no parameter has a gradient."""
        gc.collect()  # graphs of earlier passes, whose gradients belong to the default stream
        self._batch, self._scale = {name: tensor.clone() for name, tensor in batch.items()}, scale.clone()
        try:
            with undone(self.model, batch["input_ids"].device), self.recorder.aside():
                for _ in range(WARM_UP_PASSES):
                    self.model.zero_grad(set_to_none=True)
                    self.compute(self._batch, self._scale)
                # A recording that finds no gradients writes them; else it adds to those that are there.
                self.model.zero_grad(set_to_none=self.passes == 1)
                self._loss, self._replay = self.recorder.record(lambda: self.compute(self._batch, self._scale))
        except Exception as error:  # one of the pass itself is raised by the pass that follows
            # The end of a recording has an error of its own where one came before it.
            reason = " ".join(str(error.__context__ or error).split())[:300]
            logger.warning("A pass cannot be recorded as a CUDA graph, so its kernels start one by one: %s", reason)
            self.model.zero_grad(set_to_none=True)
            self.recorder = self._batch = self._scale = None
