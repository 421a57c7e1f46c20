"""Passes of a training step: the loss of language models, compiled blocks, and CUDA graphs.

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
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from modeling_tnn.compile.regions import compile_regions
from modeling_tnn.configuration_tnn import TnnConfig
from tnn_programs.cli.training_arguments import PretrainArguments

logger = logging.getLogger("pretrain")
# PyTorch's notes on CUDA graphs: so that nothing is allocated, compiled or tuned for the first time while recording.
WARM_UP_PASSES = 3


def token_losses(logits: torch.Tensor, labels: torch.Tensor, causal: bool) -> torch.Tensor:
    """The cross entropy in nats of logits `(B, L, V)`, `(B, L)` or `(B, L-1)`; 0 where labels `(B, L)` are -100."""
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    # Rows of words: with the words in the second dimension it takes 1.7 times as long.
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view(labels.shape)


def count_targets(labels: torch.Tensor, causal: bool) -> torch.Tensor:
    """The number of predicted tokens in each row of labels `(B, L)`, `(B,)`."""
    return (labels[:, 1:] if causal else labels).ne(-100).sum(dim=1)


def losses_of(model: torch.nn.Module, batch: dict[str, torch.Tensor], causal: bool) -> torch.Tensor:
    """The `token_losses` of a batch, by a pass without a cache."""
    logits = model(input_ids=batch["input_ids"], **({"use_cache": False} if causal else {})).logits  # (B, L, V)
    return token_losses(logits, batch["labels"], causal)


def summed_loss(model: torch.nn.Module, config, batch: dict[str, torch.Tensor], causal: bool) -> torch.Tensor:
    """The sum of the losses of a batch with labels; of a TNN without the logits of the whole batch.

    The model may be wrapped for several devices; `config` is that of the one inside.
    """
    if isinstance(config, TnnConfig):
        options = {"num_items_in_batch": 1, "skip_logits": True} | ({"use_cache": False} if causal else {})
        return model(input_ids=batch["input_ids"], labels=batch["labels"], **options).loss
    return losses_of(model, batch, causal).sum()


def try_passes(args: PretrainArguments, accelerator: Accelerator, model: torch.nn.Module, size: int):
    """Compute two passes of `size` random blocks, the second with the gradients of the first, in this process alone.

    The model is not prepared by the accelerator yet; it moves to the device.
    """
    device = accelerator.device
    model.train().to(device)
    try:
        with undone(model, device):
            ids = torch.randint(model.config.vocab_size, (size, args.block_size), device=device)
            for _ in range(2):
                with accelerator.autocast():
                    batch = {"input_ids": ids, "labels": ids}
                    loss = summed_loss(model, model.config, batch, args.objective == "clm")
                loss.backward()
    finally:
        model.zero_grad(set_to_none=True)


def warn_of_bfloat16(device: torch.device, advice: str):
    """Say that a CPU without AVX-512 has no fast products in bfloat16, and the advice."""
    if device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        logger.warning("Without AVX-512, bfloat16 took 28 times as long as float32 on a CPU: %s is faster.", advice)


@contextlib.contextmanager
def undone(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Let passes of a model draw random numbers and change its statistics, and take both back."""
    statistics = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for buffer, before in statistics:
                buffer.copy_(before)


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
        logger.warning("The model cannot be compiled and is trained without (--torch_compile false): %s", _line(error))
        args.torch_compile = False
        for block in model.modules():
            block._compiled_call_impl = None
            if getattr(block, "regions", None) is not None:
                block.regions = None


def uncompiled(args: PretrainArguments) -> contextlib.AbstractContextManager:
    """A context in which compiled blocks run as they are: to compile for a few other batches would take longer."""
    return torch.compiler.set_stance("force_eager") if args.torch_compile else contextlib.nullcontext()


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
    """A function for the pass of a batch, which is recorded when it is first called, unless there is no `recorder`.

    Where that fails it goes on as it is, after one warning. `compute(batch, scale)` adds to the gradients of `model`,
    and returns the detached loss. If a step has one of the `passes`, the recording writes gradients and adds to none.
    """

    def __init__(self, compute: Callable, model: torch.nn.Module, passes: int, recorder: CudaRecorder | None):
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
            reason = _line(error.__context__ or error)
            logger.warning("A pass cannot be recorded as a CUDA graph, so its kernels start one by one: %s", reason)
            self.model.zero_grad(set_to_none=True)
            self.recorder = self._batch = self._scale = None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
