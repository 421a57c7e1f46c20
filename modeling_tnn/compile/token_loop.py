"""Several tokens for each launch: a loop for `generate` in which the host does not come between two tokens.

    model.generate(ids, custom_generate=write_tokens, cache_implementation="static", tokens_per_launch=16)

B batch, K tokens of a launch, S places for tokens, V vocabulary. transformers' own loop prepares each step on the
host, and waits for the device to learn whether all texts have ended. Here `static_cache` prepares K steps, of tokens
in one tile, and `write` takes them by operations on tensors that stay at their addresses: the model, the processors,
the choice, the end tokens and the next input. On CUDA they are one graph. What needs the host (stop strings and other
criteria, a streamer) sees the tokens afterwards, one by one, and those after the end are taken back. So the texts are
those of `generate`, with the same random numbers; more of them are drawn only if a text ends before its limit.

K is a power of 2. Fewer steps, again a power of 2, are taken before the end of a tile or of the text, so that few
graphs serve all texts.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode, LogitsProcessorList, logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache_tnn import cache_argument, cache_of, is_toeplitz
from ..configuration_tnn import TOEPLITZ
from . import static_cache
from .static_cache import FIXED_BASE, PLACES, places_of

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
LAUNCHES = (1, 2, 4, 8, 16)
PLACE_BLOCK = 1024  # the places for tokens are a multiple, so that texts of many lengths have the same graph

# Processors that are functions of tensors alone. Tokens that come twice change nothing.
OF_TENSORS = (
    *(logits_process.TemperatureLogitsWarper, logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper),
    *(logits_process.MinPLogitsWarper, logits_process.TypicalLogitsWarper, logits_process.EpsilonLogitsWarper),
    *(logits_process.EtaLogitsWarper, logits_process.LogitNormalization, logits_process.InfNanRemoveLogitsProcessor),
    *(logits_process.RepetitionPenaltyLogitsProcessor, logits_process.SuppressTokensLogitsProcessor),
)
# Those that suppress the end tokens of short texts, and the length from which they do nothing.
UNTIL = {
    logits_process.MinLengthLogitsProcessor: lambda one: one.min_length,
    logits_process.MinNewTokensLengthLogitsProcessor: lambda one: one.prompt_length_to_skip + one.min_new_tokens,
}


def write_tokens(
    model: nn.Module, input_ids: torch.Tensor, logits_processor, stopping_criteria, generation_config,
    tokens_per_launch: int = FIXED_BASE, streamer=None, **model_kwargs,
):  # fmt: skip
    """Write the texts that `generate` would, greedily or by sampling, as its argument `custom_generate`.

    Args:
        model: a `TnnForCausalLM`, whose `generate` hands on `streamer` and stop strings.
        tokens_per_launch: 1, 2, 4, 8 or 16. A streamer gets as many at once.

    Returns:
        as `generate`: ids `(B, L)`, or an output with ids and cache.

    Raises:
        ValueError: the cache is not static or has a sliding window; a beam search or the like, another output or
            another processor is asked for. `generate` without `custom_generate` takes all of them.
    """
    past = cache_of(model_kwargs)
    check_loop(model, past, logits_processor, generation_config, tokens_per_launch)
    logits = model._prefill(input_ids, generation_config, model_kwargs).logits[:, -1].clone()
    if not static_cache.takes_fixed_steps(model.get_decoder(), past, input_ids):
        raise ValueError("`model` and `past_key_values` must not be offloaded for several tokens at once")
    with static_cache.writable():
        loop = TokenLoop(model, past, logits_processor, stopping_criteria, generation_config, streamer)
        loop.begin(input_ids, logits, model_kwargs.get("attention_mask"))
        while loop.is_running:
            loop.advance(tokens_per_launch)
        ids = loop.ids[:, : loop.length].clone()
    if streamer is not None:
        streamer.end()
    returns = generation_config.return_dict_in_generate
    return GenerateDecoderOnlyOutput(sequences=ids, **cache_argument(past)) if returns else ids


def check_loop(model: nn.Module, past: Cache | None, processors, config, count: int):
    """Refuse what only transformers' own loop can do."""
    if count not in LAUNCHES:
        raise ValueError(f"`tokens_per_launch` must be one of {', '.join(map(str, LAUNCHES))}, got {count!r}")
    if (mode := config.get_generation_mode()) not in MODES:
        raise ValueError(f"`num_beams` and the like must ask for greedy search or sampling, got {mode.value}")
    for name in ("output_attentions", "output_hidden_states", "output_scores", "output_logits"):
        if config.return_dict_in_generate and getattr(config, name):
            raise ValueError(f"`{name}` must be False for several tokens at once, got True")
    for one in processors:
        if as_function(one) is None:
            raise ValueError(f"`logits_processor` must not need the host between two tokens, got {type(one).__name__}")
    layers = getattr(past, "layers", None) or []
    if not layers or not all(layer.is_compileable and not layer.is_sliding for layer in layers):
        found = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "no layers"
        needs = "`cache_implementation` must be 'static' for several tokens at once, and no layer may have a sliding"
        raise ValueError(f"{needs} window, got {found}")
    got = model.config._attn_implementation
    if {*model.config.layer_types} != {TOEPLITZ} and got not in ("sdpa", "eager"):
        raise ValueError(f"`attn_implementation` must be 'sdpa' or 'eager' for several tokens at once, got {got!r}")


class TokenLoop:
    """The loop of one call of `generate`. What launches read and write has places that belong to the model."""

    def __init__(self, model, past: Cache, processors, criteria, config, streamer):
        self.model, self.past, self.config, self.streamer = model, past, config, streamer
        self.draws = config.do_sample
        self.given, self.processors = processors, [as_function(one) for one in processors]
        self.ends = [one for one in criteria if type(one) is EosTokenCriteria]
        known = (EosTokenCriteria, MaxLengthCriteria)
        self.criteria = StoppingCriteriaList(one for one in criteria if type(one) not in known)
        self.longest = min(one.max_length for one in criteria if type(one) is MaxLengthCriteria)
        pads = any(hasattr(one, "eos_token_id") for one in criteria)
        self.pad = config._pad_token_tensor.to(model.device) if pads else None
        # Rows that other criteria have ended get pad tokens, which states that are returned must have read.
        self.most = 1 if self.criteria and config.return_dict_in_generate else FIXED_BASE
        self.places = places_of(model)
        self.table = None

    def begin(self, prompt: torch.Tensor, logits: torch.Tensor, mask: torch.Tensor | None):
        """Choose the first token after a `prompt` `(B, L)` with its mask and the logits `(B, V)`."""
        self.length, rows, put = prompt.shape[1], len(logits), self.places.put
        self.goes_on = put("goes on", prompt.new_ones(rows, dtype=torch.bool))  # (B,)
        self.flags = put("flags", prompt.new_ones(FIXED_BASE, rows, dtype=torch.bool))  # `goes_on` after each step
        self.place = put("place", prompt.new_tensor([self.length]))  # (1,), that of the next token
        self.token = put("token", prompt.new_zeros(rows, 1))  # (B, 1), the newest one
        self.mask = None if mask is None else pad(mask, (0, self.longest - mask.shape[1]), value=1)
        tokens = self.choose(self.given, prompt, logits)
        free = -(-self.longest // PLACE_BLOCK) * PLACE_BLOCK - self.length
        # Free places hold a token of the text: a penalty of repeated tokens is none for others.
        self.ids = put("ids", torch.cat([prompt, tokens[:, None].expand(rows, free)], dim=1))  # (B, S)
        self.store(tokens, 0)
        self.settle(1)

    def advance(self, most: int):
        """Write the tokens of the next launch, at most `most`."""
        decoder = self.model.get_decoder()
        begun = static_cache.begin_step(decoder, self.past)
        states, self.operators = [state for state, *_ in begun], [operator for _, operator, _ in begun]
        until = [end for end, _ in self.processors if end is not None and end > self.length]
        limits = [most, self.most, *(end - self.length for end in (self.longest, *until))]
        count = max(one for one in LAUNCHES if one <= min(limits + [state.room() for state in states]))
        seen = None if self.mask is None else self.mask[:, : int(self.past.get_seq_length()) + 1]
        masks, positions = static_cache.inputs_of_step(decoder, self.past, self.token, seen)
        self.masks = {kind: self.places.put(kind, mask) for kind, mask in masks.items()}  # (B, 1, 1, keys)
        self.positions = None if positions is None else self.places.put("positions", positions)  # (B, 1) or (1, 1)
        self.counts = [one.cumulative_length for one in self.past.layers if hasattr(one, "cumulative_length")]
        table = static_cache.write_cursors(begun, count)
        if table is not None:
            table = pad(table, (0, 0, 0, 0, 0, FIXED_BASE - count)).to(self.token.device)
            self.cursors, self.table = states[0].cursor._base, self.places.put("table", table)  # (K, states, 2)
        for state in states:
            state.in_launch = True
        try:
            self.launch(count)
        finally:
            for state in states:
                state.in_launch = False
        for state in states:
            state.is_ready = False  # all steps have been taken
        self.settle(count)

    def launch(self, count: int):
        """`write`; on CUDA by a graph, which is recorded once."""
        active = [one for end, one in self.processors if end is None or end > self.length]
        write = partial(self.write, count, LogitsProcessorList(active))
        if not uses_graphs(self.token.device):
            return write()
        graphs, read = self.places.graphs, self.addresses()
        if graphs.get("read") != read:
            graphs.clear()
            graphs["read"] = read
        held = (*active, *self.ends)  # with tensors that the graph reads
        key = count, self.draws, None if self.pad is None else int(self.pad), *map(settings, held)
        if key not in graphs:
            graphs[key] = record(write, [*self.places.tensors.values(), *self.counts]), held, self.pad
        graphs[key][0]()

    def write(self, count: int, processors: LogitsProcessorList):
        """Take `count` steps, by operations on tensors alone."""
        masks = {**self.masks, TOEPLITZ: None} if self.masks else None
        given = {"attention_mask": masks, "position_ids": self.positions, "use_cache": True, "return_dict": True}
        forward = forward_of(type(self.model), uses_graphs(self.token.device) and not self.config.disable_compile)
        for i in range(count):
            if self.table is not None:  # None with attention alone
                self.cursors.copy_(self.table[i])
            outputs = forward(self.model, input_ids=self.token, **given, **cache_argument(self.past))
            self.take(processors, outputs.logits[:, -1], i)
            if self.positions is not None:
                self.positions.add_(1)
            for mask in self.masks.values() if i + 1 < count else ():
                mask.index_fill_(-1, self.counts[0].view(1), 1 if mask.dtype == torch.bool else 0)

    def take(self, processors, logits: torch.Tensor, step: int):
        """Make the tokens for `logits` `(B, V)` the newest ones."""
        self.store(self.choose(processors, self.ids, logits), step)

    def choose(self, processors, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The next tokens `(B,)` by their logits `(B, V)`, as transformers' `_sample` chooses them."""
        scores = processors(ids, logits.to(copy=True, dtype=torch.float32))
        tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1) if self.draws else scores.argmax(-1)
        return tokens if self.pad is None else torch.where(self.goes_on, tokens, self.pad)

    def store(self, tokens: torch.Tensor, step: int):
        """Make `tokens` `(B,)` the newest ones. An end token ends its row."""
        self.token.copy_(tokens[:, None])
        self.ids.index_copy_(1, self.place, self.token)
        self.place.add_(1)
        for end in self.ends:
            self.goes_on.logical_and_(~end(self.token, None))
        self.flags[step].copy_(self.goes_on)

    def settle(self, count: int):
        """Ask the other criteria about `count` new tokens, take back those after the end, and stream the others."""
        start, flags = self.length, self.flags[:count]
        for i in range(count) if self.criteria else ():
            flags[i:] &= ~self.criteria(self.ids[:, : start + i + 1], None)
            if self.pad is not None:
                later = self.ids[:, start + i + 1 : start + count]
                later.copy_(later.where(flags[i, :, None], self.pad))
        alive = flags.any(1).tolist()  # here the host waits for the device
        taken = count if alive[-1] else alive.index(False) + 1
        self.length, self.is_running = start + taken, alive[-1] and start + taken < self.longest
        self.goes_on.copy_(flags[-1])
        self.token.copy_(self.ids[:, self.length - 1 : self.length])
        for layer in self.past.layers if taken < count else ():
            if is_toeplitz(layer):
                layer.crop(taken - count)
            else:  # has no `crop` in transformers 5.17
                layer.cumulative_length.sub_(count - taken)
        if self.streamer is not None:
            for tokens in self.ids[:, start : self.length].cpu().unbind(1):
                self.streamer.put(tokens)

    def addresses(self) -> tuple:
        """The addresses and shapes of all that a launch reads and writes. If one changes it is recorded again."""
        read = [*self.model.parameters(), *self.model.buffers(), *self.places.tensors.values(), *self.counts]
        read += [tensor for one in self.operators for tensor in PLACES[one].tensors.values()]
        read += [one for layer in self.past.layers for one in (layer.keys, layer.values) if one is not None]
        return tuple((one.data_ptr(), one.shape) for one in read)


def as_function(processor) -> tuple[int | None, Any] | None:
    """A processor as a function of tensors alone, after the length from which it does nothing; None if it is none."""
    if type(processor) in UNTIL:
        ends = processor.eos_token_id
        suppress = logits_process.SuppressTokensLogitsProcessor(ends.tolist(), device=ends.device)
        return UNTIL[type(processor)](processor), suppress
    return (None, processor) if type(processor) in OF_TENSORS else None


def settings(part) -> tuple:
    """The class and the settings of a processor or a criterion."""
    return type(part), str({name: one.tolist() if torch.is_tensor(one) else one for name, one in vars(part).items()})


def uses_graphs(device: torch.device) -> bool:
    """Whether launches on a device are graphs."""
    return device.type == "cuda"


@cache
def forward_of(model_class: type, is_compiled: bool) -> Callable:
    """The forward pass of a class of models, as a function of the model: compiled to few kernels, or as it is."""
    return torch.compile(model_class.__call__, fullgraph=True) if is_compiled else model_class.__call__


def record(write: Callable[[], None], changed: list[torch.Tensor]) -> Callable[[], None]:
    """A function that runs a launch, recorded after one for PyTorch to compile and to take memory.

    `changed` are the same afterwards. What else the trial has written, the launch writes again.
    """
    device, before = changed[0].device, [tensor.clone() for tensor in changed]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.random.fork_rng([device]), torch.cuda.stream(stream):
        write()
    torch.cuda.current_stream(device).wait_stream(stream)
    for tensor, value in zip(changed, before, strict=True):
        tensor.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the device meanwhile
        write()
    return graph.replay
