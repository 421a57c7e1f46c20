"""The cost of a forward and backward pass: one operator, or a training step of a language model, and its peers.

The released form of a TNN is restated here: the position encoder at every lag, and three real transforms of twice the
length along the second last axis. Every repeat measures all ways in turns; ratios are medians of ratios of the same
repeat.
"""

import statistics
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from modeling_tnn import TnnConfig, TnnForCausalLM
from modeling_tnn.operators import build_tno


def released_product(operator, v: torch.Tensor) -> torch.Tensor:
    """`(B, L, D)` to `(B, L, D)` as the released code computes it."""
    length = v.shape[1]
    coefficients = operator.coefficients(length).t()  # (L, D) or (2L-1, D)
    zero = coefficients[:1] if operator.causal else coefficients[length - 1 : length]
    positive = coefficients[-length:]
    parts = [positive, zero] if operator.causal else [positive, zero, coefficients[: length - 1]]
    kernel = torch.fft.rfft(torch.cat(parts), n=2 * length, dim=-2)
    spectrum = torch.fft.rfft(v, n=2 * length, dim=-2)
    return torch.fft.irfft(spectrum * kernel, n=2 * length, dim=-2)[:, :length]


def clock(args) -> float:
    """CPU time of this thread if it is the only one, else wall time after the device has finished."""
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.thread_time() if args.threads == 1 and args.device == "cpu" else time.perf_counter()


def measure(ways: dict[str, Callable[[], None]], args) -> dict[str, list[float]]:
    """Seconds of each way in each repeat, after one run that does not count."""
    times = {name: [] for name in ways}
    for repeat in range(args.repeats + 1):
        for name, run in ways.items():
            start = clock(args)
            run()
            if repeat:
                times[name].append(clock(args) - start)
    return times


def rows_of(times: dict[str, list[float]], base: str, **fields) -> list[dict]:
    """One row for each way: milliseconds, and how many times faster than `base`."""
    return [
        fields
        | {
            "way": name,
            "milliseconds": 1000 * statistics.median(seconds),
            f"{base}_over_this": statistics.median(b / s for b, s in zip(times[base], seconds, strict=True)),
        }
        for name, seconds in times.items()
    ]


def run_operators(args) -> list[dict]:
    """Forward and backward of one operator with its coefficients, at each length, `tokens` tokens in all."""
    rows = []
    for length in args.lengths:
        config = TnnConfig(
            tno_type=args.tno_type,
            causal=not args.bidirectional,
            hidden_size=args.hidden_size,
            decay=args.decay,
            max_position_embeddings=length,
        )
        torch.manual_seed(0)
        operator = build_tno(config).to(args.device)
        for parameter in operator.parameters():
            torch.nn.init.uniform_(parameter, -0.1, 0.1)
        shape = (max(1, args.tokens // length), length, operator.channels)
        v = torch.randn(shape, device=args.device, requires_grad=True)
        gradient = torch.randn(shape, device=args.device)

        def passes(product: str, operator=operator, v=v, gradient=gradient):
            operator.product = product
            (released_product(operator, v) if product == "released" else operator(v)).backward(gradient)

        ways = {name: lambda name=name, run=passes: run(name) for name in ("released", "plain", "chunked")}
        if args.tno_type == "ski":
            del ways["released"]  # it has no coefficients
        rows += rows_of(measure(ways, args), next(iter(ways)), length=length)
    return rows


def language_model(way: str, args, length: int) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": args.vocab_size, "num_hidden_layers": args.num_hidden_layers}
    if way == "gpt2":
        heads = max(1, args.hidden_size // 64)
        # No dropout anywhere: with it, attention would leave its fast path.
        silent = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        config = GPT2Config(n_embd=args.hidden_size, n_head=heads, n_positions=length, **sizes, **silent)
        model = GPT2LMHeadModel(config)
    else:
        product = "plain" if way == "released" else way
        config = TnnConfig(
            hidden_size=args.hidden_size, decay=args.decay, product=product, hidden_dropout_prob=0.0, **sizes
        )
        model = TnnForCausalLM(config)
    if way == "released":
        for layer in model.model.layers:
            layer.gtu.tno.mix = lambda v, operator=layer.gtu.tno: released_product(operator, v)
    return model.train().to(args.device)


def run_training(args) -> list[dict]:
    """Forward, loss and backward of a language model on `tokens` tokens, at each length."""
    rows = []
    for length in args.lengths:
        ids = torch.randint(args.vocab_size, (max(1, args.tokens // length), length), device=args.device)
        models = {way: language_model(way, args, length) for way in ("released", "plain", "chunked", "gpt2")}
        ways = {
            way: lambda model=model, ids=ids: model(ids, labels=ids, use_cache=False).loss.backward()
            for way, model in models.items()
        }
        rows += rows_of(measure(ways, args), "released", length=length, parameters=models["chunked"].num_parameters())
    return rows


def table(rows: list[dict]) -> str:
    """Markdown."""
    base = next(name for name in rows[0] if name.endswith("_over_this"))
    lines = [f"| length | way | ms | {base.replace('_', ' ')} |", "|---:|---|---:|---:|"]
    lines += [f"| {r['length']} | {r['way']} | {r['milliseconds']:.0f} | {r[base]:.2f} |" for r in rows]
    return "\n".join(lines)
