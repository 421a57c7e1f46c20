"""Continue prompts with a trained model, from a folder or the Hub, and say how fast it was.

Every option of transformers' GenerationConfig can be given by its name. One prompt at a time streams to the terminal;
--batch_size decodes several at once. Without a prompt, the lines of the standard input are prompts: on a terminal,
write one after the other, and an empty line to end.

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
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer, set_seed

import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
from tnn_scripts.common.atomic import check_writable, write_json
from tnn_scripts.common.devices import check_device
from tnn_scripts.common.nearest import nearest
from tnn_scripts.common.parser import ProgramParser
from tnn_scripts.common.terminal import read_lines
from tnn_scripts.data.text import check_file, check_vocabulary


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, dict]:
    """Our own options, and those of GenerationConfig."""
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompt_file", type=Path, help="a text file with a prompt on each line")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_file", type=Path)
    parser.add_argument("--trust_remote_code", action="store_true")
    known, rest = parser.parse_known_args(arguments)
    if known.prompt_file is not None:
        known.prompt += read_prompts(known.prompt_file)
    if known.batch_size < 1:
        parser.error(f"--batch_size {known.batch_size}: it must be at least 1")
    return known, generation_options(parser, rest)


def read_prompts(file: Path) -> list[str]:
    """The lines of a text file that are not blank.

    Raises:
        ValueError: it is missing or empty, or no text in UTF-8.
    """
    check_file(str(file))
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def check_prompts(prompts: list[str], tokenizer):
    """Refuse what cannot be continued, before the first is.

    Raises:
        ValueError: a prompt has no tokens.
    """
    if empty := [prompt for prompt, ids in zip(prompts, tokenizer(prompts)["input_ids"], strict=True) if not ids]:
        raise ValueError(f"--prompt {empty[0]!r} is empty: give a text to continue.")


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
        raise ValueError("give a --prompt, a --prompt_file, or a line on the standard input.")


def generation_options(parser: argparse.ArgumentParser, rest: list[str]) -> dict:
    """`--name value` pairs that are fields of GenerationConfig; values are read as JSON where they are JSON."""
    fields = GenerationConfig().to_dict()
    options = {}
    for name, value in zip(rest[::2], rest[1::2] + [None] * (len(rest) % 2), strict=True):
        field = name.removeprefix("--")
        if not name.startswith("--") or field not in fields or value is None:
            hint = nearest(field, fields, "--")
            parser.error(f"{name} {value or '(no value)'} is no option of this program or of GenerationConfig{hint}")
        try:
            options[field] = json.loads(value)
        except json.JSONDecodeError:
            options[field] = value
    return options


def continue_batch(model, tokenizer, prompts: list[str], options: dict, stream: bool) -> tuple[list[str], int]:
    """The texts (all sequences of each prompt), and the number of new tokens."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=len(prompts) > 1, return_token_type_ids=False)
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if stream else None
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
            raise ValueError(f"--output_file {args.output_file} is the file with the prompts: give another one.")
    tokenizer = AutoTokenizer.from_pretrained(
        args.model_name_or_path, padding_side="left", trust_remote_code=args.trust_remote_code
    )
    model = AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path, dtype=args.dtype, trust_remote_code=args.trust_remote_code
    ).to(args.device)
    check_vocabulary(tokenizer, model.config.vocab_size)
    options = {"max_new_tokens": 100} | options
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
