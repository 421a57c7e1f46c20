"""SIGTERM and SIGINT as requests to stop: the program finishes and saves its present step before it exits.

Schedulers send SIGTERM some time before SIGKILL. A process that ends by SIGTERM has the exit status 143 (128 + 15),
one that ends by Ctrl-C has 130.
"""

import os
import signal
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import TrainerCallback

from tnn_scripts.common.belonging import write_run
from tnn_scripts.common.checkpoints import write_checksums

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(Exception):
    """The exception for a stop by a signal. It is raised where the state of the run can be saved."""


class StopRequest:
    """A context manager that remembers the first signal. `signal` is 0 without one."""

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
        """The exit status of the process. If another process got the signal, it is that of SIGTERM."""
        return 128 + (self.signal or signal.SIGTERM)

    def _remember(self, number, frame):
        self.signal = self.signal or number
        # A second Ctrl-C ends a single process at once. Launchers of several processes may send the first one twice.
        if number == signal.SIGINT and int(os.environ.get("WORLD_SIZE", 1)) == 1:
            signal.signal(number, self._previous[number])


class StopCallback(TrainerCallback):
    """A callback that ends a Trainer's run with a checkpoint, after the step in which a process got a signal.

    Trainer's own `enable_jit_checkpoint` saves before the optimizer's step, and each process at another step. After it
    the run looks finished.

    Args:
        run: what the checkpoints say of the run that they belong to, see `belonging.py`.
    """

    def __init__(self, stop: StopRequest, run: dict):
        self.stop, self.run, self.stopped = stop, run, False

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
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_run(folder, self.run)
            write_checksums(folder)
