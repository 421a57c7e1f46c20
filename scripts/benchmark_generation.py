"""The cost of a new token and the size of the state, by length of the context, for TNNs and their peers.

All models have the same width, depth and vocabulary, and random weights. Each repeat decodes a block of tokens with
every model at every context, in turns of 32, so that a busy machine hits all alike. A block must be a multiple of the
one that the recurrence works in, or its transforms are not all in it: 128, or 2048 for a kernel without decay.
"""

import statistics

import torch
from benchmark_measure import clock
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from modeling_tnn import TnnConfig, TnnForCausalLM
from modeling_tnn.cache_tnn import memory_per_sequence

TURN = 32
TNN_FIELDS = {
    "rpe": {"tno_type": "rpe", "decay": 0.99},
    "fd": {"tno_type": "fd", "rpe_layers": 3},
    "rtf": {"tno_type": "rtf", "rtf_constraint": "l1_montel", "rtf_initializer": "xavier"},
    "modal": {"tno_type": "rpe", "decay": 0.99},
    "rpe-no-decay": {"tno_type": "rpe", "decay": 1.0},
}
MODELS = (*TNN_FIELDS, "gpt2", "mamba")
DEFAULT_MODELS = ("rpe", "fd", "rtf", "modal", "gpt2", "mamba")
# Its slow path in transformers takes a prompt token by token; its state has one size, so a short one will do.
MAMBA_PROMPT = 64


def build(name: str, args, longest: int) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": args.vocab_size, "num_hidden_layers": args.num_hidden_layers}
    if name == "gpt2":
        heads = max(1, args.hidden_size // 64)
        config = GPT2Config(n_embd=args.hidden_size, n_head=heads, n_positions=longest, **sizes)
        model = GPT2LMHeadModel(config)
    elif name == "mamba":
        model = MambaForCausalLM(MambaConfig(hidden_size=args.hidden_size, **sizes))
    else:
        model = TnnForCausalLM(TnnConfig(hidden_size=args.hidden_size, **sizes, **TNN_FIELDS[name]))
        if name == "modal":
            model = model.to_recurrent()[0]
    return model.eval().to(args.device)


class Decoder:
    """A model after a context of some length, ready to decode."""

    def __init__(self, name: str, model, context: int, batch_size: int):
        self.name, self.model, self.context = name, model, context
        self.token = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
        self.cache_argument = "cache_params" if name == "mamba" else "past_key_values"
        prompt = torch.randint(model.config.vocab_size, (batch_size, MAMBA_PROMPT if name == "mamba" else context))
        self.cache = self._random_keys(context, batch_size) if name == "gpt2" else self._prefill(prompt)
        self.times: list[float] = []

    def _prefill(self, prompt: torch.Tensor):
        cache = None
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

    def decode(self, tokens: int):
        for _ in range(tokens):
            output = self.model(self.token, use_cache=True, **{self.cache_argument: self.cache})
            self.cache = output[self.cache_argument]

    def state_bytes(self) -> int:
        """Of one sequence."""
        if self.name == "mamba":
            states = [s for layer in self.cache.layers for s in (layer.conv_states[0], layer.recurrent_states[0])]
        elif self.name == "gpt2":
            states = [s for layer in self.cache.layers for s in (layer.keys, layer.values)]
        else:
            return memory_per_sequence(self.cache)
        return sum(s.numel() * s.element_size() // s.shape[0] for s in states)


def run_generation(args) -> list[dict]:
    """One row for each model and context: milliseconds per token (median of the repeats) and bytes of state."""
    longest = max(args.contexts) + (args.repeats + 1) * args.block
    models = {name: build(name, args, longest) for name in args.models}
    with torch.inference_mode():
        decoders = [
            Decoder(name, model, context, args.batch_size)
            for name, model in models.items()
            for context in args.contexts
        ]
        for decoder in decoders:
            decoder.decode(TURN // 2)
        for _ in range(args.repeats):
            measure_block(decoders, args)
    return [row(decoder, decoders, args) for decoder in decoders]


def measure_block(decoders: list[Decoder], args):
    spent = [0.0] * len(decoders)
    for _ in range(args.block // TURN):
        for index, decoder in enumerate(decoders):
            start = clock(args)
            decoder.decode(TURN)
            spent[index] += clock(args) - start
    for decoder, seconds in zip(decoders, spent, strict=True):
        decoder.times.append(seconds / (args.block // TURN * TURN))


def row(decoder: Decoder, decoders: list[Decoder], args) -> dict:
    """Figures of one decoder; ratios are medians of ratios of the same repeat."""
    shortest = next(d for d in decoders if d.name == decoder.name and d.context == min(args.contexts))
    peer = next((d for d in decoders if d.name == "gpt2" and d.context == decoder.context), None)
    return {
        "model": decoder.name,
        "context": decoder.context,
        "ms_per_token": 1000 * statistics.median(decoder.times),
        "over_shortest_context": ratio(decoder, shortest),
        "gpt2_over_this": None if peer is None else ratio(peer, decoder),
        "state_megabytes": decoder.state_bytes() / 2**20,
        "parameters": decoder.model.num_parameters(),
    }


def ratio(above: Decoder, below: Decoder) -> float:
    return statistics.median(a / b for a, b in zip(above.times, below.times, strict=True))


def table(rows: list[dict]) -> str:
    """Markdown."""
    shortest = min(row["context"] for row in rows)
    lines = [
        f"| model | context | ms per token | over context {shortest} | GPT-2 over this | state, MiB per sequence |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        peer = "" if r["gpt2_over_this"] is None else f"{r['gpt2_over_this']:.2f}"
        lines.append(
            f"| {r['model']} | {r['context']} | {r['ms_per_token']:.2f} | {r['over_shortest_context']:.2f} | {peer} "
            f"| {r['state_megabytes']:.2f} |"
        )
    return "\n".join(lines)
