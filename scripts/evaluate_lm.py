"""Measure perplexity and bits per byte of language models on a text, by the length of the rows they read.

Every length scores the same tokens, all but the first, given the tokens before them in their row. With
--stride S, rows begin every S tokens, and only their last S tokens are scored. Rows longer than --tokens_per_pass are
read in parts with a cache. Bits per byte count the bytes of the scored tokens; their 95% intervals are over the
documents of the text. The loss by the number of tokens before a token, at the largest length, shows whether a model
uses its context.

Masked language models (--objective mlm) are scored on hidden tokens, the same ones at every length.

--config_overrides changes fields of the models as they are loaded, such as fd_resolution for a finer grid.

Example:
    python scripts/evaluate_lm.py --model_name_or_path outputs/wikitext2 --dataset_name Salesforce/wikitext \\
        --dataset_config_name wikitext-2-v1 --lengths 512 1024 2048 4096 14336 --output_dir outputs/lengths
    python scripts/evaluate_lm.py --model_name_or_path outputs/a outputs/b --validation_file book.txt --stride 256 \\
        --output_dir outputs/lengths
    python scripts/evaluate_lm.py --objective mlm --model_name_or_path outputs/masked --validation_file book.txt \\
        --lengths 128 512 2048 --output_dir outputs/masked-lengths
"""

import argparse
from pathlib import Path

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.model_path import check_model_path
from tnn_scripts.common.parser import ProgramParser, check_counts
from tnn_scripts.data.files import check_file, check_source


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True, nargs="+")
    parser.add_argument("--objective", choices=("clm", "mlm"), default="clm")
    parser.add_argument("--mlm_probability", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config_overrides")
    parser.add_argument("--validation_file")
    parser.add_argument("--dataset_name")
    parser.add_argument("--dataset_config_name")
    parser.add_argument("--split", default="test", help="Split of the data set.")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--documents")
    lengths = [512, 1024, 2048, 4096, 8192, 14336]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--stride", type=int, help="Also evaluate with rows that begin every so many tokens.")
    parser.add_argument("--max_tokens", type=int, help="Read only the first so many tokens of the text.")
    parser.add_argument("--tokens_per_pass", type=int, default=4096, help="Tokens in a forward pass; limits memory.")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--trust_remote_code", action="store_true")
    args = parser.parse_args()
    for name in args.model_name_or_path:
        check_model_path(name, tokenizer=True)
    if (args.validation_file is None) == (args.dataset_name is None):
        parser.error("either --validation_file or --dataset_name must be given, and not both")
    if min(args.lengths) < 2:
        parser.error(f"--lengths must be at least 2, got {min(args.lengths)}")
    if args.objective == "mlm" and args.stride is not None:
        parser.error(f"--stride must not be given with --objective mlm, whose rows do not overlap, got {args.stride}")
    if not 0 < args.mlm_probability < 1:
        parser.error(f"--mlm_probability must be in (0, 1), got {args.mlm_probability}")
    check_counts(args, "tokens_per_pass", "max_tokens")
    if args.stride is not None and not 1 <= args.stride < min(args.lengths):
        parser.error(f"--stride must be at least 1 and below the smallest of --lengths, got {args.stride}")
    if args.validation_file is not None:
        check_file(args.validation_file)
    else:
        check_source(args.dataset_name)
    return args


@report_errors
def main():
    args = parse_arguments()
    with importing("training"):
        from tnn_scripts.runs.evaluate_lm import run
    run(args)


if __name__ == "__main__":
    main()
