"""The numbers of optimizer steps on their way from the device to the host.

An accelerator computes a step while the host prepares the next one. So the device itself decides whether the weights
change, and the host reads a step's numbers after it has handed over the step that follows.
"""

from collections import deque
from collections.abc import Callable

import torch


class StepReports:
    """The reports of steps `(loss, norm of the gradient, processes with a signal)`, on their way to the host.

    `check(step, loss, norm)` raises an error unless both are finite.
    """

    def __init__(self, device: torch.device, check: Callable[[int, float, float], None]):
        self.check = check
        self.lag = 0 if device.type == "cpu" else 1  # steps that are not read yet while the next one is prepared
        self.loss = float("nan")  # of the last step that was read
        self._unread: deque[tuple[int, torch.Tensor, torch.Event | None]] = deque()
        self._failed = torch.zeros((), device=device)  # 1 from the first step on that is not finite

    def add(self, step: int, report: torch.Tensor, optimizer: torch.optim.Optimizer | None):
        """Note a step before the `optimizer` applies it, which leaves out all from the first that is not finite on."""
        # Such an optimizer skips a step by a flag on the device. Gradient scalers set the same one.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            self._failed = torch.maximum(self._failed, (~report.isfinite().all()).float())
            optimizer.found_inf = self._failed
        elif optimizer is not None:
            self.check(step, *report[:2].tolist())
        values, copied = report.to("cpu", non_blocking=True), None
        if report.device.type != "cpu":
            copied = torch.Event(report.device)
            copied.record()
        self._unread.append((step, values, copied))

    def read(self, all_steps: bool) -> bool:
        """Read the reports that are due; whether a process got a signal. With a signal, all are read."""
        stopping = False
        while len(self._unread) > (0 if all_steps or stopping else self.lag):
            step, values, copied = self._unread.popleft()
            if copied is not None:
                copied.synchronize()  # waits for this step alone
            self.loss, norm, signals = values.tolist()
            self.check(step, self.loss, norm)
            stopping = stopping or signals > 0
        return stopping
