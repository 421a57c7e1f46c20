"""Models on a device: blocks over their matrix products, training beside peers, memory, decoding over its floor."""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch
from transformers import CompileConfig, StoppingCriteria, StoppingCriteriaList

from modeling_tnn import TnnConfig, TnnForCausalLM
from modeling_tnn.toeplitz_choice import refused_by_triton
from tnn_scripts.benchmarks import memory as memory_suite
from tnn_scripts.benchmarks.gpu_products import noted
from tnn_scripts.benchmarks.measure import measure, peak_on_device, rows_of
from tnn_scripts.benchmarks.training import step

TNN_WAYS = ("fused", "triton", "auto")
PEERS = ("gpt2", "llama", "mamba2")

# Of a kernel with the decay 0.99 in float32.
TAPS = 1587


def sized(args, **others) -> Namespace:
    """The arguments of other suites, with the sizes of this one."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 99} if args.quick else {}
    sizes = {"num_hidden_layers": 6, "vocab_size": 50265, "decay": 0.99, "blocks_only": False}
    return Namespace(**(vars(args) | sizes | others | small))


def blocks(args) -> Iterator[dict]:
    """Forward and backward passes of the blocks over those of their matrix products alone, in bfloat16."""
    ways = [f"{way} bf16" for way in (*TNN_WAYS, "matmul")]
    ways += [] if args.quick else ["auto compiled bf16"]
    for length in (64, 128) if args.quick else (512, 2048, 8192, 65536):
        tokens = max(length, 256 if args.quick else 16384)
        sizes = sized(args, num_hidden_layers=2, blocks_only=True)
        yield from timed_steps(ways, sizes, tokens, length, base="matmul bf16")


def training(args) -> Iterator[dict]:
    """Training steps in bfloat16 (without the optimizer) of the TNN and of transformers' models of its size."""
    ways = [f"{way} bf16" for way in (*TNN_WAYS, *PEERS)] + ([] if args.quick else ["auto compiled bf16"])
    for length in (64,) if args.quick else (512, 2048, 8192):
        yield from timed_steps(ways, sized(args), 128 if args.quick else 16384, length, base="gpt2 bf16")


def timed_steps(ways: list[str], args: Namespace, tokens: int, length: int, base: str) -> Iterator[dict]:
    """Rows of `ways`, interleaved; with its error for each that fails."""
    ids = torch.randint(args.vocab_size, (tokens // length, length), device=args.device)
    like = torch.empty(*ids.shape, args.hidden_size, device=args.device, dtype=torch.bfloat16)
    running = {}
    for way in ways:
        name = way.split()[0]
        reason = refused_by_triton(like, min(length, TAPS), torch.float32) if name == "triton" else None
        if reason is not None:
            yield {"length": length, "way": way, "error": f"not measured: it {reason}"}
            continue
        try:
            running[way] = step(way, args, ids)
            running[way]()
        except Exception as error:
            running.pop(way, None)
            yield {"length": length, "way": way, "error": noted(error)}
    times = measure(running, args)
    for row in rows_of(times, ids.numel(), (base,), length=length):
        over = row.pop(f"{base}_over_this", None)
        row |= {f"over_{base.split()[0]}": None if over is None else 1 / over}
        yield row | peak_on_device(running[row["way"]], args)


def memory(args) -> Iterator[dict]:
    """What a training step saves and takes. On a CPU, whose peak is one of the process, what it saves."""
    for length in (64,) if args.quick else (512, 8192):
        for way in ("fused", "eager", "auto", *PEERS):
            try:
                row = memory_suite.measure_way(way, sized(args, tokens=128 if args.quick else 16384), length)
            except Exception as error:
                row = {"length": length, "way": way, "error": noted(error)}
            if not args.device.startswith("cuda"):
                row.pop("peak_mebibytes", None)
            yield row


class Marks(StoppingCriteria):
    """The times at which `generate` has so many new tokens."""

    def __init__(self, prompt: int, counts: tuple[int, int], args):
        self.lengths, self.args, self.times = [prompt + count for count in counts], args, []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs) -> torch.BoolTensor:
        if input_ids.shape[1] in self.lengths:
            synchronize(self.args)
            self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def decoding(args) -> Iterator[dict]:
    """Milliseconds of a token with either cache, and over the time in which the weights are read once."""
    sizes = sized(args)
    config = TnnConfig(
        hidden_size=sizes.hidden_size, num_hidden_layers=sizes.num_hidden_layers, vocab_size=sizes.vocab_size
    )
    model = TnnForCausalLM(config).to(args.device, torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    floor = sum(p.numel() * p.element_size() for p in model.parameters()) / read_bandwidth(args)
    compiled = {"cache_implementation": "static", "compile_config": compile_config(args)}
    for batch_size in (1, 8) if args.quick else (1, 8, 64):
        for name, options in (("dynamic", {}), ("static, compiled", compiled)):
            row = {"cache": name, "batch_size": batch_size, "floor_ms": 1000 * floor}
            try:
                milliseconds = milliseconds_of_a_token(model, batch_size, options, args)
                row |= {"ms_per_token": milliseconds, "over_floor": milliseconds / (1000 * floor)}
                row |= {"tokens_per_second": 1000 * batch_size / milliseconds}
            except Exception as error:
                row |= {"error": noted(error)}
            yield row


def compile_config(args) -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend="eager", mode=None) if args.quick else CompileConfig(fullgraph=True)
    config._compile_all_devices = True  # transformers compiles on accelerators only, unless it is told
    return config


def milliseconds_of_a_token(model: TnnForCausalLM, batch_size: int, options: dict, args) -> float:
    """After the tokens in which graphs are recorded, over at least one block of 128."""
    prompt, (first, last) = (16, (4, 8)) if args.quick else (512, (160, 416))
    marks = Marks(prompt, (first, last), args)
    ids = torch.randint(5, model.config.vocab_size, (batch_size, prompt), device=args.device)  # without padding tokens
    criteria = StoppingCriteriaList([marks])
    model.generate(ids, max_new_tokens=last, do_sample=False, stopping_criteria=criteria, **options)
    return 1000 * (marks.times[1] - marks.times[0]) / (last - first)


def read_bandwidth(args) -> float:
    """Bytes per second that the device reads, from a copy, which reads and writes each byte."""
    source = torch.ones(2**20 if args.quick else 2**28, device=args.device)
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
