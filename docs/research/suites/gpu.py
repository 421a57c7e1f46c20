"""The suite `gpu` of docs/research/benchmark.py: speed on a GPU."""

import argparse
import platform
import sys
import time
from collections.abc import Iterator
from functools import partial

import torch
from suites.device import timed
from suites.gpu_models import decoding, losses, steps

from modeling_tnn.kernels.choice import refused_by_triton
from modeling_tnn.toeplitz import causal_toeplitz_matmul
from modeling_tnn.toeplitz_fused import Gate
from tnn_programs.benchmarks.measure import markdown
from tnn_programs.cli.atomic import write_json, write_text

NOT_A_GPU = "**No GPU was measured.** This is a test of the program. No figure here says how fast a GPU is."
# The sizes of all parts: on a GPU, and tiny ones with which the program runs on a CPU in a test.
SIZES = {
    "hidden_size": (512, 32),
    "num_hidden_layers": (6, 1),
    "vocab_size": (50265, 600),
    "tokens": (16384, 128),  # of a training step
    "lengths": ((2048, 512, 8192), (64,)),  # of its sequences
    # (length, taps) of products and tap gradients
    "filters": (((2048, 828), (512, 512), (8192, 828), (2048, 1587), (8192, 1587), (8192, 4096)), ((64, 16),)),
    "batch_sizes": ((1, 64), (1, 8)),  # of decoding
    "prompt": (512, 16),
    "counts": ((160, 416), (16, 32)),  # new tokens between which decoding is timed: multiples of a launch of 16
    "numbers": (2**28, 2**20),  # that are copied to measure the speed of memory
    "decay": (0.99, 0.99),
}


def products(args) -> Iterator[dict]:
    """One row for each filter and way, in bfloat16: a gated product with its gradients, or the tap gradient alone."""
    for length, taps in args.filters:
        shape, ways = (3 * args.hidden_size, args.tokens // length, length), {}
        # A model has them channel by channel in memory, too.
        g, v, u = (torch.randn(shape, device=args.device, dtype=torch.bfloat16) for _ in range(3))
        kernel = torch.randn(shape[0], taps, device=args.device) * 0.99 ** torch.arange(taps, device=args.device)
        tokens_first = [x.permute(1, 2, 0) for x in (v, u, g)]
        reason = refused_by_triton(tokens_first[0], min(taps, length), torch.float32)
        ways["fused"] = partial(passes, "fused", kernel, *tokens_first)
        ways["triton"] = partial(passes, "triton", kernel, *tokens_first)
        ways["triton, tap gradient"] = partial(tap_gradient, g, v, taps)
        for name, run in ways.items():
            row = {"length": length, "taps": taps, "way": name}
            if reason and name != "fused":
                yield row | {"error": f"not measured: it {reason}"}
            else:
                yield row | timed(lambda run=run: run, args)


def passes(name: str, kernel: torch.Tensor, v: torch.Tensor, u: torch.Tensor, gradient: torch.Tensor):
    inputs = [x.detach().requires_grad_() for x in (v, kernel, u)]
    product = causal_toeplitz_matmul(inputs[0], inputs[1], name, Gate(inputs[2], torch.nn.SiLU(), None))
    torch.autograd.grad(product, inputs, gradient)


def tap_gradient(g: torch.Tensor, x: torch.Tensor, taps: int):
    from modeling_tnn.kernels.triton import tap_gradient

    tap_gradient(g, x, taps, 0)


# Parts of the measurement -> their titles and rows, in the order of what must be known first.
PARTS = {
    "losses": ("The loss of a training step alone", losses),
    "steps": ("Training steps", steps),
    "decoding": ("Decoding", decoding),
    "products": ("Toeplitz products and tap gradients", products),
}


def run(args) -> list[dict]:
    """One row for each part, with its own rows. No row begins after `args.minutes`."""
    args.output_dir.mkdir(parents=True, exist_ok=True)
    sizes = argparse.Namespace(**vars(args) | {name: values[args.quick] for name, values in SIZES.items()})
    end, found = time.monotonic() + 60 * args.minutes, []
    for name in args.parts:
        part = {"part": name, "seconds": 0.0, "error": None, "rows": []}
        found.append(part)
        start, rows = time.monotonic(), PARTS[name][1](sizes)
        while (in_time := time.monotonic() < end) and (row := next(rows, None)):
            part["rows"].append(row)
            part["seconds"] = time.monotonic() - start
            save(found, args)
        if not in_time:
            part["error"] = f"no time was left after {len(part['rows'])} rows"
        save(found, args)
        sys.stderr.write(f"{name}: {len(part['rows'])} rows in {part['seconds']:.0f} s\n")
    return found


def save(found: list[dict], args):
    """Write both files: nothing is lost if the program is ended."""
    is_gpu = args.device.startswith("cuda")
    name = torch.cuda.get_device_name(args.device) if is_gpu else f"{args.device} of {platform.machine()}"
    device = {"name": name, "torch": torch.__version__, "date": time.strftime("%F")}
    write_json(args.output_dir / "gpu.json", {"device": device, "quick": args.quick, "parts": found})
    where = f"Measured on {name}, {device['date']}, PyTorch {torch.__version__}."
    page = ["# GPU measurements", where if is_gpu and not args.quick else NOT_A_GPU, table(found)]
    write_text(args.output_dir / "gpu.md", "\n\n".join(page) + "\n")


def table(found: list[dict]) -> str:
    """The rows of all parts as Markdown tables, with what was left out first."""
    ended = [f"Without all its figures: {part['part']} ({part['error']})." for part in found if part["error"]]
    return "\n\n".join(ended + [f"## {PARTS[part['part']][0]}\n\n{as_table(part['rows'])}" for part in found])


def as_table(rows: list[dict]) -> str:
    """Texts first, errors last."""
    values = {name: value for row in rows for name, value in row.items() if value is not None}
    texts = {name: "" for name, value in values.items() if isinstance(value, str) and name != "error"}
    numbers = {name: "," if isinstance(value, int) else ".3g" for name, value in values.items() if name not in texts}
    numbers |= {name: ",.0f" for name in numbers if name in ("tokens_per_second", "peak_mebibytes")}
    error = {"error": ""} if numbers.pop("error", None) else {}
    return markdown(rows, {**texts, **numbers, **error})
