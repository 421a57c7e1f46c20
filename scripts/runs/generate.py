"""Continue prompts with a trained model, from a folder or the Hub, and report the speed.

Every field of transformers' GenerationConfig is an option by its name. The program continues one prompt at a time and
streams the text to the terminal. With --batch_size it decodes several prompts at once. Without a prompt, each line of
the standard input is one; an empty line ends the program.

Example:
    python scripts/generate.py --model_name_or_path outputs/demo --prompt "In the" --do_sample true --top_p 0.9
    python scripts/generate.py --model_name_or_path outputs/demo --prompt_file prompts.txt --batch_size 8 --num_beams 4
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tnn_scripts.common.errors import report_errors

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed

import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
from tnn_scripts.common.atomic import check_writable, write_json
from tnn_scripts.common.devices import check_device
from tnn_scripts.common.model_path import check_model_path
from tnn_scripts.common.nearest import nearest
from tnn_scripts.common.parser import ProgramParser, check_counts
from tnn_scripts.common.pieces import PieceStreamer
from tnn_scripts.common.terminal import read_lines
from tnn_scripts.data.text import check_file, check_vocabulary


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, dict]:
    """The options of this program, and those of GenerationConfig."""
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompt_file", type=Path, help="Text file with a prompt on each line.")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--trust_remote_code", action="store_true")
    known, rest = parser.parse_known_args(arguments)
    check_model_path(known.model_name_or_path, tokenizer=True)
    if known.prompt_file is not None:
        known.prompt += read_prompts(known.prompt_file)
    check_counts(known, "batch_size")
    return known, generation_options(parser, rest)


def read_prompts(file: Path) -> list[str]:
    """The lines of a text file that are not blank.

    Raises:
        ValueError: the file is missing, empty or not UTF-8.
    """
    check_file(str(file))
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def check_prompts(prompts: list[str], tokenizer):
    """Check that every prompt is text and has tokens, before the first one is continued.

    Raises:
        ValueError: a prompt has no tokens, or has bytes that are not UTF-8.
    """
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # Python reads other bytes of a command line as surrogates
            raise ValueError(f"--prompt must be text in UTF-8, got {prompt!r}") from error
    if empty := [prompt for prompt, ids in zip(prompts, tokenizer(prompts)["input_ids"], strict=True) if not ids]:
        raise ValueError(f"--prompt must have at least one token, got {empty[0]!r}")


def batches(args: argparse.Namespace, tokenizer) -> Iterator[list[str]]:
    """The prompts that were given, `--batch_size` at a time, or the lines of the standard input.

    Raises:
        ValueError: a prompt has no tokens, or there is none.
    """
    if args.prompt:
        check_prompts(args.prompt, tokenizer)
    for first in range(0, len(args.prompt), args.batch_size):
        yield args.prompt[first : first + args.batch_size]
    if args.prompt:
        return
    count = 0
    for line in read_lines():
        count += 1
        yield [line]
    if not count and not sys.stdin.isatty():
        raise ValueError("--prompt, --prompt_file or a line on the standard input must be given")


# Fields of GenerationConfig after which `generate` returns something else than tokens, or is part of another one.
OTHER_OUTPUTS = ("return_dict_in_generate", "is_assistant")
# Fields that need the tokenizer.
READ_TEXT = {"stop_strings", "token_healing"}


def generation_options(parser: argparse.ArgumentParser, rest: list[str]) -> dict:
    """The `--name value` pairs for fields of GenerationConfig. A value is read as JSON if it is JSON."""
    fields = GenerationConfig().to_dict()
    options = {}
    rest = [part for word in rest for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for name, value in zip(rest[::2], rest[1::2] + [None] * (len(rest) % 2), strict=True):
        field = name.removeprefix("--")
        if field in OTHER_OUTPUTS:
            parser.error(f"{name} must not be given: this program writes text")
        if not name.startswith("--") or field not in fields or value is None:
            hint = nearest(field, fields, "--")
            given = f"{name} {value or '(no value)'}"
            parser.error(f"options must be those of this program or GenerationConfig, got {given}{hint}")
        try:
            options[field] = json.loads(value)
        except json.JSONDecodeError:
            options[field] = value
    return options


def continue_batch(model, tokenizer, prompts: list[str], options: dict, stream: bool) -> tuple[list[str], int]:
    """The texts of all sequences of the prompts, and the number of new tokens."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=len(prompts) > 1, return_token_type_ids=False)
    streamer = PieceStreamer(tokenizer) if stream else None
    options = options | ({"tokenizer": tokenizer} if options.keys() & READ_TEXT else {})
    output = model.generate(**inputs.to(model.device), streamer=streamer, **options)
    new = output[:, inputs["input_ids"].shape[1] :]
    count = new.numel() if tokenizer.pad_token_id is None else int((new != tokenizer.pad_token_id).sum())
    return tokenizer.batch_decode(output, skip_special_tokens=True), count


@report_errors
def main():
    args, options = parse_arguments(sys.argv[1:])
    check_device(args.device)
    if args.output_file is not None:
        check_writable(args.output_file)
        if args.output_file.exists() and args.output_file == args.prompt_file:
            raise ValueError(f"--output_file must not be the file with the prompts, got {args.output_file}")
    tokenizer = AutoTokenizer.from_pretrained(
        args.model_name_or_path, padding_side="left", trust_remote_code=args.trust_remote_code
    )
    model = AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path, dtype=args.dtype, trust_remote_code=args.trust_remote_code
    ).to(args.device)
    check_vocabulary(tokenizer, model.config.vocab_size)
    options = options if "max_length" in options else {"max_new_tokens": 100} | options
    stream = args.batch_size == 1 and options.get("num_beams", 1) == 1 and options.get("num_return_sequences", 1) == 1
    set_seed(args.seed)
    prompts, texts, tokens, seconds = [], [], 0, 0.0
    for batch in batches(args, tokenizer):
        start = time.perf_counter()
        written, count = continue_batch(model, tokenizer, batch, options, stream)
        seconds += time.perf_counter() - start
        prompts, texts, tokens = prompts + batch, texts + written, tokens + count
        if not stream:
            sys.stdout.write("\n\n".join(written) + "\n\n")
    if not prompts:
        return
    sys.stdout.write(f"\n{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens per second\n")
    if args.output_file is not None:
        result = {"model": args.model_name_or_path, "prompts": prompts, "texts": texts, "options": options}
        speed = {"new_tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        speed |= {"device": args.device, "torch_threads": torch.get_num_threads()}
        write_json(args.output_file, result | speed)


if __name__ == "__main__":
    main()
