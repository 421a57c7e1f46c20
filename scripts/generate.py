"""Continue prompts with a trained model, from a folder or the Hub, and report the speed.

Every field of transformers' GenerationConfig is an option by its name. The program continues one prompt at a time and
streams the text to the terminal. With --batch_size it decodes several prompts at once. Without a prompt, each line of
the standard input is one; an empty line ends the program.

Texts are sampled, with temperature 1 and top_p 0.95 unless given. `--do_sample false` writes the likeliest tokens, as
does `--temperature 0`, and `--num_beams` searches.

With --chat a line continues the conversation of those before it, and /new begins another. The conversation stays in
the cache, so that each turn reads only its own tokens. A tokenizer with a chat template marks the turns by it. Without
a template, the model continues the plain text.

Example:
    python scripts/generate.py --model_name_or_path outputs/demo --prompt "In the" --temperature 0.7
    python scripts/generate.py --model_name_or_path outputs/demo --prompt_file prompts.txt --batch_size 8 --num_beams 4
    python scripts/generate.py --model_name_or_path outputs/demo --chat
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.atomic import check_writable, write_json
from tnn_programs.cli.generation_fields import read_options
from tnn_programs.cli.model_path import check_model_path
from tnn_programs.cli.parser import ProgramParser, check_counts
from tnn_programs.cli.text_files import FILES, check_file, check_text, read_lines


def parse_arguments() -> tuple[argparse.Namespace, dict]:
    """The options of this program, and those of GenerationConfig."""
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompt_file", type=Path, help="Text file with a prompt on each line.")
    parser.add_argument("--chat", action="store_true", help="Let a line continue the conversation of those before it.")
    parser.add_argument("--system", help="System message of --chat, for a tokenizer with a chat template.")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--trust_remote_code", action="store_true")
    known, rest = parser.parse_known_args()
    check_model_path(known.model_name_or_path, tokenizer=True, causal=True)
    if known.prompt_file is not None:
        check_file(str(known.prompt_file), whole=False)
        known.prompt += [line for line in FILES.read_lines_of(str(known.prompt_file)) if line.strip()]
    for name, text in (*(("prompt", prompt) for prompt in known.prompt), ("system", known.system or "")):
        check_text(f"--{name}", text)
    if known.chat and (known.prompt or known.batch_size > 1 or known.output_file):
        parser.error("--chat must be given without --prompt, --prompt_file, --batch_size and --output_file")
    check_counts(known, "batch_size")
    if known.output_file is not None:
        check_writable(known.output_file)
        if known.output_file.exists() and known.output_file == known.prompt_file:
            parser.error(f"--output_file must not be the file with the prompts, got {known.output_file}")
    return known, read_options(parser, rest)


def batches(args: argparse.Namespace, tokenizer) -> Iterator[list[str]]:
    """The prompts that were given, `--batch_size` at a time, or the lines of the standard input."""
    for prompt in args.prompt:
        if not tokenizer(prompt, verbose=False)["input_ids"]:
            raise ValueError(f"--prompt must have at least one token, got {prompt!r}")
    for first in range(0, len(args.prompt), args.batch_size):
        yield args.prompt[first : first + args.batch_size]
    if args.prompt:
        return
    line = None
    for line in read_lines():
        yield [line]
    if line is None and not sys.stdin.isatty():
        raise ValueError("--prompt, --prompt_file or a line on the standard input must be given")


def chat(model, tokenizer, system: str | None, options: dict):
    """Let each line of the standard input continue a conversation, whose turns stream to stdout."""
    from tnn_programs.serving.writing import Conversation

    if system is not None and tokenizer.chat_template is None:
        raise ValueError(f"--system must be given with a tokenizer that has a chat template, got {system!r}")
    turns = "messages (chat template)" if tokenizer.chat_template else "plain text, which it continues"
    sys.stderr.write(f"Your lines are {turns}. /new starts anew, an empty line or Ctrl-D ends.\n")
    conversation = Conversation(model, tokenizer, system, options)
    for line in read_lines():
        if line.strip() == "/new":
            conversation = Conversation(model, tokenizer, system, options)
        else:
            conversation.answer(line)


def run(args: argparse.Namespace, options: dict):
    """Continue all prompts and write the texts; ValueError if the model, the device or a prompt is wrong."""
    with importing():
        import torch
        from transformers import set_seed

        from tnn_programs.cli.model_path import require_padding
        from tnn_programs.serving.writing import continue_batch, load_writer, with_defaults
    given = args.model_name_or_path, args.dtype, args.device, args.trust_remote_code
    model, tokenizer = load_writer(*given, padding_side="left")
    if args.batch_size > 1:
        require_padding(tokenizer, "--batch_size")
    options, used = with_defaults(model, options)
    stream = args.batch_size == 1 and options.get("num_beams", 1) == 1 and options.get("num_return_sequences", 1) == 1
    set_seed(args.seed)
    if args.chat:
        return chat(model, tokenizer, args.system, used)
    prompts, texts, tokens, seconds = [], [], 0, 0.0
    for batch in batches(args, tokenizer):
        start = time.perf_counter()
        written, count = continue_batch(model, tokenizer, batch, used, stream)
        seconds += time.perf_counter() - start
        prompts, texts, tokens = prompts + batch, texts + written, tokens + count
        if not stream:
            sys.stdout.write("\n\n".join(written) + "\n\n")
    if not prompts:
        return
    sys.stdout.write(f"\n{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens per second\n")
    if args.output_file is not None:
        result = {"model": args.model_name_or_path, "prompts": prompts, "texts": texts, "options": options}
        result["sampling"] = {name: value for name, value in used.items() if value is not None and name not in options}
        speed = {"new_tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        speed |= {"device": args.device or model.device.type, "torch_threads": torch.get_num_threads()}
        write_json(args.output_file, result | speed)


@report_errors
def main():
    run(*parse_arguments())


if __name__ == "__main__":
    main()
