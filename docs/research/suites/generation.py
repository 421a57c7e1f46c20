"""The cost of a new token and the size of the state, by length of the context, for TNNs and their peers.

All models have the same width, depth and vocabulary, and random weights. Each repeat decodes a block of tokens with
every model at every context, in rounds of 32 tokens, so that load affects all models equally. `--block` must be a
multiple of the decoding block (128; 2048 for a kernel without decay), so that it contains all transforms.

`weights` is a lower bound for a TNN of this size: each of its matrices applied once to one token of every sequence.
`hybrid` has attention in every fourth layer, `attention` in all, with rotary positions; the rest is that of a TNN.
Names that end in `-compiled` decode with a static cache and `torch.compile`, as `cache_implementation="static"` does;
those that end in `-columns` (before it) have their weights by `to_column_major`.
"""

import statistics
import time
from functools import partial

import torch
from suites.peers import ATTENTION, FIELDS, attention_fields
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM, StaticCache

from modeling_tnn import TnnConfig, TnnForCausalLM, to_column_major
from modeling_tnn.cache_tnn import CACHE
from modeling_tnn.tools.comparing import memory_per_sequence
from tnn_programs.benchmarks.measure import clock, markdown
from tnn_programs.benchmarks.measure import ratio as measured_ratio
from tnn_programs.benchmarks.models import layer_bytes

TURN = 32
TNN_FIELDS = FIELDS | dict.fromkeys((*ATTENTION, "modal"), FIELDS["rpe"])  # `modal` is converted from it
COLUMNS, COMPILED = "-columns", "-compiled"
FORMATS = {"model": "", "context": "", "ms_per_token": ".2f", "over_shortest_context": ".2f", "gpt2_over_this": ".2f"}
FORMATS |= {"over_weights": ".2f", "p99_over_weights": ".2f", "state_mebibytes": ".2f", "conversion_seconds": ".2f"}
# Its slow path in transformers reads a prompt token by token. Its state has a fixed size, so a short prompt suffices.
MAMBA_PROMPT = 64


def build(name: str, args, longest: int) -> torch.nn.Module:
    torch.manual_seed(0)
    if name.removesuffix(COMPILED).endswith(COLUMNS):
        return to_column_major(build(name.replace(COLUMNS, ""), args, longest))
    name = name.removesuffix(COMPILED)
    sizes = {"vocab_size": args.vocab_size, "num_hidden_layers": args.num_hidden_layers}
    if name == "gpt2":
        heads = max(1, args.hidden_size // 64)
        config = GPT2Config(n_embd=args.hidden_size, n_head=heads, n_positions=longest, **sizes)
        model = GPT2LMHeadModel(config)
    elif name == "mamba":
        model = MambaForCausalLM(MambaConfig(hidden_size=args.hidden_size, **sizes))
    else:
        fields = TNN_FIELDS["rpe" if name == "weights" else name]
        if name in ATTENTION:
            fields = fields | attention_fields(name, args.num_hidden_layers)
        model = TnnForCausalLM(TnnConfig(hidden_size=args.hidden_size, **sizes, **fields))
        if name == "modal":
            model, seconds = timed_conversion(model)
            model.conversion_seconds = seconds / args.num_hidden_layers
    return model.eval().to(args.device)


def timed_conversion(model: TnnForCausalLM) -> tuple[TnnForCausalLM, float]:
    start = time.thread_time()
    return model.to_recurrent()[0], time.thread_time() - start


class Decoder:
    """A model after a context of some length, ready to decode."""

    def __init__(self, name: str, model, context: int, batch_size: int, longest: int):
        self.name, self.kind = name, name.replace(COLUMNS, "")
        self.model, self.context, self.longest = model, context, longest
        self.is_compiled = name.endswith(COMPILED)
        if self.is_compiled:
            self.compiled = torch.compile(model.__call__, fullgraph=True, dynamic=False)
        self.token = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
        self.cache_argument = "cache_params" if self.kind == "mamba" and CACHE != "cache" else CACHE
        read = MAMBA_PROMPT if self.kind == "mamba" else context
        prompt = torch.randint(model.config.vocab_size, (batch_size, read))
        self.times: list[float] = []  # seconds per token of each block
        self.steps: list[float] = []  # seconds of each token
        if self.kind == "weights":
            matrices = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.in_features > 1]
            self.matrices = [m.weight for m in matrices if m.weight.shape != (m.out_features, model.config.rpe_dim)]
            self.inputs = {w.shape[1]: torch.randn(batch_size, w.shape[1], device=w.device) for w in self.matrices}
        else:
            self.cache = self._random_keys(context, batch_size) if self.kind == "gpt2" else self._prefill(prompt)

    def _prefill(self, prompt: torch.Tensor):
        cache = StaticCache(config=self.model.config, max_cache_len=self.longest) if self.is_compiled else None
        for chunk in prompt.to(self.model.device).split(2048, dim=1):
            output = self.model(chunk, use_cache=True, logits_to_keep=1, **{self.cache_argument: cache})
            cache = output[self.cache_argument]
        return cache

    def _random_keys(self, context: int, batch_size: int) -> DynamicCache:
        config = self.model.config
        cache = DynamicCache(config=config)
        for layer in range(config.n_layer):
            shape = (batch_size, config.n_head, context, config.n_embd // config.n_head)
            keys = torch.randn(shape, device=self.model.device)
            cache.update(keys, torch.randn_like(keys), layer)
        return cache

    def decode(self, tokens: int, args):
        for _ in range(tokens):
            start = clock(args)
            self._step()
            self.steps.append(clock(args) - start)

    def _step(self):
        if self.kind == "weights":
            for weight in self.matrices:
                torch.nn.functional.linear(self.inputs[weight.shape[1]], weight)
            return
        call, inputs = self.model, {"input_ids": self.token, "use_cache": True, self.cache_argument: self.cache}
        if self.is_compiled:
            tokens, call = inputs.pop("input_ids"), self.compiled
            inputs = self.model.prepare_inputs_for_generation(tokens, next_sequence_length=1, **inputs)
        self.cache = call(**inputs)[self.cache_argument]

    def state_bytes(self) -> int:
        """Of one sequence."""
        if self.kind == "weights":
            return 0
        if self.kind in ("mamba", "gpt2"):
            return sum(layer_bytes(layer, len(self.token)) for layer in self.cache.layers)
        return memory_per_sequence(self.cache)


def run(args) -> list[dict]:
    """One row for each model and context: milliseconds per token (median of the repeats) and bytes of state."""
    longest = max(args.contexts) + (args.repeats + 1) * args.block
    models = {name: build(name, args, longest) for name in args.models}
    with torch.inference_mode():
        decoders = [
            Decoder(name, model, context, args.batch_size, longest)
            for name, model in models.items()
            for context in args.contexts
        ]
        for decoder in decoders:
            decoder.decode(TURN // 2, args)
            decoder.steps.clear()
        for _ in range(args.repeats):
            measure_block(decoders, args)
    return [row(decoder, decoders, args) for decoder in decoders]


def measure_block(decoders: list[Decoder], args):
    spent = [0.0] * len(decoders)
    for _ in range(args.block // TURN):
        for index, decoder in enumerate(decoders):
            decoder.decode(TURN, args)
            spent[index] += sum(decoder.steps[-TURN:])
    for decoder, seconds in zip(decoders, spent, strict=True):
        decoder.times.append(seconds / (args.block // TURN * TURN))


def row(decoder: Decoder, decoders: list[Decoder], args) -> dict:
    """The figures of one decoder. Ratios are medians of the per-repeat ratios."""
    shortest = next(d for d in decoders if d.name == decoder.name and d.context == min(args.contexts))
    peers = {d.name: d for d in decoders if d.context == decoder.context}
    gpt2, floor = peers.get("gpt2"), peers.get("weights")
    return {
        "model": decoder.name,
        "context": decoder.context,
        "ms_per_token": 1000 * statistics.median(decoder.times),
        "over_shortest_context": ratio(decoder, shortest),
        "gpt2_over_this": None if gpt2 is None else ratio(gpt2, decoder),
        "over_weights": None if floor is None else ratio(decoder, floor),
        "p99_over_weights": None if floor is None else percentile(decoder) / statistics.median(floor.steps),
        "state_mebibytes": decoder.state_bytes() / 2**20,
        "conversion_seconds": getattr(decoder.model, "conversion_seconds", None),
        "parameters": decoder.model.num_parameters(),
    }


def ratio(above: Decoder, below: Decoder) -> float:
    return measured_ratio(above.times, below.times)


def percentile(decoder: Decoder) -> float:
    """The 99th percentile of the seconds of a token."""
    return statistics.quantiles(decoder.steps, n=100)[98]


table = partial(markdown, formats=FORMATS)
