"""The model that an API serves: tokens of its requests, and their texts."""

import time

from jinja2 import TemplateError

from modeling_tnn.serving.scheduler import QueueFullError
from tnn_scripts.serving.arguments import ApiArguments
from tnn_scripts.serving.engine import Engine
from tnn_scripts.serving.errors import ApiError
from tnn_scripts.serving.metrics import Metrics
from tnn_scripts.serving.schema import Body, ChatBody
from tnn_scripts.serving.text import Text
from tnn_scripts.serving.writing import load_causal, name_of


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
