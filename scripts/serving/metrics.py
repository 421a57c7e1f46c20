"""What a server counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from modeling_tnn import BatchScheduler
from tnn_scripts.serving.text import Text

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

    def page(self) -> bytes:
        """All figures, in Prometheus' text format."""
        return generate_latest(self.registry)
