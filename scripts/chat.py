"""Chat with a causal model in the terminal: it reads a line and continues the conversation.

The conversation stays in the cache, so that each turn reads only its own tokens. A tokenizer with a chat template
marks the turns by it. Without a template, the model continues the plain text. An empty line, Ctrl-D or Ctrl-C ends the
chat; /new starts a new conversation, /help says this again.

Example:
    python scripts/chat.py --model_name_or_path outputs/demo
    python scripts/chat.py --model_name_or_path outputs/demo --max_new_tokens 40 --temperature 0.7
"""

import sys
from dataclasses import dataclass

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.parser import ProgramParser, check_counts
from tnn_programs.cli.sampling import TEMPERATURE, TOP_P, given_sampling, sampling
from tnn_programs.cli.serving_arguments import WriterArguments, option
from tnn_programs.cli.text_files import check_text, read_lines

UNLESS_GIVEN = "Unless given that of the model's generation_config.json, or"


@dataclass
class ChatArguments(WriterArguments):
    """The options of this program."""

    max_new_tokens: int = 100
    temperature: float | None = option(None, f"Sampling temperature; 0 is greedy. {UNLESS_GIVEN} {TEMPERATURE:g}.")
    top_p: float | None = option(None, f"Sample from the likeliest tokens of this mass. {UNLESS_GIVEN} {TOP_P:g}.")
    system: str | None = option(None, "System message, for a tokenizer with a chat template.")
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_text("--system", self.system or "")
        check_counts(self, "max_new_tokens")


def show_help(tokenizer):
    """Say on stderr how to chat, and whether the model gets the lines as messages."""
    turns = "messages (chat template)" if tokenizer.chat_template else "plain text, which it continues"
    sys.stderr.write(f"Your lines are {turns}. /new starts anew, /help shows this, an empty line or Ctrl-D ends.\n")


@report_errors
def main():
    args = ChatArguments(**vars(ProgramParser([ChatArguments], __doc__).parse_args()))
    with importing():
        from transformers import set_seed

        from tnn_programs.serving.writing import Conversation, load_writer
    model, tokenizer = load_writer(args.model_name_or_path, args.dtype, args.device, args.trust_remote_code)
    if args.system is not None and tokenizer.chat_template is None:
        raise ValueError(f"--system must be given with a tokenizer that has a chat template, got {args.system!r}")
    set_seed(args.seed)
    of_model = given_sampling(vars(model.generation_config))
    options = {"max_new_tokens": args.max_new_tokens} | sampling(args.temperature, args.top_p, of_model)
    conversation = Conversation(model, tokenizer, args.system, options)
    show_help(tokenizer)
    for line in read_lines():
        if line.strip() == "/new":
            conversation = Conversation(model, tokenizer, args.system, options)
        elif line.strip() == "/help":
            show_help(tokenizer)
        else:
            conversation.answer(line)


if __name__ == "__main__":
    main()
