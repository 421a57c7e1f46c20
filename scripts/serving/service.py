"""The model that an API serves: tokens of its requests, their texts, and what is counted of them for Prometheus."""

import asyncio
import functools
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from modeling_tnn.serving.logprobs import spell
from modeling_tnn.serving.scheduler import BatchScheduler
from tnn_programs.cli.sampling import given_sampling, sampling
from tnn_programs.cli.serving_arguments import ApiArguments
from tnn_programs.serving.engine import Engine, Text
from tnn_programs.serving.http import ApiError
from tnn_programs.serving.schema import Body, ChatBody
from tnn_programs.serving.writing import CHARACTERS_PER_TOKEN, load_served, name_of

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters of one server. What runs is read when somebody asks."""

    def __init__(self, scheduler: BatchScheduler):
        self.registry = CollectorRegistry()
        known = {"registry": self.registry}
        self.responses = Counter("tnn_responses", "Responses by route and status.", ["route", "status"], **known)
        self.texts = Counter("tnn_texts", "Texts that have ended, by reason.", ["reason"], **known)
        self.prompt_tokens = Counter("tnn_prompt_tokens", "Tokens of prompts that were taken.", **known)
        self.new_tokens = Counter("tnn_new_tokens", "Tokens that were written.", **known)
        known["buckets"] = SECONDS
        self.first = Histogram("tnn_first_token_seconds", "Seconds from a request to its first token.", **known)
        self.later = Histogram("tnn_token_seconds", "Mean seconds between the tokens of a text.", **known)
        for name, text, field in (
            ("tnn_texts_running", "Texts that are read or written.", "num_running"),
            ("tnn_texts_waiting", "Texts that wait for their turn.", "num_waiting"),
            ("tnn_state_bytes", "Bytes of decoding states.", "state_bytes"),
        ):
            gauge = Gauge(name, text, registry=self.registry)
            gauge.set_function(lambda field=field: getattr(scheduler, field))

    def count_text(self, text: Text):
        """Count a text that has ended."""
        self.texts.labels(text.request.reason or "cancelled").inc()  # it ends at the next step
        self.prompt_tokens.inc(text.request.prompt_length)
        self.new_tokens.inc(len(text.request.tokens))
        begin, *times = text.times
        if times:
            self.first.observe(times[0] - begin)
        if len(times) > 1:
            self.later.observe((times[-1] - times[0]) / (len(times) - 1))


class Service:
    """One model, its tokenizer, and the thread that writes. `args` has the limits of requests."""

    def __init__(self, args: ApiArguments):
        self.model, self.tokenizer = load_served(args.model_name_or_path, args.dtype, args.device)
        self.args, self.name = args, name_of(args.model_name_or_path)
        limits = ("max_batch_size", "max_waiting", "memory_limit", "prefill_tokens", "tokens_per_launch")
        self.engine = Engine(self.model, **{name: getattr(args, name) for name in limits})
        self.metrics = Metrics(self.engine.scheduler)
        self.text_of = functools.lru_cache(2**16)(functools.partial(spell, self.tokenizer))
        self.card = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "modeling-tnn"}

    def check_model(self, name: str):
        """Refuse requests for another model."""
        if name != self.name:
            message = f"The model `{name}` does not exist. There is {self.name}."
            raise ApiError(404, message, "model_not_found", "model")

    def check_engine(self):
        """Refuse texts that nobody would write."""
        if not self.engine.is_alive:
            raise ApiError(503, "The thread that writes has ended; the log of the server has the reason.")

    def tokens(self, text: str | list[int], field: str = "prompt", **options) -> list[int]:
        """The tokens of a text; ApiError if there are none or too many, or an id is not of the model."""
        vocabulary, most = self.model.config.vocab_size, self.args.max_prompt_tokens
        if isinstance(text, str) and len(text) > CHARACTERS_PER_TOKEN * most:
            message = f"`{field}` must have at most {most:,} tokens, got {len(text):,} characters"
            raise ApiError(400, message, "context_length_exceeded", field)
        ids = self.tokenizer(text, verbose=False, **options)["input_ids"] if isinstance(text, str) else text
        if not ids:
            raise ApiError(400, f"`{field}` must have at least one token, got none", "empty_prompt", field)
        if len(ids) > most:
            message = f"`{field}` must have at most {most:,} tokens, got {len(ids):,}"
            raise ApiError(400, message, "context_length_exceeded", field)
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ApiError(400, f"`{field}` must have ids from 0 to {vocabulary - 1}", "invalid_token", field)
        return ids

    def chat_tokens(self, body: ChatBody) -> list[int]:
        """The tokens of a conversation, by the template of the tokenizer; ApiError if it refuses the messages."""
        if self.tokenizer.chat_template is None:
            raise ApiError(400, f"The tokenizer of {self.name} has no chat template.", "no_chat_template")
        messages = [message.plain() for message in body.messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program, which may fail in any way
            raise ApiError(400, f"The chat template: {error}", "chat_template", "messages") from error
        return self.tokens(text, "messages", add_special_tokens=False)

    def begin(self, body: Body, news: asyncio.Queue, loop: asyncio.AbstractEventLoop, client: str) -> list[Text]:
        """Queue the texts of a request, as many for each prompt; after an ApiError none is left in the queue."""
        self.check_engine()
        is_chat = isinstance(body, ChatBody)
        count, held = body.n * (1 if is_chat else len(body.prompt)), self.args.max_batch_size + self.args.max_waiting
        if count > held:
            raise ApiError(400, f"`n` must ask for at most {held:,} texts of all prompts, got {count:,}", "n", "n")
        most = self.args.max_new_tokens if body.most_tokens is None else body.most_tokens
        if most > self.args.max_new_tokens:
            message = f"`max_tokens` must be at most {self.args.max_new_tokens:,}, got {most:,}"
            raise ApiError(400, message, "max_tokens", "max_tokens")
        prompts = [self.chat_tokens(body)] if is_chat else [self.tokens(prompt) for prompt in body.prompt]
        options = {"max_new_tokens": max(1, most), "client": client, "logprobs": body.likeliest}
        options |= sampling(body.temperature, body.top_p, given_sampling(vars(self.model.generation_config)))
        options["prompt_logprobs"] = body.echo and body.likeliest is not None
        texts: list[Text] = []
        try:
            for index in range(count):
                seed, ids = None if body.seed is None else body.seed + index, prompts[index // body.n]
                given = body.prompt[index // body.n] if body.echo else ""
                echo = given if isinstance(given, str) else self.tokenizer.decode(ids, skip_special_tokens=True)
                text = Text(self.tokenizer, index, ids, body.stop, news, loop, echo, is_empty=most == 0)
                text.request = self.engine.submit(ids, seed, streamer=text, stopping_criteria=[text], **options)
                texts.append(text)
        except Exception as error:
            self.leave(texts)
            if isinstance(error, ValueError):
                raise ApiError(400, str(error)) from error
            raise
        return texts

    def end_late(self, texts: list[Text]):
        """End the texts that have not ended: their time is over."""
        for text in texts:
            text.is_late = True
            self.engine.cancel(text.request)

    def leave(self, texts: list[Text]):
        """End the texts that have not ended, and count all."""
        for text in texts:
            if not text.is_done:
                self.engine.cancel(text.request)
            self.metrics.count_text(text)
