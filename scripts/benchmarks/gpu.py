"""All that only a GPU can tell, in less than ten minutes: are products right on it, and how fast are models?

Writes into --output_dir: gpu.json (all figures) and gpu.md (a page). Each part runs in a process of its own, so that a
fault of the device ends that part alone. A part that fails or takes too long says so, with the rows that it had, and
the others go on. `gpu-PART.log` has its messages. With --device cpu --quick the parts run with tiny sizes: a test of
the program.
"""

import argparse
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from tnn_scripts.benchmarks import gpu_models, gpu_pretraining, gpu_products
from tnn_scripts.benchmarks.measure import markdown
from tnn_scripts.common.atomic import write_json, write_text

NOT_A_GPU = (
    "**No GPU was measured.** The parts ran on a CPU, as a test of the program. No figure here says how fast a GPU is."
)


TINY = "hidden_size=32,num_hidden_layers=1,intermediate_size=32,rpe_dim=8,gtu_expansion=2,vocab_size=600"
QUICK_RECIPE = f"--max_steps 2 --gradient_accumulation_steps 1 --config_overrides {TINY} --block_size 64"
# The sizes of all parts: on a GPU, and tiny ones with which the program runs on a CPU in a test.
SIZES = {
    "hidden_size": (512, 32),
    "num_hidden_layers": (6, 1),
    "vocab_size": (50265, 600),
    "tokens": (16384, 128),  # of a training step
    "lengths": ((2048, 512, 8192), (64,)),  # of its sequences
    # (length, taps) of products and tap gradients
    "filters": (
        ((2048, 828), (512, 512), (8192, 828), (2048, 1587), (8192, 1587), (8192, 4096)),
        ((64, 16), (128, 16)),
    ),
    # (length, taps on each side) of the oracles
    "cases": (((1, 1), (17, 40), (4099, 200), (2048, 1587)), ((1, 1), (17, 5), (300, 33))),
    "batch_sizes": ((1, 64), (1, 8)),  # of decoding
    "prompt": (512, 16),
    "counts": ((160, 416), (4, 8)),  # decoding is timed between so many new tokens, after graphs were recorded
    "numbers": (2**28, 2**20),  # that are copied to measure the speed of memory, and that are NaN before an oracle
    "lines": (10000, 400),  # of the generated text
    "words": (30000, 500),
    # Further options of `pretrain.py`. The host waits for a step that it logs.
    "recipe_options": ("--logging_steps 8", QUICK_RECIPE),
    "recipe_seconds": (120, 300),  # after which it is ended by the signal that saves it
    "decay": (0.99, 0.99),
}


def sized(args: argparse.Namespace) -> argparse.Namespace:
    """The options with all sizes."""
    return argparse.Namespace(**vars(args) | {name: values[args.quick] for name, values in SIZES.items()})


class Part(NamedTuple):
    """A part of the measurement."""

    title: str
    seconds: int  # it is ended after that time
    rows: Callable[[argparse.Namespace], Iterator[dict]]


def parts() -> dict[str, Part]:
    """In the order of what must be known first."""
    title = "Toeplitz products against float64"
    oracles = {
        f"oracles-{name}": Part(title, 150, partial(gpu_products.oracles, name)) for name in gpu_products.ORACLES
    }
    return {
        "losses": Part("The loss of a training step alone", 60, gpu_models.losses),
        "steps": Part("Training steps", 240, gpu_models.steps),
        "decoding": Part("Decoding", 110, gpu_models.decoding),
        "recipe": Part("Two minutes of the recipe wikitext103 on generated text", 170, gpu_pretraining.recipe),
        "products": Part("Toeplitz products and tap gradients", 60, gpu_products.products),
    } | oracles


def run(args) -> list[dict]:
    """One row for each part, with its own rows and its error."""
    args.output_dir.mkdir(parents=True, exist_ok=True)
    # The processes are forks of one that has imported all, and has not touched the device.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tnn_scripts.common.errors", __name__])
    end, found, all_parts = time.monotonic() + 60 * args.minutes, [], parts()
    for name in args.parts:
        found.append({"part": name, "seconds": 0.0, "error": None, "rows": []})
        run_part(found[-1], min(all_parts[name].seconds, end - time.monotonic()), args, partial(save, found, args))
        sys.stderr.write(f"{name}: {len(found[-1]['rows'])} rows in {found[-1]['seconds']:.0f} s")
        sys.stderr.write(f", {found[-1]['error']}\n" if found[-1]["error"] else "\n")
    return found


def save(found: list[dict], args):
    """Write all files, after each row: nothing is lost if the program is ended."""
    device = {"name": machine(args.device), "torch": torch.__version__, "date": time.strftime("%F")}
    write_json(args.output_dir / "gpu.json", {"device": device, "quick": args.quick, "parts": found})
    write_text(args.output_dir / "gpu.md", page(found, device, args.device == "cpu" or args.quick))


def machine(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{device} of {platform.machine()}"


def run_part(part: dict, seconds: float, args, save: Callable[[], None]):
    """Fill the result of a part, from a process of its own that is ended after so many seconds."""
    if seconds < 1:
        part["error"] = "no time was left for it"
        return save()
    context, start = multiprocessing.get_context("forkserver"), time.monotonic()
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(part["part"], args, sending))
    process.start()
    sending.close()
    row = {}
    try:
        while row is not None and part["error"] is None:
            if receiving.poll(max(0.0, start + seconds - time.monotonic())):
                row, part["error"] = receiving.recv()
                part["rows"] += [row] if row else []
            else:
                part["error"] = f"it was ended after {seconds:.0f} s"
                process.terminate()
            part["seconds"] = time.monotonic() - start
            save()
    except EOFError:
        process.join()
        part["error"] = f"its process ended with the status {process.exitcode}, see gpu-{part['part']}.log"
        save()
    finally:
        end(process)


def end(process: multiprocessing.Process):
    """End the process, which may be about to end, and those that it has started, which are in its session."""
    process.join(1)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


def work(name: str, args, sending: Connection):
    """The process of a part, which sends (row, None) for each row and at the end (None, error or None)."""
    os.setsid()
    log = os.open(args.output_dir / f"gpu-{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    torch.set_num_threads(args.threads)
    try:
        for row in parts()[name].rows(sized(args)):
            sending.send((row, None))
        sending.send((None, None))
    except Exception as error:
        sending.send((None, gpu_products.noted(error)))


def page(found: list[dict], device: dict, is_trial: bool) -> str:
    """The page for the documentation."""
    where = f"Measured on {device['name']}, {device['date']}, PyTorch {device['torch']}."
    return "\n\n".join(["# Figures of a GPU", NOT_A_GPU if is_trial else where, table(found)]) + "\n"


def table(rows: list[dict]) -> str:
    """The rows of all parts as Markdown tables, with what failed first."""
    all_parts, sections = parts(), []
    failures = [f"{part['part']} ({part['error']})" for part in rows if part["error"]]
    if failures:
        sections.append(f"Parts without all their figures: {'; '.join(failures)}.")
    proved = [row for part in rows if part["part"].startswith("oracles-") for row in part["rows"]]
    if proved:
        sections += ["## Toeplitz products against float64", as_table(gpu_products.summary(proved))]
    for part in rows:
        if part["rows"] and not part["part"].startswith("oracles-"):
            sections += [f"## {all_parts[part['part']].title}", as_table(part["rows"])]
    return "\n\n".join(sections)


def as_table(rows: list[dict]) -> str:
    """Texts first, errors last."""
    values = {name: value for row in rows for name, value in row.items() if value is not None}
    texts = {name: "" for name, value in values.items() if isinstance(value, (str, bool)) and name != "error"}
    numbers = {name: "," if isinstance(value, int) else ".3g" for name, value in values.items() if name not in texts}
    numbers |= {name: ",.0f" for name in numbers if name in ("tokens_per_second", "peak_mebibytes")}
    error = {"error": ""} if numbers.pop("error", None) else {}
    return markdown(rows, {**texts, **numbers, **error})
