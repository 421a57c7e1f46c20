"""The training loop of `pretrain.py`, on Accelerate.

An optimizer step averages the loss over the predicted tokens of the whole global batch, that is over all its forward
passes and all processes. So the same examples give the same step for any number of passes and processes.
"""

import dataclasses
import math
import pickle
import time
from pathlib import Path

from tnn_programs.cli.errors import MemoryExceededError, UserError, suggest_smaller

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, load, set_seed
from accelerate.utils.constants import RNG_STATE_NAME
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_tnn.data.blocks import BlockStream
from modeling_tnn.tools.poles import PoleCallback, find_unstable
from tnn_programs.cli.atomic import new_folder, write_json
from tnn_programs.cli.runs import STATE, check_same_run, checkpoints, describe_run, prune, read_object, write_checksums
from tnn_programs.cli.training_arguments import PretrainArguments
from tnn_programs.data.corpus import DEMO_CORPUS
from tnn_programs.data.streaming import TextStream
from tnn_programs.training.costs import flops_of_token, peak_of
from tnn_programs.training.optimizers import build_optimizer, build_scheduler, decayed_parameters
from tnn_programs.training.passes import CapturedStep, count_targets, losses_of, recorder_for, summed_loss, uncompiled
from tnn_programs.training.processes import StopRequest, StopRequested, check_tables, prepare, shard_errors
from tnn_programs.training.step_reports import StepReports

# A pole beyond this radius may make the sampled kernel infinite.
LARGEST_SAFE_RADIUS = 1 - 1e-6
TRAINING_MEMORY = (
    "give a smaller --per_device_train_batch_size with more --gradient_accumulation_steps (which follow from "
    "--global_batch_tokens), or --gradient_checkpointing"
)


@dataclasses.dataclass
class TrainerState:
    """The progress of a run: step, losses, times and history of evaluations."""

    step: int = 0
    best_loss: float | None = None
    best_step: int = 0
    loss_before: float | None = None
    train_seconds: float = 0.0
    train_cpu_seconds: float = 0.0
    history: list[dict] = dataclasses.field(default_factory=list)


class Pretraining:
    """One training run: its state, and its steps, evaluations and checkpoints."""

    def __init__(
        self, args: PretrainArguments, accelerator: Accelerator, model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase, train: BlockStream | TextStream, validation: BlockStream,
    ):  # fmt: skip
        self.args, self.accelerator, self.tokenizer = args, accelerator, tokenizer
        self.output_dir = Path(args.output_dir)
        self.causal = args.objective == "clm"
        self.train_stream, self.config = train, model.config
        self.state, self._saved_step = TrainerState(), None
        passes, processes = args.gradient_accumulation_steps, accelerator.num_processes
        self.blocks_per_step = args.per_device_train_batch_size * passes * processes
        sharded = accelerator.distributed_type == DistributedType.FSDP
        run = {"data": train.describe(), "blocks_per_step": self.blocks_per_step, "sharded": sharded}
        self.fingerprint = describe_run(dataclasses.asdict(args), self.config, **run)
        self.stop = StopRequest()
        self.poles = PoleCallback(args.max_pole_radius, args.logging_steps)
        self.reports = StepReports(accelerator.device, self._check_finite)
        self._flops_of_token = flops_of_token(model, train.block_size)
        validation_loader = self._loader(validation, args.per_device_eval_batch_size, 0, len(validation))
        optimizer = build_optimizer(model, args, decayed_parameters(model))
        self.scheduler = build_scheduler(args, optimizer)
        self.model, self.optimizer, self.validation = prepare(accelerator, model, optimizer, validation_loader)
        recorder = recorder_for(accelerator) if args.cuda_graph else None
        accelerator.gradient_accumulation_steps = passes
        self.run_pass = CapturedStep(self._pass, self.model, passes, recorder)
        # After the weights are initialised, each process has its own dropout.
        set_seed(args.seed, device_specific=True)

    def _loader(self, stream: BlockStream | TextStream, batch_size: int, start: int, stop: int):
        device, workers = self.accelerator.device.type, self.args.dataloader_num_workers
        if workers is None:
            workers = 0 if device == "cpu" else 2
        return stream.loader(batch_size, start, stop, workers, pin_memory=device not in ("cpu", "mps"))

    def resume(self, folder: Path):
        """Continue from a checkpoint, whose files have been verified; ValueError if it is of another run."""
        saved = read_object(folder / STATE)
        try:
            check_same_run(folder, dict(saved["fingerprint"]), self.fingerprint)
            check_tables(folder)
            with shard_errors(RuntimeError):
                self.accelerator.load_state(str(folder), load_kwargs={"weights_only": True})
            # A count of forward passes, by which accelerate knows the last one of a step.
            self.accelerator.step = 0
            if saved["processes"] == self.accelerator.num_processes:
                # Accelerate would continue without random states that it cannot read.
                load(folder / f"{RNG_STATE_NAME}_{self.accelerator.process_index}.pkl")
            else:
                set_seed(self.args.seed + saved["state"]["step"], device_specific=True)
            self.scheduler.load_state_dict(saved["scheduler"])
            self.train_stream.load_state_dict(saved["stream"])
            self.state = TrainerState(**saved["state"])
        # A damaged file may raise any of these. Objects that are not tensors are refused.
        except (pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError, LookupError, TypeError) as error:
            reason = str(error)[:300]
            raise ValueError(f"{folder} cannot be read: {reason}. Resume from an earlier checkpoint.") from error

    def run(self):
        """Train until `max_steps`, with evaluations and checkpoints. After a signal: StopRequested, after the step."""
        args, accelerator, state = self.args, self.accelerator, self.state
        if state.loss_before is None:
            state.loss_before = self.evaluate()
        if state.step and self._is_due(args.eval_steps) and not self.is_evaluated:
            self.record_evaluation()  # the run was stopped during an evaluation
        start, stop = (step * self.blocks_per_step for step in (state.step, args.max_steps))
        loader = self._loader(self.train_stream, args.per_device_train_batch_size, start, stop)
        batches = iter(accelerator.prepare(loader))
        self.model.train()
        options = {"desc": "training", "unit": "step", "disable": not self._is_main}
        with tqdm(total=args.max_steps, initial=state.step, **options) as progress:
            self._start_clock()
            while state.step < args.max_steps:
                with suggest_smaller("a training step", TRAINING_MEMORY):
                    self._train_step([next(batches) for _ in range(args.gradient_accumulation_steps)])
                state.step += 1
                logs = state.step % args.logging_steps == 0 or state.step == args.max_steps
                pauses = self._is_due(args.eval_steps) or self._is_due(args.checkpointing_steps)
                stopping = self.reports.read(all_steps=logs or pauses)
                self.poles.on_step(accelerator.unwrap_model(self.model), state.step, logs or pauses)
                progress.update()
                if logs:
                    self._stop_clock()
                    self._log(progress, self.reports.loss)
                if stopping:
                    self._stop_clock()
                    raise StopRequested
                if pauses:
                    self._stop_clock()
                    if self._is_due(args.eval_steps):
                        self.record_evaluation()
                    if self._is_due(args.checkpointing_steps):
                        self.save_checkpoint()
                    self._start_clock()

    def _train_step(self, batches: list[dict[str, torch.Tensor]]):
        """Do one optimizer step. It changes no weights if the loss or the norm of the gradient is not finite."""
        accelerator, args = self.accelerator, self.args
        count = sum(count_targets(batch["labels"], self.causal).sum() for batch in batches)
        count = accelerator.reduce(count, reduction="sum").clamp(min=1)
        # accelerate divides by the accumulation steps and by the number of processes.
        scale = args.gradient_accumulation_steps * accelerator.num_processes / count
        total = torch.zeros((), device=accelerator.device)
        for batch in batches:
            with accelerator.accumulate(self.model):
                total += self.run_pass(batch, scale)
                if accelerator.sync_gradients:
                    # All processes learn of a signal at the same step, with the loss.
                    loss, signals = accelerator.reduce(torch.stack([total, self._stop_flag()]), reduction="sum")
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), args.max_grad_norm or math.inf)
                    self._report(loss / count, norm, signals)
                self.optimizer.step()
                if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                    self.scheduler.step()
                self.optimizer.zero_grad(set_to_none=not self.run_pass.is_captured)

    def _pass(self, batch: dict[str, torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
        loss = summed_loss(self.model, self.config, batch, self.causal)
        self.accelerator.backward(loss * scale)
        return loss.detach()

    def _report(self, loss: torch.Tensor, norm: torch.Tensor, signals: torch.Tensor):
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
        if self.accelerator.scaler is not None:
            # It expects overflows now and then: it skips the step and lowers the scale.
            norm, optimizer = torch.zeros_like(loss), None
        self.reports.add(self.state.step + 1, torch.stack([loss, norm.to(loss), signals]), optimizer)

    def evaluate(self) -> float:
        """The mean loss per predicted token of the validation blocks, in nats. After a signal: StopRequested."""
        size = self.args.per_device_eval_batch_size
        advice = f"give a --per_device_eval_batch_size below {size}" if size > 1 else "give a smaller --block_size"
        try:
            with suggest_smaller("evaluation", advice), uncompiled(self.args):
                return self._evaluate()
        except MemoryExceededError:
            # Saving needs all processes, but only one may have run out of memory.
            if self.accelerator.num_processes == 1:
                self.save_progress()
            raise

    @torch.no_grad()
    def _evaluate(self) -> float:
        training = self.model.training
        self.model.eval()
        losses = []
        for batch in self.validation:
            nats = losses_of(self.model, batch, self.causal).sum(dim=1)  # (B,)
            counts = count_targets(batch["labels"], self.causal).float()
            flags = self._stop_flag().expand_as(nats)
            # Duplicate rows, which even out the last batches of the processes, are dropped.
            rows = self.accelerator.gather_for_metrics(torch.stack([nats, counts, flags], dim=1))  # (B, 3)
            if rows[:, 2].any():
                raise StopRequested
            losses.append(rows[:, :2])
        self.model.train(training)
        nats, count = torch.cat(losses).cpu().double().sum(dim=0).tolist()
        return nats / max(count, 1)

    def save_checkpoint(self):
        """Write `checkpoint-STEP`. It is complete or absent."""
        with new_folder(self.output_dir / f"checkpoint-{self.state.step}", self.accelerator) as folder:
            with shard_errors(OSError):
                self.accelerator.save_state(str(folder))
            stream = self.train_stream.state_dict()
            if self._is_main:
                self.config.save_pretrained(folder)
                self.tokenizer.save_pretrained(folder)
                # Not accelerate's `register_for_checkpointing`, which reads an unrestricted pickle.
                state = {"fingerprint": self.fingerprint, "scheduler": self.scheduler.state_dict()}
                state |= {"processes": self.accelerator.num_processes, "stream": stream}
                write_json(folder / STATE, state | {"state": dataclasses.asdict(self.state)})
            self.accelerator.wait_for_everyone()
            if self._is_main:
                write_checksums(folder)
        self._saved_step = self.state.step
        if self._is_main:
            prune(self.output_dir, self.args.save_total_limit)

    def save_progress(self) -> bool:
        """Write a checkpoint of the present step, unless there is one; whether a run can resume from it."""
        if self.state.step and self._saved_step != self.state.step:
            self.save_checkpoint()
        return self.state.step > 0

    def save_model(self, folder: Path):
        """Save weights, configuration and tokenizer for `from_pretrained`, and the arguments of the run."""
        weights = self.accelerator.get_state_dict(self.model)
        if self._is_main:
            model = self.accelerator.unwrap_model(self.model)
            # Gathered from shards, tied weights are two.
            weights = {name: weight for name, weight in weights.items() if name not in model.all_tied_weights_keys}
            model.save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)
            options = dataclasses.asdict(self.args)
            if self.args.train_file is None and not self.args.dataset_name:
                options["dataset_name"] = [DEMO_CORPUS]
            write_json(folder / "training_args.json", options)

    @property
    def is_evaluated(self) -> bool:
        """Whether the last evaluation was of the present step."""
        return bool(self.state.history) and self.state.history[-1]["step"] == self.state.step

    @property
    def _is_main(self) -> bool:
        return self.accelerator.is_main_process

    def _check_finite(self, step: int, loss: float, norm: float):
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = f"loss is {loss}" if not math.isfinite(loss) else f"norm of the gradient is {norm}"
        unstable = find_unstable(self.accelerator.unwrap_model(self.model), LARGEST_SAFE_RADIUS)
        poles = f" Poles on or outside the unit circle: {'; '.join(map(str, unstable))}." if unstable else ""
        good = (checkpoints(self.output_dir) or ["none was written"])[-1]
        raise UserError(
            f"The {what} at step {step}. The step was not applied; last good checkpoint: {good}. "
            f"A lower learning rate, more warmup or bf16 instead of fp16 may help.{poles}"
        )

    def _stop_flag(self) -> torch.Tensor:
        # Filled on the device: a copy of a number to it would be a device sync.
        return torch.full((), float(self.stop.signal != 0), device=self.accelerator.device)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.state.step % every == 0

    def _start_clock(self):
        self._started = time.perf_counter(), time.process_time()

    def _stop_clock(self):
        """Add the seconds since the start to the state, and start the clock again."""
        wall, cpu = self._started
        self._start_clock()
        self.state.train_seconds += self._started[0] - wall
        self.state.train_cpu_seconds += self._started[1] - cpu

    def record_evaluation(self) -> float:
        """Evaluate, log the result, and save the model in `best/` if it is the best so far."""
        state, loss = self.state, self.evaluate()
        state.history.append({"step": state.step, "loss": loss, "perplexity": perplexity(loss)})
        self.accelerator.log({"eval_loss": loss, "eval_perplexity": perplexity(loss)}, step=state.step)
        if self._is_main:
            tqdm.write(f"step {state.step}: validation loss {loss:.4f}, perplexity {perplexity(loss):.2f}")
        if state.best_loss is None or loss < state.best_loss:
            state.best_loss, state.best_step = loss, state.step
            with new_folder(self.output_dir / "best", self.accelerator) as folder:
                self.save_model(folder)
                if self._is_main:
                    write_json(folder / "metrics.json", {"steps": state.step, **state.history[-1]})
        return loss

    def _log(self, progress: tqdm, loss: float):
        rate, speed = self.scheduler.get_last_lr()[0], self.speed()
        known = {name: value for name, value in speed.items() if value is not None}
        self.accelerator.log({"loss": loss, "learning_rate": rate} | known, step=self.state.step)
        use = f", {speed['model_flop_use']:.0%} of the peak" if "model_flop_use" in known else ""
        progress.set_postfix_str(f"loss {loss:.3f}, lr {rate:.1e}, {speed['tokens_per_second']:.0f} tokens/s{use}")

    def speed(self) -> dict[str, float | None]:
        """Tokens and the model's FLOPs per second so far, and the part of the peak that they are, if it is known."""
        state, accelerator = self.state, self.accelerator
        tokens = state.step * self.blocks_per_step * self.train_stream.block_size / state.train_seconds
        flops = tokens * self._flops_of_token
        peak = peak_of(accelerator.device, accelerator.mixed_precision)
        use = None if peak is None else flops / (peak * accelerator.num_processes)
        return {"tokens_per_second": tokens, "flops_per_second": flops, "model_flop_use": use}


def perplexity(loss: float) -> float:
    """The perplexity exp(loss), or infinity on overflow."""
    return math.exp(loss) if loss < 700 else math.inf
