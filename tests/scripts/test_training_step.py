"""A training step does not wait for the device, and still changes no weights where it is not finite."""

import contextlib
import inspect
import json
import os
import pickle
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from helpers.scripts import (
    assert_same_weights,
    at_call,
    figures,
    pretrain_options,
    run_script,
    start_script,
    wait_until,
    weights,
    write_config,
    write_text,
)
from modeling_tnn import PoleCallback
from modeling_tnn.tools import poles
from modeling_tnn.tools.poles import is_stable
from tnn_scripts.common import accelerate_loop, captured_step
from tnn_scripts.common.accelerate_loop import Pretraining
from tnn_scripts.common.checkpoints import checkpoints
from tnn_scripts.common.pretrain_arguments import PretrainArguments
from tnn_scripts.common.step_reports import StepReports
from tnn_scripts.data.blocks import BlockStream
from tnn_scripts.data.streaming import StreamLoader

WAITS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::masked_select"}
COPIES = {"tolist", "cpu", "numpy", "__array__"}  # they have no operation of their own on a CPU


class Waits(TorchDispatchMode):
    """Counts the operations for whose result the host waits on an accelerator."""

    def __init__(self):
        super().__init__()
        self.found, self.copies = [], Copies(self)

    def __enter__(self):
        self.copies.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.copies.__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in WAITS:
            self.found.append(function._schema.name)
        return function(*args, **kwargs or {})


class Copies(TorchFunctionMode):
    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in COPIES:
            self.waits.found.append(function.__name__)
        return function(*args, **kwargs or {})


class Operations(TorchDispatchMode):
    """Counts operations, but for views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **kwargs or {})


@pytest.fixture
def options(tmp_path):
    """The options of a short run with accumulation and clipping."""
    config = write_config(tmp_path / "config", hidden_dropout_prob=0.2)
    return ["--config_name", config, "--train_file", write_text(tmp_path / "text.txt", copies=100), "--max_steps", 6,
            "--learning_rate", 0.01, "--per_device_train_batch_size", 4, "--output_dir", tmp_path / "out",
            "--gradient_accumulation_steps", 2, "--logging_steps", 3]  # fmt: skip


@pytest.fixture
def late(monkeypatch):
    """Steps whose numbers are read one step later, as on an accelerator."""
    created = StepReports.__init__

    def create(self, *arguments):
        created(self, *arguments)
        self.lag = 1

    monkeypatch.setattr(StepReports, "__init__", create)


@pytest.fixture
def waits(monkeypatch):
    """The waits of each training step outside the model, which checks its inputs on a CPU."""
    found, step, loss = [], Pretraining._train_step, accelerate_loop.summed_loss

    def counted_step(self, batches):
        with Waits() as waits:
            found.append(waits.found)
            return step(self, batches)

    def uncounted_loss(*arguments):
        before = len(found[-1])
        result = loss(*arguments)
        del found[-1][before:]
        return result

    monkeypatch.setattr(Pretraining, "_train_step", counted_step)
    monkeypatch.setattr(accelerate_loop, "summed_loss", uncounted_loss)
    return found


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "muon"])
def test_a_step_does_not_wait(optim, options, waits):
    """Backward, clipping, check for divergence and optimizer. Loss and signals are read outside, a step later."""
    run_script("pretrain", *options, "--optim", optim)
    assert waits == [[]] * 6


def test_a_step_starts_little_outside_its_passes(options, monkeypatch):
    """Counts, loss, clipping, the check and the optimizer, for two passes: what no graph or compiler starts."""
    found = {"step": [], "pass": []}
    for method, part in (("_train_step", "step"), ("_pass", "pass")):
        original = getattr(Pretraining, method)

        def counted(self, *arguments, original=original, part=part):
            with Operations() as operations:
                result = original(self, *arguments)
            found[part].append(operations.count)
            return result

        monkeypatch.setattr(Pretraining, method, counted)
    run_script("pretrain", *options)
    outside = found["step"][-1] - sum(found["pass"][-2:])
    assert 0 < outside <= 50, outside


def test_other_optimizers_wait_for_the_check(options, waits):
    """One that does not skip a step by itself; so the count above would see a wait."""
    run_script("pretrain", *options, "--optim", "sgd")
    assert waits == [["tolist"]] * 6


def test_poles_are_moved_where_the_run_waits_anyway(options, tmp_path, monkeypatch):
    """On an accelerator: at log steps, and before evaluations and checkpoints."""
    found, on_step = {}, PoleCallback.on_step

    def counted(self, model, step, pauses=False):
        with Waits() as waits:
            on_step(self, model, step, pauses)
        found[step] = len(waits.found)

    monkeypatch.setattr(PoleCallback, "on_step", counted)
    options += [
        "--config_overrides",
        "tno_type=rtf,rtf_constraint=null,rtf_initializer=xavier",
        "--learning_rate",
        0.3,
    ]
    options += ["--max_pole_radius", 0.9, "--checkpointing_steps", 4, "--logging_steps", 5, "--max_steps", 8]
    run_script("pretrain", *options)
    assert all(found.values()), "on the CPU, poles are moved after every step"
    monkeypatch.setattr(poles, "is_on_host", lambda tensor: False)
    run_script("pretrain", *options, "--output_dir", tmp_path / "late")
    assert [step for step in found if found[step]] == [4, 5, 8]
    for folder in (tmp_path / "late", tmp_path / "late" / "checkpoint-4"):
        name = "model.safetensors"
        denominators = {key: one for key, one in load_file(folder / name).items() if key.endswith("denominator")}
        assert denominators and all(is_stable(one, 0.901).all() for one in denominators.values())


def test_numbers_that_are_read_later_change_nothing(late, tmp_path, monkeypatch):
    options = pretrain_options(tmp_path, "clm")
    run_script("pretrain", *options, "--output_dir", tmp_path / "late")
    monkeypatch.undo()
    run_script("pretrain", *options, "--output_dir", tmp_path / "whole")
    assert_same_weights(tmp_path / "whole", tmp_path / "late")
    assert figures(tmp_path / "whole") == figures(tmp_path / "late")


def test_a_signal_that_is_read_later(late, tmp_path, monkeypatch, caplog):
    """The step that was begun is finished too and saved; resumed, the run ends as if there was no signal."""
    options = [*pretrain_options(tmp_path, "clm"), "--max_steps", 16]
    run_script("pretrain", *options, "--output_dir", tmp_path / "whole")
    with monkeypatch.context() as patched:
        at_call(patched, Pretraining, "_train_step", 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit) as left:
            run_script("pretrain", *options, "--output_dir", tmp_path / "out")
    assert left.value.code == 143 and [path.name for path in checkpoints(tmp_path / "out")] == ["checkpoint-5"]
    run_script("pretrain", *options, "--output_dir", tmp_path / "out", "--resume_from_checkpoint", "latest")
    assert_same_weights(tmp_path / "whole", tmp_path / "out")


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


@pytest.mark.parametrize("passes", [1, 3])
def test_a_recorded_step(passes, options, tmp_path, monkeypatch, caplog):
    """The weights of steps that are not recorded, bit for bit: dropout, accumulation, clipping and the schedule too.

    A recording that fails is one warning.
    """
    options += ["--gradient_accumulation_steps", passes, "--config_overrides", "norm_type=batchnorm"]
    run_script("pretrain", *options, "--output_dir", tmp_path / "plain")
    recorders = []

    def recorder_for(accelerator, error=None):
        recorders.append(Recorder(accelerator._models[0], error))
        return recorders[-1]

    monkeypatch.setattr(accelerate_loop, "recorder_for", recorder_for)
    run_script("pretrain", *options, "--output_dir", tmp_path / "recorded")
    assert recorders[0].replays == 6 * passes
    failed = RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(accelerate_loop, "recorder_for", lambda accelerator: recorder_for(accelerator, failed))
    run_script("pretrain", *options, "--output_dir", tmp_path / "failed")
    assert caplog.text.count("cannot be recorded as a CUDA graph, so its kernels start one by one: operation not") == 1
    for other in ("recorded", "failed"):
        assert_same_weights(tmp_path / "plain", tmp_path / other)
        assert figures(tmp_path / "plain") == figures(tmp_path / other)
    monkeypatch.setattr(accelerate_loop, "recorder_for", None)
    run_script("pretrain", *options, "--cuda_graph", "false", "--max_steps", 1, "--output_dir", tmp_path / "without")


@pytest.mark.parametrize("fails", [False, True])
def test_the_calls_of_a_recording(fails, monkeypatch):
    """On a stream of its own, which is left also where a recording fails; other threads may allocate meanwhile."""
    calls, real = [], inspect.signature(torch.cuda.graph)

    class Stream(str):
        device = torch.device("cuda")

        def wait_stream(self, other):
            calls.append(f"{self} waits for {other}")

    @contextlib.contextmanager
    def inside(name):
        calls.append(f"into {name}")
        try:
            yield
        finally:
            calls.append(f"out of {name}")

    def graph(*given, **named):
        bound = real.bind(*given, **named).arguments
        assert (bound["cuda_graph"].name, bound["capture_error_mode"]) == ("graph", "thread_local")
        return inside(f"recording on {bound['stream']}")

    recorded = SimpleNamespace(name="graph", replay="replay")
    fakes = {"Stream": lambda device: Stream("side"), "current_stream": lambda device: Stream("main"),
             "stream": inside, "graph": graph, "CUDAGraph": lambda: recorded}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    recorder = captured_step.CudaRecorder(torch.device("cuda"))
    with contextlib.suppress(ZeroDivisionError), recorder.aside():
        assert recorder.record(lambda: 1 / (not fails)) == (1, "replay")
    expected = [
        "side waits for main",
        "into side",
        "into recording on side",
        "out of recording on side",
        "out of side",
    ]
    assert calls == expected + ([] if fails else ["main waits for side"])


@pytest.mark.parametrize(
    "device, engine, scaler, records",
    [("cuda", "NO", None, True), ("cpu", "NO", None, False), ("cuda", "MULTI_GPU", None, False),
     ("cuda", "NO", "fp16", False)],
)  # fmt: skip
def test_what_is_recorded(device, engine, scaler, records, monkeypatch):
    """One GPU, without the scaler of fp16."""
    monkeypatch.setattr(captured_step, "CudaRecorder", lambda device: "recorder")
    given = {"device": torch.device(device), "distributed_type": DistributedType(engine), "scaler": scaler}
    assert (captured_step.recorder_for(SimpleNamespace(**given)) == "recorder") == records


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "muon"])
@pytest.mark.parametrize("broken", ["loss", "gradient"])
@pytest.mark.parametrize("when", ["at once", "late"])
def test_a_step_that_is_not_finite_changes_nothing(when, broken, optim, options, monkeypatch, request):
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
    with pytest.raises(SystemExit, match=f"The {what} at step 3. The step was not applied"):
        run_script("pretrain", *options, "--optim", optim, "--logging_steps", 100)
    late_steps = 1 if when == "late" and optim != "adamw_torch" else 0
    assert len(calls) == 6 + 2 * late_steps
    assert all(torch.equal(value, seen["before"][name]) for name, value in seen["model"].named_parameters())


def test_a_run_of_the_other_adamw(options, tmp_path):
    """The two round differently, so a run that was begun with one is not resumed with the other."""
    options = [*options, "--optim", "adamw_torch", "--checkpointing_steps", 3]
    run_script("pretrain", *options)
    (tmp_path / "resumed").mkdir()
    os.rename(tmp_path / "out" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    options[options.index("--output_dir") + 1] = tmp_path / "resumed"
    resume = ["--resume_from_checkpoint", "latest"]
    with pytest.raises(SystemExit, match="optim must be adamw_torch, got adamw_torch_fused"):
        run_script("pretrain", *options, "--optim", "adamw_torch_fused", *resume)
    run_script("pretrain", *options, *resume)
    assert_same_weights(tmp_path / "out", tmp_path / "resumed")
    assert json.loads((tmp_path / "resumed" / "training_args.json").read_text())["optim"] == "adamw_torch"
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "resumed").values())


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_processes_that_load_data_change_nothing(objective, tmp_path):
    """The order, the masks, and what a resumed run sees, even if it has another number of them."""
    options = [*pretrain_options(tmp_path, objective), "--max_steps", 16, "--checkpointing_steps", 6]
    for workers in (0, 2):
        run_script("pretrain", *options, "--output_dir", tmp_path / str(workers), "--dataloader_num_workers", workers)
    (tmp_path / "resumed").mkdir()
    os.rename(tmp_path / "0" / "checkpoint-6", tmp_path / "resumed" / "checkpoint-6")
    run_script("pretrain", *options, "--output_dir", tmp_path / "resumed", "--dataloader_num_workers", 2,
               "--resume_from_checkpoint", "latest")  # fmt: skip
    for other in ("2", "resumed"):
        assert_same_weights(tmp_path / "0", tmp_path / other)
        assert figures(tmp_path / "0") == figures(tmp_path / other)


def kill_group(pid: int):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


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
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_for_the_whole_group(number, tmp_path):
    """Schedulers and terminals send it to the processes that load data too. The step is finished and saved."""
    options = [*pretrain_options(tmp_path, "clm"), "--max_steps", 100_000, "--output_dir", tmp_path / "out",
               "--checkpointing_steps", 2, "--save_total_limit", 1, "--dataloader_num_workers", 2]  # fmt: skip
    with start_script("pretrain", *options, start_new_session=True) as process:
        wait_until(lambda: checkpoints(tmp_path / "out"), process)
        os.killpg(process.pid, number)
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            kill_group(process.pid)
    step = checkpoints(tmp_path / "out")[-1].name.removeprefix("checkpoint-")
    assert process.returncode == 128 + number, output
    assert f"stopped by a signal at step {step}. Continue with" in output and "Traceback" not in output
    assert "huggingface/tokenizers" not in output


def test_loader_for_an_accelerator(monkeypatch):
    """Pinned memory and processes; on a CPU they would only cost. The examples can be sent to such a process."""
    stream = pickle.loads(pickle.dumps(BlockStream(Dataset.from_dict({"input_ids": [[3], [4]]}), None, False)))
    assert stream[0].keys() == {"input_ids", "labels"}
    monkeypatch.setattr(DataLoader, "__init__", lambda self, *arguments, **options: vars(self).update(options))
    args = PretrainArguments()
    for device, workers, pinned in (("cpu", 0, False), ("cuda", 2, True), ("mps", 2, False)):
        run = SimpleNamespace(args=args, accelerator=SimpleNamespace(device=torch.device(device)))
        loader = Pretraining._loader(run, stream, 1, 0, 1)
        assert (loader.num_workers, loader.persistent_workers, loader.pin_memory) == (workers, workers > 0, pinned)


@pytest.mark.parametrize("pins", [True, False])
def test_streamed_batches_are_pinned(pins, monkeypatch):
    """The pieces of the workers are, but what is put together of them is new memory."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.shape) or self)
    batches = StreamLoader.__new__(StreamLoader)
    stream = SimpleNamespace(states={}, device=torch.device("cpu"))
    pieces = [{"input_ids": torch.ones(2, 3), "numbers": torch.tensor(n), "states": {}} for n in ([0, 2], [1, 3])]
    batches.stream, batches.loader, batches.workers, batches.pin_memory = stream, pieces, 2, pins
    assert [batch["input_ids"].shape for batch in batches] == [(4, 3)]
    assert pinned == ([(4, 3)] if pins else [])
