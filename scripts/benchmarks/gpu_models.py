"""Models on a device: the loss alone, training steps beside peers, and decoding over its floor."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from unittest.mock import patch

import torch
from torch.nn import functional
from transformers import CompileConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from modeling_tnn.kernels import loss as loss_module
from modeling_tnn.kernels.loss import linear_cross_entropy
from tnn_scripts.benchmarks.gpu_products import noted, timed
from tnn_scripts.benchmarks.measure import autocast
from tnn_scripts.benchmarks.peers import build_model, plain_loss
from tnn_scripts.benchmarks.training import step

WAYS = ("auto compiled captured", "auto compiled", "auto", "gpt2 compiled with loss captured")
WAYS += ("gpt2 compiled with loss", "gpt2 compiled", "gpt2", "llama compiled with loss", "llama compiled", "mamba2")
WAYS += ("fused", "matmul")
DECODED = (("auto", "static"), ("gpt2", "static"), ("auto", "dynamic"))  # models and caches


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, None, labels) / len(labels)


def that_of_pytorch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The chunked loss that PyTorch has from 2.13 on, in the dtype of autocast, which does not know it."""
    options, dtype = torch.nn.LinearCrossEntropyOptions(), torch.bfloat16
    return functional.linear_cross_entropy(hidden.to(dtype), weight.to(dtype), labels, options=options)


def compiled(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.compile(plain_loss, dynamic=False)(hidden, weight, labels)


def ours_in_chunks(rows: int, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Ours with so many rows of logits at a time."""
    with patch.multiple(loss_module, LARGE_ROWS=rows, LARGE_BYTES=2**40):
        return ours(hidden, weight, labels)


LOSSES = {"ours": ours, "PyTorch's linear_cross_entropy": that_of_pytorch, "plain, compiled": compiled}
LOSSES |= {f"ours, {rows:,} rows at a time": partial(ours_in_chunks, rows) for rows in (2048, 16384)}


def losses(args) -> Iterator[dict]:
    """The loss of a step alone, forward and backward, from hidden states of float32, as norms give them."""
    hidden = torch.randn(args.tokens, args.hidden_size, device=args.device, requires_grad=True)
    weight = (0.02 * torch.randn(args.vocab_size, args.hidden_size, device=args.device)).requires_grad_()
    labels = torch.randint(args.vocab_size, (args.tokens,), device=args.device)

    def run(loss):
        with autocast(args):
            value = loss(hidden, weight, labels)
        value.backward()

    for name in usable(LOSSES, args):
        loss = LOSSES[name]
        yield {"way": name, "tokens": args.tokens} | timed(lambda loss=loss: lambda: run(loss), args)


def usable(ways: Iterable[str], args) -> list[str]:
    """The `ways`; in a trial of the program without those that take a compiler many seconds."""
    return [way for way in ways if not (args.quick and "compiled" in way)]


def steps(args) -> Iterator[dict]:
    """Training steps in bfloat16, without the optimizer, of the TNN and of transformers' models of its size."""
    for length in args.lengths:
        for way in usable(WAYS, args):
            yield {"length": length, "way": way} | fitting_step(way, length, args)


def fitting_step(way: str, length: int, args) -> dict:
    """The row of a step of `args.tokens` tokens or, if the device has no memory for them, a half, a quarter ..."""
    tokens = args.tokens
    while True:
        shape = (tokens // length, length)
        ids = torch.randint(args.vocab_size, shape, device=args.device)
        row = timed(lambda ids=ids: step(f"{way} bf16", args, ids), args)
        if not row.get("error", "").startswith("OutOfMemoryError") or tokens < 2 * length:
            break
        tokens //= 2
    if "milliseconds" in row:
        row["tokens_per_second"] = 1000 * tokens / row["milliseconds"]
    return {"tokens": tokens} | row


class Marks(StoppingCriteria):
    """The times at which `generate` has so many new tokens."""

    def __init__(self, args):
        self.lengths, self.args, self.times = [args.prompt + count for count in args.counts], args, []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs) -> torch.BoolTensor:
        if input_ids.shape[1] in self.lengths:
            synchronize(self.args)
            self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def decoding(args) -> Iterator[dict]:
    """Milliseconds of a token with either cache, and over the time in which the weights are read once."""
    bandwidth = read_bandwidth(args)
    static = {"cache_implementation": "static", "compile_config": compile_config(args)}
    for way, cache in DECODED:
        model = build_model(way, args, args.prompt + args.counts[1]).to(torch.bfloat16).eval()
        model.generation_config.eos_token_id = None
        floor = 1000 * sum(p.numel() * p.element_size() for p in model.parameters()) / bandwidth
        for batch_size in args.batch_sizes:
            row = {"way": way, "cache": cache, "batch_size": batch_size, "floor_ms": floor}
            try:
                options = static if cache == "static" else {}
                milliseconds = milliseconds_of_a_token(model, batch_size, options, args)
                row |= {"ms_per_token": milliseconds, "over_floor": milliseconds / floor}
                row |= {"tokens_per_second": 1000 * batch_size / milliseconds}
            except Exception as error:
                row |= {"error": noted(error)}
            yield row


def compile_config(args) -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend="eager", mode=None) if args.quick else CompileConfig(fullgraph=True)
    config._compile_all_devices = True  # transformers compiles on accelerators only, unless it is told
    return config


def milliseconds_of_a_token(model: PreTrainedModel, batch_size: int, options: dict, args) -> float:
    """Between the two numbers of new tokens in `args.counts`."""
    marks, (first, last) = Marks(args), args.counts
    # Without padding tokens.
    ids = torch.randint(5, model.config.vocab_size, (batch_size, args.prompt), device=args.device)
    criteria = StoppingCriteriaList([marks])
    model.generate(ids, max_new_tokens=last, do_sample=False, stopping_criteria=criteria, **options)
    return 1000 * (marks.times[1] - marks.times[0]) / (last - first)


def read_bandwidth(args) -> float:
    """Bytes per second that the device reads, from a copy, which reads and writes each byte."""
    source = torch.ones(args.numbers, device=args.device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / seconds_of(lambda: target.copy_(source), args)


def seconds_of(run: Callable[[], object], args, repeats: int = 5) -> float:
    """The shortest of several runs."""
    found = []
    for _ in range(repeats):
        synchronize(args)
        start = time.perf_counter()
        run()
        synchronize(args)
        found.append(time.perf_counter() - start)
    return min(found)


def synchronize(args):
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()
