"""Chat with a causal model in the terminal: it reads a line and continues the conversation.

The conversation stays in the cache, so that each turn reads only its own tokens. A tokenizer with a chat template
marks the turns by it. Without a template, the model continues the plain text. An empty line, Ctrl-D or Ctrl-C ends the
chat; /new starts a new conversation, /help says this again.

Example:
    python scripts/chat.py --model_name_or_path outputs/demo
    python scripts/chat.py --model_name_or_path outputs/demo --max_new_tokens 40 --temperature 0.7
"""

import argparse

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.model_path import check_model_path
from tnn_scripts.common.parser import ProgramParser
from tnn_scripts.common.sampling import TEMPERATURE, TOP_P
from tnn_scripts.common.terminal import check_text


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--max_new_tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, help="Sampling temperature; 0 is greedy.")
    parser.add_argument("--top_p", type=float, default=TOP_P, help="Sample from the likeliest tokens of this mass.")
    parser.add_argument("--system", help="System message, for a tokenizer with a chat template.")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trust_remote_code", action="store_true")
    args = parser.parse_args()
    check_text("--system", args.system or "")
    check_model_path(args.model_name_or_path, tokenizer=True)
    if args.max_new_tokens < 1 or not 0 <= args.temperature < float("inf") or not 0 < args.top_p <= 1:
        parser.error(
            "--max_new_tokens must be at least 1, --temperature at least 0, and --top_p in (0, 1], got "
            f"{args.max_new_tokens}, {args.temperature:g} and {args.top_p:g}"
        )
    return args


@report_errors
def main():
    args = parse_arguments()
    with importing():
        from tnn_scripts.runs.chat import run
    run(args)


if __name__ == "__main__":
    main()
