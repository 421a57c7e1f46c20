"""SIGTERM and SIGINT as a request: what runs is finished and saved before the process leaves.

Schedulers send SIGTERM some time before SIGKILL; a process that leaves by it has the status 143 (128 + 15), one that
leaves by Ctrl-C 130.
"""

import os
import signal
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import TrainerCallback

from tnn_scripts.common.checkpoints import write_checksums

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(Exception):
    """Raised where everything is in a state that can be saved."""


class StopRequest:
    """Remembers the first signal while it is open as a context manager; `signal` is 0 before."""

    def __init__(self):
        self.signal = 0
        self._previous = {}

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def status(self) -> int:
        """What the process leaves with; another process may have had the signal."""
        return 128 + (self.signal or signal.SIGTERM)

    def _remember(self, number, frame):
        self.signal = self.signal or number
        # A second Ctrl-C ends a process at once. Launchers of several pass on what the terminal sent already.
        if number == signal.SIGINT and int(os.environ.get("WORLD_SIZE", 1)) == 1:
            signal.signal(number, self._previous[number])


class StopCallback(TrainerCallback):
    """Ends a Trainer's run with a checkpoint after the step in which one of its processes had a signal.

    Trainer's own `enable_jit_checkpoint` saves before the optimizer's step, each process at a step of its own, and
    afterwards the run looks as if it had come to its end.
    """

    def __init__(self, stop: StopRequest):
        self.stop, self.stopped = stop, False

    def on_step_end(self, args, state, control, **kwargs):
        asked = torch.tensor(float(self.stop.signal != 0))
        if args.world_size > 1:
            asked = reduce(asked.to(args.device), reduction="sum")
        self.stopped = asked.item() > 0
        if self.stopped:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_save(self, args, state, control, **kwargs):
        PartialState().wait_for_everyone()  # each process writes its random states
        if state.is_world_process_zero:
            write_checksums(Path(args.output_dir) / f"checkpoint-{state.global_step}")
