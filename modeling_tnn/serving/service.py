"""The model that an API serves: tokens of its requests, their texts, and what is counted of them for Prometheus."""

import time

from jinja2 import TemplateError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tnn_cli.serving_arguments import ApiArguments

from .engine import Engine, Text
from .http import ApiError
from .scheduler import BatchScheduler, QueueFullError
from .schema import Body, ChatBody
from .writing import load_causal, name_of

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters of one server. The states of its scheduler are read when somebody asks."""

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


class CountResponses:
    """Count responses by route and status, when they begin."""

    def __init__(self, app, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope, receive, send):
        async def counted(message):
            if message["type"] == "http.response.start":
                route = scope.get("route")  # not the path, of which anybody could make as many as they like
                self.metrics.responses.labels(getattr(route, "path", "unknown"), message["status"]).inc()
            await send(message)

        await self.app(scope, receive, counted)


class Service:
    """One model, its tokenizer, and the thread that writes. `args` has the limits of requests."""

    def __init__(self, args: ApiArguments):
        model, self.tokenizer = load_causal(args.model_name_or_path, args.dtype, args.device)
        self.args, self.name = args, name_of(args.model_name_or_path)
        limits = ("max_batch_size", "max_waiting", "memory_limit", "prefill_tokens")
        self.engine = Engine(model, **{name: getattr(args, name) for name in limits})
        self.metrics = Metrics(self.engine.scheduler)
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

    def tokens(self, prompt: str | list[int]) -> list[int]:
        """The tokens of a prompt; ApiError if there are none or too many, or an id is not of the model."""
        vocabulary = self.engine.scheduler.model.config.vocab_size
        ids = self.tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
        if not ids:
            raise ApiError(400, "`prompt` must have at least one token, got none", "empty_prompt", "prompt")
        if len(ids) > self.args.max_prompt_tokens:
            message = f"`prompt` must have at most {self.args.max_prompt_tokens:,} tokens, got {len(ids):,}"
            raise ApiError(400, message, "context_length_exceeded", "prompt")
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ApiError(400, f"`prompt` must have ids from 0 to {vocabulary - 1}", "invalid_token", "prompt")
        return ids

    def chat_tokens(self, body: ChatBody) -> list[int]:
        """The tokens of a conversation, by the template of the tokenizer; ApiError if it refuses the messages."""
        if self.tokenizer.chat_template is None:
            raise ApiError(400, f"The tokenizer of {self.name} has no chat template.", "no_chat_template")
        messages = [message.plain() for message in body.messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ApiError(400, f"The chat template: {error}", "chat_template", "messages") from error
        return self.tokens(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def submit(self, body: Body, prompts: list[list[int]], texts: list[Text]):
        """Queue the texts, as many for each prompt; after an ApiError no text is left in the queue."""
        self.check_engine()
        most = body.most_tokens() or self.args.max_new_tokens
        if most > self.args.max_new_tokens:
            message = f"`max_tokens` must be at most {self.args.max_new_tokens:,}, got {most:,}"
            raise ApiError(400, message, "max_tokens", "max_tokens")
        options = {"max_new_tokens": most} | body.sampling()
        try:
            for text in texts:
                seed = None if body.seed is None else body.seed + text.index
                ids = prompts[text.index // body.n]
                text.request = self.engine.submit(ids, seed, streamer=text, stopping_criteria=[text], **options)
        except Exception as error:
            self.leave(texts)
            if isinstance(error, QueueFullError):
                raise ApiError(429, str(error), "queue_full") from error
            if isinstance(error, ValueError):
                raise ApiError(400, str(error)) from error
            raise

    def end_late(self, texts: list[Text]):
        """End the texts that have not ended: their time is over."""
        for text in texts:
            text.is_late = True
            self.engine.cancel(text.request)

    def leave(self, texts: list[Text]):
        """End the texts that have not ended, and count all."""
        for text in texts:
            if text.request is not None:
                if not text.is_done:
                    self.engine.cancel(text.request)
                self.metrics.count_text(text)
