"""A text that is written among others: its prompt, its settings, its random numbers, and how far it is."""

import torch
from torch.nn.functional import pad
from transformers import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from ..cache_tnn import cache_of
from ..compile.token_loop import MODES
from .logprobs import Scored, score
from .sampling import sampling_of


class Request:
    """A submitted request, as `BatchScheduler.submit` returns it.

    Attributes:
        tokens: the tokens written so far. An end-of-text token is among them, as in the output of `generate`.
        reason: why the text has ended: "stop" (a stop token, or another stopping criterion), "length", "cancelled" or
            "error"; None while it has not.
        error: what was raised, if the reason is "error".
        max_length: the most tokens that the prompt and the text may have together.
        client: who has asked for it; each client has a share of the places.
        likeliest: how many likeliest tokens are noted with each token; None to note nothing.
        logprobs: what is noted of the tokens so far.
        prompt_logprobs: the same of the prompt's tokens but the first; None if it is not asked for.
    """

    def __init__(self, settings: dict, seed: int | None, streamer: BaseStreamer | None):
        prompt, mask, config = settings["input_ids"], settings.get("attention_mask"), settings["generation_config"]
        self.prompt_length, self.max_length = prompt.shape[1], config.max_length
        new = (0, self.max_length - self.prompt_length)
        self._ids, mask = pad(prompt, new), torch.ones_like(prompt) if mask is None else mask
        self._mask = pad(mask, new, value=1)[0].ne(0)
        self._processors, self._criteria = settings["logits_processor"], settings["stopping_criteria"]
        self._ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        self._do_sample, self._streamer = config.do_sample, streamer
        self._generator = torch.Generator(prompt.device)
        self._generator.seed() if seed is None else self._generator.manual_seed(seed)
        self.sampling, self._noise = sampling_of(self._processors, self._do_sample), []
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.error: Exception | None = None
        self.is_cancelled = self.is_suspect = False  # suspect: a pass with it and others has failed
        self.client, self.likeliest, self.logprobs = None, None, []
        self.prompt_logprobs: list[Scored] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the text has ended."""
        return self.reason is not None

    @property
    def length(self) -> int:
        """The number of tokens of the prompt and the text so far."""
        return self.prompt_length + len(self.tokens)

    @property
    def ids(self) -> torch.Tensor:
        """The prompt and the text so far, `(1, L)`."""
        return self._ids[:, : self.length]

    @property
    def mask(self) -> torch.Tensor:
        """The mask of `ids`, `(L,)`, False at padding of the prompt."""
        return self._mask[: self.length]

    def fill_noise(self, noise: torch.Tensor):
        """Write exponential random numbers for the next tokens into `(K, V)`: the same until a token is added."""
        while len(self._noise) < len(noise):
            self._noise.append(torch.empty_like(noise[0]).exponential_(generator=self._generator))
        torch.stack(self._noise[: len(noise)], out=noise)

    def choose(self, logits: torch.Tensor | None, token: int) -> int:
        """The next token: `token`, or that of processors for `logits` `(1, V)` in float32, which may be changed."""
        raw = logits if self.likeliest is None else logits.clone()
        if self.sampling is None:
            scores = self._processors(self.ids, logits)
            draw = self._do_sample
            chosen = torch.multinomial(scores.softmax(-1), 1, generator=self._generator) if draw else scores.argmax(-1)
            token = int(chosen)
        elif token < 0:
            raise RuntimeError("The probabilities of the next token are not finite")
        if self.likeliest is not None:
            self.logprobs += score(raw, [token], self.likeliest)
        return token

    def note_prompt(self, logits: torch.Tensor, first: int):
        """Note the tokens after those with `logits` `(L, V)`, of which the first is at `first`, below 0 in padding."""
        logits, first = logits[max(0, -first) :], max(0, first)
        tokens = self._ids[0, first + 1 : min(first + 1 + len(logits), self.prompt_length)].tolist()
        self.prompt_logprobs[first:] = score(logits[: len(tokens)], tokens, self.likeliest)  # it may be read again

    def add(self, token: int):
        """Append a token, give it to the streamer, and end the text where a criterion says so."""
        self._ids[0, self.length] = token
        self.tokens.append(token)
        self._noise = self._noise[1:]
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        if bool(self._criteria(self.ids, None).all()):
            at_limit = self.length >= self.max_length and token not in self._ends
            self.end("length" if at_limit else "stop")

    def end(self, reason: str, error: Exception | None = None):
        """End the text, unless it has ended."""
        if self.is_done:
            return
        self.error, self.reason = error, reason
        try:
            if self._streamer is not None:
                self._streamer.end()
        except Exception as failure:
            self.error, self.reason = error or failure, "error"


def prepare(model: GenerationMixin, input_ids: torch.Tensor, seed: int | None, streamer=None, **options) -> Request:
    """A request with all that `model.generate(input_ids, **options)` would use, prepared by `generate` itself."""
    settings = {}
    model.generate(
        input_ids, custom_generate=lambda _, input_ids, **given: settings.update(given, input_ids=input_ids), **options
    )
    if settings and (mode := settings["generation_config"].get_generation_mode()) not in MODES:
        raise ValueError(f"`num_beams` and the like must ask for greedy search or sampling, got {mode.value}")
    rows = len(settings.get("input_ids", ()))
    if rows != 1:
        raise ValueError(f"`input_ids` must be one text (1, L) with num_return_sequences=1, got {rows} rows")
    past = cache_of(settings)
    if past is not None and past.get_seq_length():
        raise ValueError(f"`past_key_values` must be empty, got {past.get_seq_length()} tokens")
    if streamer is not None:
        streamer.put(settings["input_ids"].cpu())
    return Request(settings, seed, streamer)
