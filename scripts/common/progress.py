"""The progress bar of the programs that train with Trainer: loss, learning rate and tokens per second."""

import time

import torch
from tqdm.auto import tqdm
from transformers import Trainer
from transformers.trainer_callback import ProgressCallback


class LossBar(ProgressCallback):
    """Transformers' bar with the figures of the training in it, where the original prints dictionaries below it."""

    def __init__(self):
        super().__init__()
        self.unit, self.count, self.seconds = "tokens", 0, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc="training", unit="step", dynamic_ncols=True
            )
        self.current_step = state.global_step

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        # Without a synchronisation: on an accelerator the time of a step is complete when its loss is logged.
        self.seconds += time.perf_counter() - self.start
        super().on_step_end(args, state, control, **kwargs)

    def add(self, inputs: dict[str, torch.Tensor]):
        """Count the tokens of a batch without padding; of inputs that are no tokens, the examples."""
        if "attention_mask" in inputs:
            self.count = self.count + inputs["attention_mask"].sum()  # stays on its device
        elif "input_ids" in inputs:
            self.count = self.count + inputs["input_ids"].numel()
        else:
            self.unit = "examples"
            self.count = self.count + len(next(iter(inputs.values())))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is None:
            return
        if "loss" in logs:
            start = time.perf_counter()
            count = int(self.count) * args.world_size  # waits for the accelerator
            self.seconds += time.perf_counter() - start
            rate = count / max(self.seconds, 1e-9)
            self.training_bar.set_postfix_str(
                f"loss {logs['loss']:.3f}, lr {logs['learning_rate']:.1e}, {rate:,.0f} {self.unit}/s"
            )
        figures = [(name, value) for name, value in logs.items() if name.startswith("eval_")]
        shown = [f"{name[5:]} {value:.4g}" for name, value in figures if not name.endswith(("runtime", "_second"))]
        if shown:
            self.training_bar.write(f"step {state.global_step}: validation {', '.join(shown)}")


def show_figures(trainer: Trainer) -> LossBar | None:
    """Put a `LossBar` in the place of the trainer's bar, if it has one."""
    if trainer.pop_callback(ProgressCallback) is None:
        return None
    bar = LossBar()
    trainer.add_callback(bar)
    return bar
