"""Convert a causal model to a recurrence of low order, save it, and measure the change on a text.

--fit direct computes poles from the kernels (tno_type="modal"). --fit gradient trains a rational transfer function to
match each kernel (tno_type="rtf"), as the RTF paper distils filters; --fit modal-gradient trains a sum of complex
exponentials (tno_type="s4d"), the baseline of that paper. Both also report the direct fit.

Example:
    python scripts/to_recurrent.py --model_name_or_path outputs/demo --output_dir outputs/modal --dataset_name book.txt
    python scripts/to_recurrent.py --model_name_or_path outputs/demo --output_dir outputs/modal --tolerance 1e-4
    python scripts/to_recurrent.py --model_name_or_path outputs/demo --output_dir outputs/rtf --fit gradient --order 16
"""

import argparse
import sys
from pathlib import Path

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.atomic import check_overwriting, claim
from tnn_scripts.common.declared import declared_keys
from tnn_scripts.common.model_path import check_model_path
from tnn_scripts.common.parser import ProgramParser
from tnn_scripts.data.files import check_source

FITS = declared_keys("tnn_scripts.common.gradient_fit", "FITS")


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--overwrite_output_dir", action="store_true")
    parser.add_argument("--order", type=int, default=64, help="Number of real states per channel.")
    parser.add_argument("--window", type=int, default=16, help="Number of first taps that are kept exactly.")
    parser.add_argument("--tolerance", type=float, help="Use the smallest order with this relative error instead.")
    parser.add_argument("--fit", choices=("direct", *FITS), default="direct", help="Method that finds the poles.")
    parser.add_argument("--steps", type=int, default=2000, help="Steps of the gradient fit, for each layer.")
    parser.add_argument("--learning_rate", type=float, default=0.02)
    parser.add_argument("--dataset_name")
    parser.add_argument("--dataset_config_name")
    parser.add_argument("--documents")
    parser.add_argument("--block_size", type=int)
    parser.add_argument("--rows", type=int, default=8, help="Number of rows of text to measure on.")
    args = parser.parse_args()
    check_model_path(args.model_name_or_path, tokenizer=True)
    if args.fit in FITS and (args.tolerance is not None or args.steps < 1):
        parser.error(
            f"--fit {args.fit} must be given without --tolerance and with --steps of at least 1, got "
            f"--tolerance {args.tolerance} --steps {args.steps}"
        )
    if args.dataset_name is not None:
        check_source(args.dataset_name)
    return args


@report_errors
def main():
    args = parse_arguments()
    with importing("scripts"):
        from tnn_scripts.runs.to_recurrent import run, summary
    with claim(args.output_dir):
        check_overwriting(args.output_dir, args.overwrite_output_dir, args.model_name_or_path)
        result = run(args)
    sys.stdout.write(summary(result) + f"\nsaved in {args.output_dir}\n")


if __name__ == "__main__":
    main()
