"""The options of `serve.py`."""

from dataclasses import dataclass, field

from tnn_scripts.common.model_path import check_model_path
from tnn_scripts.common.parser import check_counts


def option(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class PageArguments:
    """Of what model the page is, what it gives its users, and where it is."""

    model_name_or_path: str
    max_input_tokens: int = option(8192, "Most tokens of a text that are read; a longer one is read from its end.")
    max_new_tokens: int = 1000
    max_batch_size: int = option(32, "Most texts that are written at the same time; others wait.")
    host: str | None = option("127.0.0.1", "Address to listen on; 0.0.0.0 for every address of this machine.")
    port: int | None = option(7860, "Port to listen on.")
    dtype: str = "auto"
    device: str | None = None

    def __post_init__(self):
        check_model_path(self.model_name_or_path, tokenizer=True)
        check_counts(self, "max_input_tokens", "max_new_tokens", "max_batch_size")
