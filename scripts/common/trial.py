"""Forward and backward passes that leave no trace, to see whether they can be computed."""

import contextlib
from collections.abc import Iterator

import torch
from accelerate import Accelerator

from tnn_scripts.common.lm_loss import summed_loss
from tnn_scripts.common.pretrain_arguments import PretrainArguments


def try_passes(args: PretrainArguments, accelerator: Accelerator, model: torch.nn.Module, size: int):
    """Compute two passes of `size` random blocks, the second with the gradients of the first, in this process alone.

    Args:
        model: not prepared by the accelerator; it moves to the device.

    Raises:
        torch.OutOfMemoryError: they do not fit.
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
