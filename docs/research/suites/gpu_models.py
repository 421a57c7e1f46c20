"""Models on a device: the loss alone, training steps and those of peers, decoding over its lower bound."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from suites.device import Stopwatch, noted, timed
from suites.peers import build_model, plain_loss, plain_training_loss
from torch.nn import functional
from transformers import CompileConfig, PreTrainedModel

from modeling_tnn.compile.regions import compile_regions
from modeling_tnn.compile.token_loop import write_tokens
from modeling_tnn.kernels.loss import linear_cross_entropy
from tnn_programs.benchmarks.measure import autocast
from tnn_programs.benchmarks.models import training_loss
from tnn_programs.training.passes import WARM_UP_PASSES, CudaRecorder

WAYS = ("auto compiled captured", "auto compiled", "auto", "gpt2 compiled with loss captured")
WAYS += ("gpt2 compiled with loss", "gpt2 compiled", "gpt2", "llama compiled with loss", "llama compiled", "mamba2")
WAYS += ("fused", "matmul")
# Models and caches; "loop": several tokens for each launch, with a static cache.
DECODED = (("auto", "static"), ("gpt2", "static"), ("auto", "loop"), ("auto", "dynamic"))


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, None, labels) / len(labels)


def that_of_pytorch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The chunked loss that PyTorch has from 2.13 on, in the dtype of autocast, which does not know it."""
    options, dtype = torch.nn.LinearCrossEntropyOptions(), torch.bfloat16
    return functional.linear_cross_entropy(hidden.to(dtype), weight.to(dtype), labels, options=options)


def compiled(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.compile(plain_loss, dynamic=False)(hidden, weight, labels)


LOSSES = {"ours": ours, "PyTorch's linear_cross_entropy": that_of_pytorch, "plain, compiled": compiled}


def losses(args) -> Iterator[dict]:
    """The loss of a step alone, forward and backward, from hidden states of float32, as norms give them."""
    hidden = torch.randn(args.tokens, args.hidden_size, device=args.device, requires_grad=True)
    weight = (0.02 * torch.randn(args.vocab_size, args.hidden_size, device=args.device)).requires_grad_()
    labels = torch.randint(args.vocab_size, (args.tokens,), device=args.device)

    def run(loss):
        with autocast(args):
            value = loss(hidden, weight, labels)
        value.backward()

    for name in (name for name in LOSSES if not (args.quick and "compiled" in name)):
        yield {"way": name, "tokens": args.tokens} | timed(lambda loss=LOSSES[name]: lambda: run(loss), args)


def step(way: str, args, ids: torch.Tensor) -> Callable[[], None]:
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
    model = build_model(name, args, ids.shape[1])
    if "loss" in words:
        loss_of = torch.compile(plain_training_loss, dynamic=False)
    elif "compiled" in words:
        compile_model(model)
    model.config.use_cache = False

    def run():
        with precision:
            loss = loss_of(model, ids)
        loss.backward()

    return captured(run, model, args) if "captured" in words and args.device.startswith("cuda") else run


def compile_model(model: PreTrainedModel):
    """By regions, as `tnn pretrain` does, or as a whole where it has none."""
    regional = any(hasattr(module, "regions") for module in model.modules())
    compile_regions(model, dynamic=False) if regional else model.base_model.compile(dynamic=False)


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
    """All of them: the maps of a position encoder, as large for one sequence as for many, are of another class."""
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


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
    """Training steps in bfloat16, without the optimizer, of the TNN and of transformers' models of its size.

    A trial of the program leaves out what takes a compiler many seconds.
    """
    for length in args.lengths:
        ids = torch.randint(args.vocab_size, (args.tokens // length, length), device=args.device)
        for way in (way for way in WAYS if not (args.quick and "compiled" in way)):
            row = timed(lambda way=way, ids=ids: step(f"{way} bf16", args, ids), args)
            if "milliseconds" in row:
                row["tokens_per_second"] = 1000 * args.tokens / row["milliseconds"]
            yield {"length": length, "way": way, "tokens": args.tokens} | row


def decoding(args) -> Iterator[dict]:
    """Milliseconds of a token with either cache, and over the time in which the weights are read once."""
    # A copy reads and writes each byte.
    source = torch.ones(args.numbers, device=args.device)
    copying = timed(lambda: partial(torch.empty_like(source).copy_, source), args)["milliseconds"]
    options = {"static": {"cache_implementation": "static", "compile_config": compile_config(args)}, "dynamic": {}}
    options["loop"] = {"cache_implementation": "static", "custom_generate": write_tokens}
    for way, cache in DECODED:
        model = build_model(way, args, args.prompt + args.counts[1]).to(torch.bfloat16).eval()
        model.generation_config.eos_token_id = None
        floor = copying * sum(p.numel() * p.element_size() for p in model.parameters()) / (8 * args.numbers)
        for batch_size in args.batch_sizes:
            row = {"way": way, "cache": cache, "batch_size": batch_size, "floor_ms": floor}
            try:
                milliseconds = milliseconds_of_a_token(model, batch_size, options[cache], args)
                row |= {"ms_per_token": milliseconds, "over_floor": milliseconds / floor}
                row |= {"tokens_per_second": 1000 * batch_size / milliseconds}
            except Exception as error:  # a row of the table; the other models go on
                row |= {"error": noted(error)}
            yield row


def compile_config(args) -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend="eager", mode=None) if args.quick else CompileConfig(fullgraph=True)
    config._compile_all_devices = True  # transformers compiles on accelerators only, unless it is told
    return config


def milliseconds_of_a_token(model: PreTrainedModel, batch_size: int, options: dict, args) -> float:
    """Between the two numbers of new tokens in `args.counts`."""
    watch, (first, last) = Stopwatch(args), args.counts
    # Without padding tokens.
    ids = torch.randint(5, model.config.vocab_size, (batch_size, args.prompt), device=args.device)
    # One more: then `last` is in a launch of 16 tokens, as `first` is, and not in one of the rest.
    model.generate(ids, max_new_tokens=last + 1, do_sample=False, streamer=watch, **options)
    return 1000 * (watch.times[last] - watch.times[first]) / (last - first)
