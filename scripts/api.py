"""Serve a causal model with the routes of OpenAI's API: completions and chats, for many clients at once.

It needs FastAPI, uvicorn and prometheus_client: `pip install "modeling-tnn[api]"`. All texts are written in one batch,
each with the tokens that it would have alone. Clients of OpenAI's API work with the address
http://127.0.0.1:8000/v1 and any key.

Example:
    python scripts/api.py --model_name_or_path outputs/demo
    python scripts/api.py --model_name_or_path outputs/demo --port 9000 --max_batch_size 64 --memory_limit 4000000000
"""

import gc
import logging
import os

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.parser import ProgramParser
from tnn_programs.cli.serving_arguments import ApiArguments

logger = logging.getLogger("api")

# The variable with the key, which other users of the machine cannot see.
KEY = "TNN_API_KEY"


def key_of(args: ApiArguments) -> str | None:
    """The key that clients must send; ValueError if it cannot be sent in a header, or is empty."""
    name, key = ("--api_key", args.api_key) if args.api_key is not None else (KEY, os.environ.get(KEY))
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ValueError(f"{name} must be ASCII characters without spaces around them, got {len(key)} characters")
    return key


@report_errors
def main():
    args = ApiArguments(**vars(ProgramParser([ApiArguments], __doc__).parse_args()))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with importing("api"):
        from tnn_programs.serving.app import build_app
        from tnn_programs.serving.http import LOCAL
        from tnn_programs.serving.server import Server
        from tnn_programs.serving.service import Service
    key = key_of(args)
    service = Service(args)
    logger.info("serving %s at http://%s:%d/v1; Ctrl-C ends it", service.name, args.host, args.port)
    if key is None and args.host not in LOCAL:
        logger.warning("--host %s opens the server to others, without a key (--api_key)", args.host)
    gc.freeze()  # what is loaded stays: to look through it for garbage would hold up all streams
    try:
        Server(build_app(service, key), args, service.engine.close).run()
    finally:
        service.engine.close()


if __name__ == "__main__":
    main()
