"""An estimate of a training run: size of the model, tokens, memory and time, from two steps on random tokens."""

import time

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from tnn_scripts.common.devices import resident_peak

BYTES_OF_A_GIB = 2**30


def measure_step(
    model: PreTrainedModel, batch_size: int, length: int, accelerator: Accelerator
) -> tuple[float, float]:
    """The seconds of a training step with AdamW on ids `(batch_size, length)`, and the peak memory in GiB.

    On a CPU the memory is the peak of this process.

    Raises:
        torch.OutOfMemoryError, MemoryError: the step does not fit into memory.
    """
    model = model.train().to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.randint(model.config.vocab_size, (batch_size, length), device=accelerator.device)
    for _ in range(2):  # the first one also allocates
        start = time.perf_counter()
        with accelerator.autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        seconds = time.perf_counter() - start
    if accelerator.device.type == "cuda":
        return seconds, torch.cuda.max_memory_allocated() / BYTES_OF_A_GIB
    return seconds, resident_peak() / BYTES_OF_A_GIB


def describe_run(parameters: int, steps: int, tokens: int, seconds: float, memory: float, device: str) -> str:
    """The estimate as lines for the terminal. `tokens` and `seconds` are those of one step."""
    return (
        f"{parameters:,} parameters\n"
        f"{steps:,} steps of {tokens:,} tokens: {steps * tokens:,} tokens\n"
        f"about {_duration(steps * seconds)} on {device}: {seconds:.2f} s a step, {tokens / seconds:,.0f} tokens/s\n"
        f"about {memory:.1f} GiB of memory\n"
        "Nothing was written. Evaluations and checkpoints take additional time."
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
