"""Continue prompts, one at a time or in batches, and report the speed."""

import argparse
import copy
import sys
import time
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.generation import GenerationMode

import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
from tnn_scripts.common.atomic import write_json
from tnn_scripts.common.devices import check_device
from tnn_scripts.common.loading import check_writing, load, require_padding
from tnn_scripts.common.pieces import PieceStreamer
from tnn_scripts.common.sampling import with_sampling
from tnn_scripts.common.terminal import check_text, read_lines
from tnn_scripts.data.vocabulary import check_vocabulary

# Fields that need the tokenizer.
READ_TEXT = {"stop_strings", "token_healing"}


def check_prompts(prompts: list[str], tokenizer):
    """Check that every prompt is text and has tokens, before the first one is continued.

    Raises:
        ValueError: a prompt has no tokens, or has bytes that are not UTF-8.
    """
    for prompt in prompts:
        check_text("--prompt", prompt)
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


def continue_batch(model, tokenizer, prompts: list[str], options: dict, stream: bool) -> tuple[list[str], int]:
    """The texts of all sequences of the prompts, and the number of new tokens."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=len(prompts) > 1, return_token_type_ids=False)
    streamer = PieceStreamer(tokenizer) if stream else None
    options = options | ({"tokenizer": tokenizer} if options.keys() & READ_TEXT else {})
    output = model.generate(**inputs.to(model.device), streamer=streamer, **options)
    new = output[:, inputs["input_ids"].shape[1] :]
    count = new.numel() if tokenizer.pad_token_id is None else int((new != tokenizer.pad_token_id).sum())
    return tokenizer.batch_decode(output, skip_special_tokens=True), count


def run(args: argparse.Namespace, options: dict):
    """Continue all prompts and write the texts.

    Raises:
        ValueError: the model, the device or a prompt is wrong.
    """
    device = check_device(args.device)
    tokenizer = load(
        AutoTokenizer, args.model_name_or_path, padding_side="left", trust_remote_code=args.trust_remote_code
    )
    model = load(
        AutoModelForCausalLM, args.model_name_or_path, dtype=args.dtype, trust_remote_code=args.trust_remote_code
    ).to(device)
    check_writing(model, args.model_name_or_path)
    if args.batch_size > 1:
        require_padding(tokenizer, "--batch_size")
    check_vocabulary(tokenizer, model.config.vocab_size)
    options = options if "max_length" in options else {"max_new_tokens": 100} | options
    asked = copy.deepcopy(model.generation_config)
    asked.update(**(options | {"do_sample": None}))
    used = with_sampling(options, is_plain=asked.get_generation_mode() == GenerationMode.GREEDY_SEARCH)
    stream = args.batch_size == 1 and options.get("num_beams", 1) == 1 and options.get("num_return_sequences", 1) == 1
    set_seed(args.seed)
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
        speed |= {"device": device, "torch_threads": torch.get_num_threads()}
        write_json(args.output_file, result | speed)
