"""A training step does not wait for the device, and still changes no weights where it is not finite."""

import contextlib
import os
import signal
import subprocess

import pytest
import torch
from datasets import Dataset
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.models import slow
from helpers.scripts import (
    assert_same_weights,
    at_call,
    figures,
    pretrain_options,
    run_script,
    start_script,
    wait_until,
    weights,
    words,
    write_config,
    write_text,
)
from modeling_tnn import PoleCallback
from modeling_tnn.data.blocks import BlockStream
from modeling_tnn.tools import poles
from modeling_tnn.tools.poles import is_stable
from tnn_programs.cli.runs import checkpoints
from tnn_programs.training import accelerate_loop
from tnn_programs.training.accelerate_loop import Pretraining
from tnn_programs.training.step_reports import StepReports

WAITS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::masked_select"}
COPIES = {"tolist", "cpu", "numpy", "__array__"}  # they have no operation of their own on a CPU


class Operations(TorchDispatchMode):
    """Notes the operations, but for views, and the copies to the host; an accelerator makes it wait for some."""

    def __init__(self):
        super().__init__()
        self.names, self.copies = [], Copies(self)

    def __enter__(self):
        self.copies.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.copies.__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names += [] if function.is_view else [function._schema.name]
        return function(*args, **kwargs or {})

    @property
    def waits(self) -> list[str]:
        return [name for name in self.names if name in WAITS | COPIES]


class Copies(TorchFunctionMode):
    def __init__(self, operations: Operations):
        super().__init__()
        self.operations = operations

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.operations.names += [name for name in [getattr(function, "__name__", "")] if name in COPIES]
        return function(*args, **kwargs or {})


@pytest.fixture
def options(tmp_path):
    """The options of a short run with accumulation and clipping."""
    config, text = write_config(tmp_path / "config", hidden_dropout_prob=0.2), write_text(tmp_path / "text.txt", 100)
    return words(f"--config_name {config} --train_file {text} --max_steps 6 --learning_rate 0.01 --logging_steps 3",
                 "--per_device_train_batch_size 4 --gradient_accumulation_steps 2",
                 f"--output_dir {tmp_path}/out")  # fmt: skip


@pytest.fixture
def pretrain(options):
    """Call the program with more options."""
    return lambda *more: run_script("pretrain", *options, *more)


@pytest.fixture
def late(monkeypatch):
    """Steps whose numbers are read one step later, as on an accelerator."""
    created = StepReports.__init__

    def create(self, *arguments):
        created(self, *arguments)
        self.lag = 1

    monkeypatch.setattr(StepReports, "__init__", create)


def counted(monkeypatch, owner, method: str) -> list[Operations]:
    """The operations of each call of a method, from now on."""
    found, original = [], getattr(owner, method)

    def noted(*arguments, **options):
        with Operations() as operations:
            found.append(operations)
            return original(*arguments, **options)

    monkeypatch.setattr(owner, method, noted)
    return found


@pytest.mark.parametrize("optim, expected", [("adamw_torch_fused", []), *slow(("sgd", ["tolist"]))])
def test_a_step_does_not_wait_and_starts_little(optim, expected, pretrain, monkeypatch):
    """Backward, clipping, check for divergence and optimizer, but for one that cannot skip a step by itself.

    Loss and signals are read outside, a step later. The model checks its inputs on a CPU. Outside two passes are
    counts, loss, clipping, the check and the optimizer: what no graph or compiler starts.
    """
    passes, steps = (counted(monkeypatch, Pretraining, name) for name in ("_pass", "_train_step"))
    loss = accelerate_loop.summed_loss

    def uncounted_loss(*arguments):
        before = [len(one.names) for one in (passes[-1], steps[-1])]
        result = loss(*arguments)
        for one, kept in zip((passes[-1], steps[-1]), before, strict=True):
            del one.names[kept:]
        return result

    monkeypatch.setattr(accelerate_loop, "summed_loss", uncounted_loss)
    pretrain(f"--optim {optim}")
    assert [step.waits for step in steps] == [expected] * 6
    started = len(steps[-1].names) - sum(len(one.names) for one in passes[-2:])
    assert optim != "adamw_torch_fused" or 0 < started <= 50


def test_poles_are_moved_where_the_run_waits_anyway(pretrain, tmp_path, monkeypatch):
    """On an accelerator: at log steps, and before evaluations and checkpoints."""
    found = counted(monkeypatch, PoleCallback, "on_step")
    options = ["--config_overrides tno_type=rtf,rtf_constraint=null,rtf_initializer=xavier --learning_rate 0.3",
               "--max_pole_radius 0.9 --checkpointing_steps 4 --logging_steps 5 --max_steps 8"]  # fmt: skip
    pretrain(*options)
    assert len(found) == 8 and all(one.waits for one in found), "on the CPU, poles are moved after every step"
    found.clear()
    monkeypatch.setattr(poles, "is_on_host", lambda tensor: False)
    pretrain(*options, f"--output_dir {tmp_path}/late")
    assert [step for step, one in enumerate(found, 1) if one.waits] == [4, 5, 8]
    for folder in (tmp_path / "late", tmp_path / "late" / "checkpoint-4"):
        denominators = [one for key, one in weights(folder).items() if key.endswith("denominator")]
        assert denominators and all(is_stable(one, 0.901).all() for one in denominators)


@pytest.mark.slow
def test_numbers_that_are_read_later_change_nothing(late, tmp_path, monkeypatch):
    """With a signal, the step that was begun is finished too and saved; resumed, the run ends as without one."""
    options, out = [*pretrain_options(tmp_path, "clm"), "--max_steps 16"], tmp_path / "out"
    run_script("pretrain", *options, f"--output_dir {tmp_path}/late")
    with monkeypatch.context() as patched:
        at_call(patched, Pretraining, "_train_step", 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit) as left:
            run_script("pretrain", *options, f"--output_dir {out}")
    assert left.value.code == 143 and [path.name for path in checkpoints(out)] == ["checkpoint-5"]
    run_script("pretrain", *options, f"--output_dir {out} --resume_from_checkpoint latest")
    monkeypatch.undo()
    run_script("pretrain", *options, f"--output_dir {tmp_path}/whole")
    for other in ("late", "out"):
        assert_same_weights(tmp_path / "whole", tmp_path / other)
    assert figures(tmp_path / "whole") == figures(tmp_path / "late")


class Recorder:
    """In place of a CUDA graph: recording computes no values, and replays write them to the places it recorded."""

    def __init__(self, model, error=None):
        self.model, self.error, self.replays = model, error, 0

    def aside(self):
        return contextlib.nullcontext()

    def record(self, function):
        if self.error is not None:
            raise self.error
        parameters = list(self.model.parameters())
        before = {p: p.grad.clone() for p in parameters if p.grad is not None}
        loss = function()
        for place in (loss, *(p.grad for p in parameters)):
            place.fill_(torch.nan)
        for parameter, gradient in before.items():
            parameter.grad.copy_(gradient)
        places = [p.grad for p in parameters]

        def replay():
            self.replays += 1
            for parameter, place in zip(parameters, places, strict=True):
                assert parameter.grad is place, "a gradient has moved"
                parameter.grad = place if parameter in before else None
            loss.copy_(function())
            for parameter, place in zip(parameters, places, strict=True):
                if parameter.grad is not place:
                    place.copy_(parameter.grad)
                    parameter.grad = place

        return loss, replay


@pytest.mark.parametrize("passes", [3, *slow(1)])
def test_a_recorded_step(passes, pretrain, tmp_path, monkeypatch, caplog):
    """The weights of steps that are not recorded, bit for bit: dropout, accumulation, clipping and the schedule too.

    A recording that fails is one warning.
    """
    recorders, failed = [], RuntimeError("operation not permitted when stream is capturing")

    def run(name, error=None, more=""):
        def recorder_for(accelerator):
            recorders.append(Recorder(accelerator._models[0], error))
            return recorders[-1]

        monkeypatch.setattr(accelerate_loop, "recorder_for", recorder_for)
        pretrain(f"--gradient_accumulation_steps {passes} --config_overrides norm_type=batchnorm",
                 f"--output_dir {tmp_path / name} {more}")  # fmt: skip

    run("recorded")
    assert recorders[0].replays == 6 * passes
    run("failed", failed)
    assert caplog.text.count("cannot be recorded as a CUDA graph, so its kernels start one by one: operation not") == 1
    run("plain", more="--cuda_graph false")
    assert len(recorders) == 2
    for other in ("recorded", "failed"):
        assert_same_weights(tmp_path / "plain", tmp_path / other)
        assert figures(tmp_path / "plain") == figures(tmp_path / other)


@pytest.mark.parametrize(
    "when, broken, optim",
    [
        ("at once", "gradient", "adamw_torch"),
        ("late", "gradient", "adamw_torch_fused"),
        ("late", "loss", "adamw_torch_fused"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(when, broken, optim, pretrain, monkeypatch, request):
    """Nor does the finite step after it, which an accelerator has already begun."""
    if when == "late":
        request.getfixturevalue("late")
    summed, seen, calls = accelerate_loop.summed_loss, {}, []

    def sometimes_broken(model, *arguments):
        calls.append(0)
        if len(calls) == 5:  # the first pass of the third step
            seen["before"] = {name: p.detach().clone() for name, p in model.named_parameters()}
            seen["model"] = model
            factor = torch.tensor(torch.inf)
            loss = summed(model, *arguments)
            if broken == "loss":
                return loss * factor
            next(model.parameters()).register_hook(lambda gradient: gradient * (torch.nan if len(calls) < 7 else 1))
            return loss
        return summed(model, *arguments)

    monkeypatch.setattr(accelerate_loop, "summed_loss", sometimes_broken)
    what = "loss is inf" if broken == "loss" else "norm of the gradient is nan"
    good = "The step was not applied; last good checkpoint: .*/checkpoint-2."
    with pytest.raises(SystemExit, match=f"The {what} at step 3. {good}"):
        pretrain(f"--optim {optim} --logging_steps 100 --checkpointing_steps 2 --save_total_limit 1")
    late_steps = 1 if when == "late" and optim != "adamw_torch" else 0
    assert len(calls) == 6 + 2 * late_steps
    assert all(torch.equal(value, seen["before"][name]) for name, value in seen["model"].named_parameters())


@pytest.mark.slow
def test_processes_that_load_data_change_nothing(tmp_path):
    """The order, the masks, and what a resumed run sees, even if it has another number of them."""
    options = [*pretrain_options(tmp_path, "mlm"), "--max_steps 16 --checkpointing_steps 6"]
    for workers in (0, 2):
        run_script("pretrain", *options, f"--output_dir {tmp_path}/{workers} --dataloader_num_workers {workers}")
    (tmp_path / "resumed").mkdir()
    os.rename(tmp_path / "0" / "checkpoint-6", tmp_path / "resumed" / "checkpoint-6")
    run_script("pretrain", *options, f"--output_dir {tmp_path}/resumed --dataloader_num_workers 2",
               "--resume_from_checkpoint latest")  # fmt: skip
    for other in ("2", "resumed"):
        assert_same_weights(tmp_path / "0", tmp_path / other)
        assert figures(tmp_path / "0") == figures(tmp_path / other)


def test_a_process_that_loads_data_ends_with_the_main_one():
    """At exit, multiprocessing sends SIGTERM to what is still there, and waits."""
    stream = BlockStream(Dataset.from_dict({"input_ids": [[3], [4]]}), None, False)
    batches = iter(stream.loader(1, 0, 2, workers=1))
    next(batches)
    (worker,) = batches._workers
    for sender, alive in ((["kill", "-TERM", str(worker.pid)], True), (None, False)):
        subprocess.run(sender, check=True) if sender else worker.terminate()
        worker.join(timeout=0.3 if alive else 20)
        assert worker.is_alive() == alive


@pytest.mark.slow
def test_a_signal_for_the_whole_group(tmp_path):
    """Schedulers and terminals send it to the processes that load data too. The step is finished and saved."""
    options = [*pretrain_options(tmp_path, "clm"), f"--max_steps 100000 --output_dir {tmp_path}/out",
               "--checkpointing_steps 2 --save_total_limit 1 --dataloader_num_workers 2"]  # fmt: skip
    with start_script("pretrain", *options, start_new_session=True) as process:
        wait_until(lambda: checkpoints(tmp_path / "out"), process)
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    step = checkpoints(tmp_path / "out")[-1].name.removeprefix("checkpoint-")
    assert process.returncode == 128 + signal.SIGTERM, output
    assert f"stopped by a signal at step {step}. Continue with" in output and "Traceback" not in output
    assert "huggingface/tokenizers" not in output
