"""The options of `tnn serve` and `tnn api`."""

import re
from dataclasses import dataclass

from tnn_programs.cli.model_path import check_model_path
from tnn_programs.cli.parser import check_counts, option, require


@dataclass
class ServerArguments:
    """Options of a server: the model that writes and where it runs, limits and address."""

    model_name_or_path: str
    dtype: str = "auto"
    device: str | None = None
    max_new_tokens: int = 1000
    max_batch_size: int = option(32, "Most texts that are written at the same time; others wait.")
    host: str | None = option("127.0.0.1", "Address to listen on; 0.0.0.0 for every address of this machine.")
    port: int | None = option(8000, "Port to listen on.")

    def __post_init__(self):
        require(self, "port", self.port is None or 0 <= self.port < 2**16, "in [0, 65535]")
        check_model_path(self.model_name_or_path, tokenizer=True, causal=True)
        check_counts(self, *(name for name in vars(self) if name.startswith("max_")))


@dataclass
class PageArguments(ServerArguments):
    """The options of `tnn serve`."""

    max_input_tokens: int = option(8192, "Most tokens of a text that are read; a longer one is read from its end.")
    port: int | None = option(7860, "Port to listen on.")


@dataclass
class ApiArguments(ServerArguments):
    """The options of `tnn api`."""

    max_waiting: int = option(256, "Most texts of a client that wait for a place; a request for more gets status 429.")
    memory_limit: int | None = option(None, "Most bytes of decoding states of all texts together.")
    prefill_tokens: int = option(2048, "Most tokens of prompts that are read between two tokens of the other texts.")
    tokens_per_launch: int = option(1, "Most tokens of a text in a step: 1, 2, 4, 8 or 16; on a GPU one CUDA graph.")
    max_prompt_tokens: int = option(8192, "Most tokens of a prompt; a request with more gets status 400.")
    max_body_bytes: int = option(2**20, "Most bytes of the body of a request; one with more gets status 413.")
    max_seconds: int = option(600, "Most seconds until a request is answered; one that takes more gets status 504.")
    read_seconds: int = option(30, "Most seconds until the body of a request is there; one later gets status 408.")
    drain_seconds: int = option(10, "Seconds that running requests may take after Ctrl-C or SIGTERM.")
    api_key: str | None = option(None, "Key that clients must send; the variable TNN_API_KEY unless given.")
    allowed_origins: list[str] = option([], "Sites whose pages may call it: https://example.org, or * for all.")

    def __post_init__(self):
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s*]+", origin):
                raise ValueError(f"--allowed_origins must be like https://example.org without a path, got {origin}")
        super().__post_init__()
        check_counts(self, "memory_limit", "prefill_tokens")
