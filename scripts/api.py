"""Serve a causal model with the routes of OpenAI's API: completions and chats, for many clients at once.

It needs FastAPI, uvicorn and prometheus_client: `pip install "modeling-tnn[api]"`. All texts are written in one batch,
each with the tokens that it would have alone. Clients of OpenAI's API work with the address
http://127.0.0.1:8000/v1 and any key.

Example:
    python scripts/api.py --model_name_or_path outputs/demo
    python scripts/api.py --model_name_or_path outputs/demo --port 9000 --max_batch_size 64 --memory_limit 4000000000
"""

import logging
import os
from dataclasses import dataclass, field

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.model_path import check_model_path
from tnn_scripts.common.parser import ProgramParser, check_counts

logger = logging.getLogger("api")

# The variable with the key, which other users of the machine cannot see.
KEY = "TNN_API_KEY"


def option(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class ApiArguments:
    """Of what model the API is, what it gives its clients, and where it is."""

    model_name_or_path: str
    max_batch_size: int = option(32, "Most texts that are written at the same time; others wait.")
    max_waiting: int = option(256, "Most texts that wait for their turn; a request for more gets status 429.")
    memory_limit: int | None = option(None, "Most bytes of decoding states of all texts together.")
    prefill_tokens: int = option(2048, "Most tokens of prompts that are read between two tokens of the other texts.")
    max_prompt_tokens: int = option(8192, "Most tokens of a prompt; a request with more gets status 400.")
    max_new_tokens: int = 1000
    max_body_bytes: int = option(2**20, "Most bytes of the body of a request; one with more gets status 413.")
    max_seconds: int = option(600, "Most seconds until a request is answered; one that takes more gets status 504.")
    read_seconds: int = option(30, "Most seconds that a client may take to send a request, or to read an answer.")
    drain_seconds: int = option(10, "Seconds that running requests may take after Ctrl-C or SIGTERM.")
    max_concurrent: int = option(512, "Most connections that are served at the same time; others get status 503.")
    api_key: str | None = option(None, "Key that clients must send; the variable TNN_API_KEY unless given.")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for every address of this machine.")
    port: int = option(8000, "Port to listen on.")
    dtype: str = "auto"
    device: str | None = None

    def __post_init__(self):
        check_model_path(self.model_name_or_path, tokenizer=True)
        check_counts(self, "max_batch_size", "max_waiting", "memory_limit", "prefill_tokens")
        check_counts(self, "max_prompt_tokens", "max_new_tokens", "max_body_bytes")
        check_counts(self, "max_seconds", "read_seconds", "drain_seconds", "max_concurrent")


def key_of(args: ApiArguments) -> str | None:
    """The key that clients must send.

    Raises:
        ValueError: it cannot be sent in a header, or is empty.
    """
    name, key = ("--api_key", args.api_key) if args.api_key is not None else (KEY, os.environ.get(KEY))
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ValueError(f"{name} must be ASCII characters without spaces around them, got {len(key)} characters")
    return key


def serve(args: ApiArguments):
    """Load the model and serve it until the process is ended.

    Raises:
        ImportError: FastAPI, uvicorn or prometheus_client is not installed.
        ValueError: the model cannot be served.
        UserError: the address cannot.
    """
    with importing("api"):
        from tnn_scripts.serving.app import Limits, Service, build_app
        from tnn_scripts.serving.engine import Engine
        from tnn_scripts.serving.served import check_address, load_causal, name_of
        from tnn_scripts.serving.server import Server
    check_address(args.host, args.port)
    key = key_of(args)
    model, tokenizer = load_causal(args.model_name_or_path, args.dtype, args.device)
    limits = Limits(
        args.max_prompt_tokens, args.max_new_tokens, args.max_body_bytes, args.read_seconds, args.max_seconds
    )
    engine = Engine(
        model,
        max_batch_size=args.max_batch_size,
        max_waiting=args.max_waiting,
        memory_limit=args.memory_limit,
        prefill_tokens=args.prefill_tokens,
    )
    service = Service(name_of(args.model_name_or_path), engine, tokenizer, limits)
    logger.info("serving %s at http://%s:%d/v1; Ctrl-C ends it", service.name, args.host, args.port)
    if key is None and args.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("--host %s opens the server to others, without a key (--api_key)", args.host)
    times = {"read_seconds": args.read_seconds, "drain_seconds": args.drain_seconds}
    app = build_app(service, key)
    try:
        Server(app, args.host, args.port, engine.close, max_concurrent=args.max_concurrent, **times).run()
    finally:
        engine.close()


@report_errors
def main():
    args = ApiArguments(**vars(ProgramParser([ApiArguments], __doc__).parse_args()))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    serve(args)


if __name__ == "__main__":
    main()
