"""A text that is written among others: its prompt, its settings, its random numbers, and how far it is."""

import torch
from transformers import GenerationMixin
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

from ..cache_tnn import cache_of

# Ways to choose tokens that need one row of a batch for a text, and no second pass for a token.
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class Request:
    """What `BatchScheduler.submit` returns.

    Attributes:
        tokens: the tokens written so far. An end-of-text token is among them, as in the output of `generate`.
        reason: why the text has ended: "stop" (a stop token, or another stopping criterion), "length", "cancelled" or
            "error"; None while it has not.
        error: what was raised, if the reason is "error".
        max_length: the most tokens that the prompt and the text may have together.
    """

    def __init__(
        self,
        prompt: torch.Tensor,
        mask: torch.Tensor | None,
        settings: dict,
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
    ):
        config = settings["generation_config"]
        self.max_length, self.do_sample = config.max_length, config.do_sample
        ends = config.eos_token_id
        self._ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        self._processors, self._criteria = settings["logits_processor"], settings["stopping_criteria"]
        self._streamer = streamer
        self._ids = prompt.new_zeros(1, max(self.max_length, prompt.shape[1]))
        self._ids[:, : prompt.shape[1]] = prompt
        self._padding = None if mask is None else mask[0].eq(0)  # a prompt may have padding
        self._generator = torch.Generator(prompt.device)
        self._generator.seed() if seed is None else self._generator.manual_seed(seed)
        self.prompt_length = prompt.shape[1]
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.error: Exception | None = None
        self.is_cancelled = False
        self.is_suspect = False  # a pass with it and others has failed: the next one is its own

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

    def mask(self) -> torch.Tensor:
        """The mask of `ids`, `(L,)`, False at padding."""
        mask = torch.ones(self.length, dtype=torch.bool, device=self._ids.device)
        if self._padding is not None:
            mask[: self.prompt_length] = ~self._padding
        return mask

    def choose(self, logits: torch.Tensor, likeliest: int) -> int:
        """The next token for `logits` `(1, V)`, whose largest is `likeliest`: what `generate` chooses.

        Args:
            logits: a copy in float32, which may be changed.
        """
        if not self._processors and not self.do_sample:
            return likeliest
        scores = self._processors(self.ids, logits)
        if self.do_sample:
            return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        return int(scores.argmax(-1))

    def add(self, token: int):
        """Append a token, give it to the streamer, and end the text where a criterion says so."""
        self._ids[0, self.length] = token
        self.tokens.append(token)
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


def prepare(
    model: GenerationMixin,
    input_ids: torch.Tensor,
    seed: int | None = None,
    streamer: BaseStreamer | None = None,
    **options,
) -> Request:
    """A request with all that `model.generate(input_ids, **options)` would use, prepared by `generate` itself.

    Raises:
        TypeError, ValueError: those of `generate`, or a setting for several texts or passes.
    """
    settings = {}

    def keep(model, input_ids, **given):
        settings.update(given, input_ids=input_ids)
        return input_ids

    model.generate(input_ids, custom_generate=keep, **options)
    mode = settings["generation_config"].get_generation_mode() if settings else None
    if settings and mode not in MODES:
        raise ValueError(f"`num_beams` and the like must ask for greedy search or sampling, got {mode.value}")
    rows = len(settings.get("input_ids", ()))
    if rows != 1:
        raise ValueError(f"`input_ids` must be one text (1, L) with num_return_sequences=1, got {rows} rows")
    past = cache_of(settings)
    if past is not None and past.get_seq_length():
        raise ValueError(f"`past_key_values` must be empty, got {past.get_seq_length()} tokens")
    if streamer is not None:
        streamer.put(settings["input_ids"].cpu())
    return Request(settings["input_ids"], settings.get("attention_mask"), settings, seed, streamer)
