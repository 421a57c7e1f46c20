"""What a training step and a prefill of one row take, by length, and where each model stops.

step      forward pass, loss and backward pass; on a GPU under autocast in bfloat16
prefill   a pass without gradients that leaves a cache; on a GPU with weights of bfloat16

The taps of `rpe` are as many as positions; `rpe decayed` has those that 0.99 per lag leaves. Each measurement has a
process of its own, with at most --memory GiB on a CPU, and --seconds. A row says what ended it, and longer rows of
that model are left out. `peak_mebibytes` is that of a first pass with the weights, on a CPU the growth of the process,
and `planned_mebibytes` what `tnn plan` counts of the same. Rows in --output_file are not measured again.
"""

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from suites.device import noted, resident_peak
from suites.gpu_models import compile_model
from suites.memory import forget_peak
from suites.peers import FIELDS, build_model, tnn
from suites.record import described
from transformers import PreTrainedModel

from tnn_programs.benchmarks.measure import autocast, markdown, measure
from tnn_programs.benchmarks.models import training_loss
from tnn_programs.cli.atomic import write_json
from tnn_programs.cli.training_arguments import PretrainArguments

FORMATS = {"length": ",", "pass": "", "way": "", "milliseconds": ",.0f", "tokens_per_second": ",.0f"}
FORMATS |= {"peak_mebibytes": ",.0f", "planned_mebibytes": ",.0f", "error": ""}
KEY = ("length", "pass", "way")
# Operators by their fields.
TNNS = {name: FIELDS[name] for name in ("rpe", "fd", "rtf")} | {"hyena": {"tno_type": "hyena"}}
SETTINGS = ("hidden_size", "num_hidden_layers", "vocab_size", "threads", "device")


def build(way: str, args, length: int) -> PreTrainedModel:
    name, *words = way.split()
    if name not in TNNS:
        return build_model(name, args, length)
    torch.manual_seed(0)
    with torch.device(args.device):
        decay = {"decay": 0.99 if "decayed" in words else 1.0}
        return tnn(argparse.Namespace(**vars(args) | decay), length, **TNNS[name])


def step(way: str, model: PreTrainedModel, ids: torch.Tensor, args) -> Callable[[], None]:
    model.train().config.use_cache = False
    if "compiled" in way:
        compile_model(model)

    def run():
        with autocast(args, args.device != "cpu"):
            loss = training_loss(model, ids)
        loss.backward()
        model.zero_grad()

    return run


def prefill(way: str, model: PreTrainedModel, ids: torch.Tensor, args) -> Callable[[], None]:
    model.eval().to(torch.float32 if args.device == "cpu" else torch.bfloat16)

    @torch.inference_mode()
    def run():
        model(ids, use_cache=True, logits_to_keep=1)

    return run


PASSES = {"step": step, "prefill": prefill}


def planned(kind: str, way: str, length: int, args) -> dict[str, float]:
    """The bytes that `tnn plan` counts for weights and pass of a TNN, without the states of an optimizer."""
    from tnn_programs.training.plan import count, count_reading

    if way.split()[0] not in TNNS:
        return {}
    on_cpu = args.device == "cpu"
    config = build(way, argparse.Namespace(**vars(args) | {"device": "meta"}), length).config
    options = PretrainArguments(block_size=length, per_device_train_batch_size=1, learning_rate=1e-3,
                                mixed_precision="no" if on_cpu else "bf16")  # fmt: skip
    if kind == "prefill":
        found = count_reading(options, config, torch.float32 if on_cpu else torch.bfloat16, on_cpu)["peak"]
    else:
        parts = count(options, config, "", 1)
        found = 4 * parts["parameters"] + parts["activations"] + parts["working"]
    return {"planned_mebibytes": found / 2**20}


def peak(args) -> float:
    return (torch.cuda.max_memory_allocated() if args.device.startswith("cuda") else resident_peak()) / 2**20


def measured_pass(length: int, kind: str, way: str, args) -> Iterator[dict]:
    """The figures of one model and pass, in this process, as soon as they are known."""
    torch.set_num_threads(args.threads)
    yield planned(kind, way, length, args)
    try:
        if args.device == "cpu" and args.memory:
            import resource  # Windows has none

            resource.setrlimit(resource.RLIMIT_DATA, (int(args.memory * 2**30),) * 2)
        forget_peak()
        before = peak(args)
        ids = torch.randint(args.vocab_size, (1, length), device=args.device)
        run = PASSES[kind](way, build(way, args, length), ids, args)
        run()
        yield {"peak_mebibytes": peak(args) - before}
        seconds = statistics.median(measure({"": run}, args)[""])
        yield {"milliseconds": 1000 * seconds, "tokens_per_second": length / seconds}
    except Exception as error:  # a row of the table
        yield {"error": noted(error)}


def send(pipe: Connection, function: Callable, *given):
    for figures in function(*given):
        pipe.send(figures)


def apart(seconds: float, function: Callable[..., Iterator[dict]], *given) -> dict:
    """All figures that a function yields in a process of its own, and an error that says how this ended."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tnn_programs.training.plan"])  # imports take longer than a row
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(theirs, function, *given), daemon=True)
    process.start()
    theirs.close()
    row, end = {}, time.monotonic() + seconds
    try:
        while ours.poll(max(0, end - time.monotonic())):
            row |= ours.recv()
        return row | {"error": f"stopped after {seconds:g} s"}
    except EOFError:
        process.join()
        return row | ({"error": f"the process ended with {process.exitcode}"} if process.exitcode else {})
    finally:
        process.kill()
        process.join()


def run(args) -> list[dict]:
    """One row for each length, pass and variant that does not stop before."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the process of a row ends, too
    file, record = args.output_file, described(args)
    found = json.loads(file.read_text()) if file is not None and file.exists() else record | {"rows": []}
    for part, name in (*(("settings", name) for name in SETTINGS), ("versions", "machine")):
        if found[part][name] != record[part][name]:
            raise ValueError(f"--output_file must have rows of {name} {record[part][name]}, got {found[part][name]}")
    rows = found["rows"]
    for key in ((length, kind, way) for length in args.lengths for way in args.ways for kind in args.passes):
        others = [row for row in rows if (row["pass"], row["way"]) == key[1:]]
        if any(row["length"] == key[0] or "error" in row for row in others):
            continue
        rows.append(dict(zip(KEY, key, strict=True)) | apart(args.seconds, measured_pass, *key, args))
        sys.stderr.write(f"{json.dumps(rows[-1])}\n")
        if file is not None:
            write_json(file, record | {"rows": rows})
    return rows


table = partial(markdown, formats=FORMATS)
