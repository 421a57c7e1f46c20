"""The memory of a training step of a language model and its peers, by length of the sequence.

saved   bytes that the forward pass saves for the backward pass, parameters excluded
peak    growth of the process during the step, optimizer excluded; each variant has its own process, so that it cannot
        reuse memory of another one; on a GPU the allocator's peak
"""

import multiprocessing
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from suites.device import peak_on_device, resident_peak
from suites.peers import build_model

from tnn_programs.benchmarks.measure import markdown
from tnn_programs.benchmarks.models import training_loss

FORMATS = {"length": "", "way": "", "saved_mebibytes": ".0f", "over_released_saved": ".2f", "peak_mebibytes": ".0f"}
FORMATS |= {"over_released_peak": ".2f", "over_gpt2_peak": ".2f"}


def saved_bytes(run: Callable[[], torch.Tensor], excluded: Iterable[torch.Tensor] = ()) -> int:
    """The bytes that a forward pass saves for its backward pass, `excluded` left out. Each storage counts once."""
    excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
        del output
    return sum(kept.values())


def forget_peak():
    """Reset the peak of the process (on Linux), so that building the model does not hide the peak of a step."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")


def measure_way(way: str, args, length: int) -> dict:
    """The figures of one variant, measured in this process."""
    torch.set_num_threads(args.threads)
    ids = torch.randint(args.vocab_size, (max(1, args.tokens // length), length), device=args.device)
    model = build_model(way, args, length)
    model.config.use_cache = False

    def step():
        training_loss(model, ids).backward()

    forget_peak()
    before = resident_peak()
    peak = peak_on_device(step, args)
    if not peak:
        step()
        peak = {"peak_mebibytes": (resident_peak() - before) / 2**20}
    saved = saved_bytes(partial(training_loss, model, ids), model.parameters())
    return {"length": length, "way": way, "saved_mebibytes": saved / 2**20} | peak


def run(args) -> list[dict]:
    """One row for each length and variant."""
    rows = []
    for length in args.lengths:
        found = []
        for way in args.ways:
            with multiprocessing.get_context("spawn").Pool(1) as fresh:
                found.append(fresh.apply(measure_way, (way, args, length)))
        base = {row["way"]: row for row in found}
        for row in found:
            for figure, peer in (("saved", "released"), ("peak", "released"), ("peak", "gpt2")):
                name = f"{figure}_mebibytes"
                if peer in base and base[peer][name]:
                    row[f"over_{peer}_{figure}"] = row[name] / base[peer][name]
        rows += found
    return rows


table = partial(markdown, formats=FORMATS)
