"""What the host learns of a training step, without a wait between the gradients and the change of the weights.

An accelerator computes a step while the host prepares the next one. So the device itself decides whether the weights
change, and the host reads a step's numbers after it has handed over the step that follows.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor


class Readback:
    """A tensor on its way to the host. Reading waits for what computes it, not for what the device got afterwards."""

    def __init__(self, tensor: torch.Tensor):
        self.values = tensor.to("cpu", non_blocking=True)
        self.copied = None
        if tensor.device.type != "cpu":
            self.copied = torch.Event(tensor.device)
            self.copied.record()

    def read(self) -> list[float]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.values.tolist()


def report_of(loss: torch.Tensor, norm: torch.Tensor | float | None, signals: torch.Tensor) -> torch.Tensor:
    """Mean loss, norm of the gradient (0 unless it is known) and number of processes with a signal, `(3,)`."""
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    norm = torch.zeros_like(loss) if norm is None else torch.as_tensor(norm, dtype=loss.dtype, device=loss.device)
    return torch.stack([loss, norm, signals])


class StepReports:
    """The reports of the steps of a run.

    Args:
        device: computes the steps.
        check: is called with step, loss and norm of each step; raises an error unless both are finite.
    """

    def __init__(self, device: torch.device, check: Callable[[int, float, float], None]):
        self.check = check
        self.lag = 0 if device.type == "cpu" else 1  # steps that are not read yet while the next one is prepared
        self.loss = float("nan")  # of the last step that was read
        self._unread: deque[tuple[int, Readback]] = deque()
        self._failed = torch.zeros((), device=device)  # 1 from the first step on that is not finite

    def add(self, step: int, report: torch.Tensor, optimizer: torch.optim.Optimizer | None):
        """Note a step before the optimizer applies it.

        Args:
            optimizer: leaves the weights as they are from the first step on whose loss or norm is not finite. None if
                something else sees to it.
        """
        # Such an optimizer skips a step by a flag on the device. Gradient scalers set the same one.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            self._failed = torch.maximum(self._failed, (~report.isfinite().all()).float())
            optimizer.found_inf = self._failed
        elif optimizer is not None:
            self.check(step, *report[:2].tolist())
        self._unread.append((step, Readback(report)))

    def read(self, all_steps: bool) -> bool:
        """Read the reports that are due; whether a process got a signal. With a signal, all are read."""
        stopping = False
        while len(self._unread) > (0 if all_steps or stopping else self.lag):
            step, report = self._unread.popleft()
            self.loss, norm, signals = report.read()
            self.check(step, self.loss, norm)
            stopping = stopping or signals > 0
        return stopping
