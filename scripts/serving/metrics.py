"""What a server counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from modeling_tnn import BatchScheduler
from tnn_scripts.serving.text import Text

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters of one server. The states of its scheduler are read when somebody asks."""

    def __init__(self, scheduler: BatchScheduler):
        self.registry = registry = CollectorRegistry()
        self.responses = Counter(
            "tnn_responses", "Responses by route and status.", ["route", "status"], registry=registry
        )
        self.texts = Counter("tnn_texts", "Texts that have ended, by reason.", ["reason"], registry=registry)
        self.prompt_tokens = Counter("tnn_prompt_tokens", "Tokens of prompts that were taken.", registry=registry)
        self.new_tokens = Counter("tnn_new_tokens", "Tokens that were written.", registry=registry)
        first = "Seconds from a request to its first token."
        self.first = Histogram("tnn_first_token_seconds", first, buckets=SECONDS, registry=registry)
        later = "Mean seconds between the tokens of a text."
        self.later = Histogram("tnn_token_seconds", later, buckets=SECONDS, registry=registry)
        for name, text, read in (
            ("tnn_texts_running", "Texts that are read or written.", lambda: scheduler.num_running),
            ("tnn_texts_waiting", "Texts that wait for their turn.", lambda: scheduler.num_waiting),
            ("tnn_state_bytes", "Bytes of decoding states.", lambda: scheduler.state_bytes),
        ):
            Gauge(name, text, registry=registry).set_function(read)

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

    def page(self) -> bytes:
        """All figures, in Prometheus' text format."""
        return generate_latest(self.registry)


class CountResponses:
    """Middleware that counts responses by route and status."""

    def __init__(self, app, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope, receive, send):
        """Count the response when it begins."""

        async def counted(message):
            if message["type"] == "http.response.start":
                route = scope.get("route")  # not the path, of which anybody could make as many as they like
                self.metrics.responses.labels(getattr(route, "path", "unknown"), message["status"]).inc()
            await send(message)

        await self.app(scope, receive, counted)
