"""Continue prompts with a trained model, from a folder or the Hub, and report the speed.

Every field of transformers' GenerationConfig is an option by its name. The program continues one prompt at a time and
streams the text to the terminal. With --batch_size it decodes several prompts at once. Without a prompt, each line of
the standard input is one; an empty line ends the program.

Texts are sampled, with temperature 1 and top_p 0.95 unless given. `--do_sample false` writes the likeliest tokens, as
does `--temperature 0`, and `--num_beams` searches.

Example:
    python scripts/generate.py --model_name_or_path outputs/demo --prompt "In the" --temperature 0.7
    python scripts/generate.py --model_name_or_path outputs/demo --prompt_file prompts.txt --batch_size 8 --num_beams 4
"""

import argparse
import sys
from pathlib import Path

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.atomic import check_writable
from tnn_scripts.common.declared import generation_fields
from tnn_scripts.common.generation_fields import read_value
from tnn_scripts.common.model_path import check_model_path
from tnn_scripts.common.nearest import nearest
from tnn_scripts.common.parser import ProgramParser, check_counts
from tnn_scripts.common.sampling import check_sampling
from tnn_scripts.common.terminal import check_text
from tnn_scripts.data.files import read_lines_of

# Fields of GenerationConfig after which `generate` returns something else than tokens, or is part of another one.
OTHER_OUTPUTS = ("return_dict_in_generate", "is_assistant")


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, dict]:
    """The options of this program, and those of GenerationConfig."""
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--prompt_file", type=Path, help="Text file with a prompt on each line.")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
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
    return [line for line in read_lines_of(str(file)) if line.strip()]


def generation_options(parser: argparse.ArgumentParser, rest: list[str]) -> dict:
    """The `--name value` pairs for fields of GenerationConfig. A value is read as JSON if it is JSON.

    Raises:
        ValueError: a value is of another kind than its field, or contradicts another one.
    """
    fields = generation_fields()
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
        check_text(name, value)
        options[field] = read_value(field, value)
    check_sampling(options)
    return options


@report_errors
def main():
    args, options = parse_arguments(sys.argv[1:])
    if args.output_file is not None:
        check_writable(args.output_file)
        if args.output_file.exists() and args.output_file == args.prompt_file:
            raise ValueError(f"--output_file must not be the file with the prompts, got {args.output_file}")
    with importing():
        from tnn_scripts.runs.generate import run
    run(args, options)


if __name__ == "__main__":
    main()
