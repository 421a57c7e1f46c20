"""Draw the kernels of every layer of a trained model: PNG files and one self-contained HTML page.

The page has an overview of all layers and, for each layer, its Toeplitz matrices, coefficients by lag, frequency
response, horizon (the distance within which 90% of the weight is) and the poles of a recurrence. The numbers are in
kernels.json, of the whole kernel whatever --length is drawn. A kernel that has not decayed within 32,768 positions has
a lower bound in place of a horizon.

Example:
    python scripts/plot_kernels.py --model_name_or_path outputs/demo --output_dir outputs/kernels
    python scripts/plot_kernels.py --model_name_or_path outputs/demo-modal --output_dir outputs/kernels --length 1024
"""

import argparse
import sys
from pathlib import Path

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.atomic import claim
from tnn_scripts.common.model_path import check_model_path
from tnn_scripts.common.parser import ProgramParser


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--length", type=int)
    parser.add_argument("--matrix_size", type=int, default=64, help="Rows and columns of the matrices that are drawn.")
    parser.add_argument("--dpi", type=int, default=100, help="Resolution of the pictures.")
    args = parser.parse_args(arguments)
    check_model_path(args.model_name_or_path)
    for name in ("length", "matrix_size", "dpi"):
        if (value := getattr(args, name)) is not None and value < 2:
            parser.error(f"--{name} must be at least 2, got {value}")
    return args


@report_errors
def main():
    args = parse_arguments(sys.argv[1:])
    with importing("scripts"):
        from tnn_scripts.runs.plot_kernels import run
    with claim(args.output_dir):
        run(args)


if __name__ == "__main__":
    main()
