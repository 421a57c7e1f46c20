"""Models on a device: the loss alone, training steps beside peers, and decoding over its floor."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from unittest.mock import patch

import torch
from torch.nn import functional
from transformers import CompileConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from modeling_tnn.compile.regions import compile_regions
from modeling_tnn.kernels import loss as loss_module
from modeling_tnn.kernels.loss import linear_cross_entropy
from tnn_scripts.benchmarks.gpu_products import noted, timed
from tnn_scripts.benchmarks.measure import autocast
from tnn_scripts.benchmarks.peers import BUILDERS, build_model, plain_loss, plain_training_loss, training_loss
from tnn_scripts.common.passes import WARM_UP_PASSES, CudaRecorder

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


def step(way: str, args, ids: torch.Tensor, builders: dict[str, Callable] = BUILDERS) -> Callable[[], None]:
    """One training step: forward, loss, backward.

    `matmul` computes only the matrix products of the linear layers of a TNN, forward and backward: a lower bound for a
    model of this size. After the name of a model, `bf16` means autocast in bfloat16, and `compiled` torch.compile, by
    regions for a TNN as in `tnn pretrain`; `compiled with loss` with the plain cross entropy in it, `captured` a CUDA
    graph of the pass, as there too.
    """
    name, *words = way.split()
    precision, loss_of = autocast(args, "bf16" in words), training_loss
    if name == "matmul":
        model = build_model("fused", args, 512)
        return matmul_step(linear_layers(model), ids.numel(), torch.bfloat16 if words else torch.float32)
    model = build_model(name, args, ids.shape[1], builders)
    if "loss" in words:
        loss_of = torch.compile(plain_training_loss, dynamic=False)
    elif "compiled" in words:
        regional = any(hasattr(module, "regions") for module in model.modules())
        compile_regions(model, dynamic=False) if regional else model.base_model.compile(dynamic=False)
    model.config.use_cache = False

    def run():
        with precision:
            loss = loss_of(model, ids)
        loss.backward()

    return captured(run, model, args) if "captured" in words and args.device.startswith("cuda") else run


def captured(run: Callable[[], None], model: torch.nn.Module, args) -> Callable[[], None]:
    """A pass as one CUDA graph, which writes its gradients, as that of `tnn pretrain`."""
    recorder = CudaRecorder(torch.device(args.device))
    with recorder.aside():
        for _ in range(WARM_UP_PASSES):
            run()
        model.zero_grad()
        _, replay = recorder.record(run)
    return replay


def linear_layers(model: PreTrainedModel) -> list[torch.nn.Linear]:
    """All but those of a position encoder, which is as large for one sequence as for many."""
    return [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".rpe." not in name]


def matmul_step(layers: list[torch.nn.Linear], tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """The three matrix products of each layer, for random inputs and gradients."""
    weights, options = [m.weight.detach().to(dtype) for m in layers], {"device": layers[0].weight.device}
    sizes = {size for weight in weights for size in weight.shape}
    inputs = {size: torch.randn(tokens, size, dtype=dtype, **options) for size in sizes}
    outputs = {size: torch.empty_like(given) for size, given in inputs.items()}
    gradients = [torch.empty_like(weight) for weight in weights]

    @torch.no_grad()
    def run():
        for weight, gradient in zip(weights, gradients, strict=True):
            size_out, size_in = weight.shape
            torch.mm(inputs[size_in], weight.t(), out=outputs[size_out])
            torch.mm(inputs[size_out], weight, out=outputs[size_in])
            torch.mm(inputs[size_out].t(), inputs[size_in], out=gradient)

    return run


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
