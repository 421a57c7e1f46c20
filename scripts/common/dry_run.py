"""An estimate of a training run: size of the model, tokens, memory and time, from two steps."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from transformers import Trainer

from tnn_scripts.common.devices import resident_peak, suggest_smaller

BYTES_OF_A_GIB = 2**30


def measure_step(
    model: nn.Module, inputs: Mapping, accelerator: Accelerator, compute_loss: Callable
) -> tuple[float, float]:
    """The seconds of a training step with AdamW on `inputs`, and the peak memory in GiB. `compute_loss` takes both.

    On a CPU the memory is the peak of this process.

    Raises:
        torch.OutOfMemoryError, MemoryError: the step does not fit into memory.
    """
    model, inputs = model.train().to(accelerator.device), send_to_device(inputs, accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    for _ in range(2):  # the first one also allocates
        start = time.perf_counter()
        with accelerator.autocast():
            loss = compute_loss(model, dict(inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        seconds = time.perf_counter() - start
    if accelerator.device.type == "cuda":
        return seconds, torch.cuda.max_memory_allocated() / BYTES_OF_A_GIB
    return seconds, resident_peak() / BYTES_OF_A_GIB


def dry_run(trainer: Trainer, runs: int = 1):
    """Write the estimate of a training with Trainer, and end the process.

    Args:
        runs: how many such trainings the program makes.

    Raises:
        SystemExit: always.
        MemoryExceededError: a step does not fit.
    """
    args, loader = trainer.args, trainer.get_train_dataloader()
    inputs = next(iter(loader))
    with suggest_smaller("a training step", "give a smaller --per_device_train_batch_size"):
        compute_loss = partial(trainer.compute_loss, num_items_in_batch=1)  # as in training: without logits
        seconds, memory = measure_step(trainer.model, inputs, trainer.accelerator, compute_loss)
    passes = args.gradient_accumulation_steps
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * len(loader) / passes)
    unit = "tokens" if "input_ids" in inputs else "rows"
    size = inputs["input_ids"].numel() if unit == "tokens" else len(next(iter(inputs.values())))
    size *= passes * args.world_size
    device = f"{args.world_size} x {args.device.type}"
    if args.process_index == 0:
        several = f"{runs} runs, each:\n" if runs > 1 else ""
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        text = describe_run(parameters, steps, size, seconds * passes, memory, device, unit)
        sys.stdout.write(f"{several}{text}\n")
    sys.exit(0)


def describe_run(
    parameters: int, steps: int, tokens: int, seconds: float, memory: float, device: str, unit: str = "tokens"
) -> str:
    """The estimate as lines for the terminal. `tokens` (or another `unit`) and `seconds` are those of one step."""
    return (
        f"{parameters:,} parameters\n"
        f"{steps:,} steps of {tokens:,} {unit}: {steps * tokens:,} {unit}\n"
        f"about {_duration(steps * seconds)} on {device}: {seconds:.2f} s a step, {tokens / seconds:,.0f} {unit}/s\n"
        f"about {memory:.1f} GiB of memory\n"
        "Nothing was written. Evaluations and checkpoints take additional time."
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
