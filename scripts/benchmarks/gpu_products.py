"""Toeplitz products on a device: right or not, and how fast."""

import gc
import math
import statistics
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from modeling_tnn.kernels.choice import choose, refused_by_triton
from modeling_tnn.toeplitz import causal_toeplitz_matmul, toeplitz_matmul
from modeling_tnn.toeplitz_fused import Gate
from tnn_scripts.benchmarks.measure import kernels_on_device, measure, peak_on_device

# The largest relative error of values, in the norm; gradients may have twice as much. What models train in is first.
ALLOWED = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5, "float64": 1e-11}

ORACLES = ("triton", "fused", "eager")

# Calls before a measurement: compilers compile in the first one, CUDA graphs are recorded in the next ones.
WARM_UP = 3


def noted(error: Exception) -> str:
    """An error in one line. Where it came from is in the log."""
    traceback.print_exception(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def oracles(implementation: str, args) -> Iterator[dict]:
    """One row for each case: the errors of values and gradients against float64 on the CPU."""
    for dtype, allowed in ALLOWED.items():
        allowed *= 2 if implementation == "eager" else 1  # activations and gate are rounded apart
        for causal in (True, False):
            for length, taps in args.cases:
                row = {"implementation": implementation, "dtype": dtype, "causal": causal, "length": length}
                row |= {"taps": taps if causal else 2 * taps - 1, "allowed": allowed}
                try:
                    row |= errors_of(implementation, getattr(torch, dtype), causal, length, taps, args)
                    gradients_allowed = 2 * allowed
                    row["right"] = row["value_error"] <= allowed and row["gradient_error"] <= gradients_allowed
                except Exception as error:
                    row |= {"right": False, "error": noted(error)}
                yield {name: finite(value) for name, value in row.items()}


def summary(rows: list[dict]) -> list[dict]:
    """One row for each implementation and dtype: how many cases were right, and the largest errors."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["implementation"], row["dtype"]].append(row)
    found = []
    for (implementation, dtype), group in groups.items():
        by = " and ".join(sorted({row["computed_by"] for row in group if "computed_by" in row}))
        notes = {row.get("error") or row.get("because"): None for row in group}
        entry = {"implementation": implementation, "dtype": dtype, "computed_by": by}
        entry |= {"cases": len(group), "right": sum(row["right"] for row in group)}
        for name in ("value_error", "gradient_error"):
            errors = [row[name] for row in group if row.get(name) is not None]
            entry[name] = max(errors, default=None)
        found.append(entry | {"allowed": group[0]["allowed"], "error": "; ".join(filter(None, notes)) or None})
    return found


def finite(value):
    """JSON has no infinite numbers; one in a result is NaN or an overflow there."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def errors_of(implementation: str, dtype: torch.dtype, causal: bool, length: int, taps: int, args) -> dict:
    """Which product computed, and its largest errors."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, length, 5), (5, taps if causal else 2 * taps - 1), (2, length, 5), (2, length, 5))
    v, kernel, u, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    decay = 0.99 ** torch.arange(kernel.shape[1], dtype=torch.float64)
    kernel_dtype = torch.promote_types(dtype, torch.float32)
    v, u, gradient, kernel = v.to(dtype), u.to(dtype), gradient.to(dtype), (kernel * decay).to(kernel_dtype)
    mask = torch.rand(2, length, generator=generator) < 0.9
    inputs = (v, kernel, u, mask, gradient)
    expected = with_gradients("eager", causal, *(x if x is mask else x.double() for x in inputs))
    with poisoned_memory(args):
        actual = with_gradients(implementation, causal, *(x.to(args.device) for x in inputs))
    errors = [relative_error(a.cpu(), b) for a, b in zip(actual, expected, strict=True)]
    found = torch.empty(2, length, 5, dtype=dtype, device=args.device)
    by = choose(implementation, found, kernel.shape[1], kernel.dtype)
    reason = refused_by_triton(found, kernel.shape[1], kernel.dtype) if implementation == "triton" else None
    return {"computed_by": by, "because": reason, "value_error": errors[0], "gradient_error": max(errors[1:])}


def with_gradients(implementation: str, causal: bool, v, kernel, u, mask, gradient) -> list[torch.Tensor]:
    """The gated product, and the gradients of `v`, `kernel` and `u`."""
    inputs = [x.detach().requires_grad_() for x in (v, kernel, u)]
    product = causal_toeplitz_matmul if causal else toeplitz_matmul
    y = product(inputs[0], inputs[1], implementation, Gate(inputs[2], nn.SiLU(), mask))
    return [y.detach(), *torch.autograd.grad(y, inputs, gradient)]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    norm = expected.norm().item()
    error = (actual.double() - expected).norm().item() / (norm or 1.0)
    return error if math.isfinite(error) else math.inf


@contextmanager
def poisoned_memory(args) -> Iterator[None]:
    """Fresh memory is full of NaN: that of PyTorch's functions, and on a GPU what libraries get from its allocator."""
    if args.device.startswith("cuda"):
        torch.full((args.numbers,), torch.nan, device=args.device)
        torch.cuda.synchronize()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
    with_gradients(name, True, v, kernel, u, None, gradient)


def tap_gradient(g: torch.Tensor, x: torch.Tensor, taps: int):
    from modeling_tnn.kernels.triton import tap_gradient

    tap_gradient(g, x, taps, 0)


def timed(make: Callable[[], Callable[[], object]], args) -> dict:
    """The milliseconds of what `make` returns, and on a GPU its kernels and peak memory; its error if it fails."""
    torch._dynamo.reset()
    if args.device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
    try:
        run = make()
        for _ in range(WARM_UP):
            run()
        milliseconds = 1000 * statistics.median(measure({"": run}, args)[""])
        return {"milliseconds": milliseconds} | kernels_on_device(run, args) | peak_on_device(run, args)
    except Exception as error:
        return {"error": noted(error)}
