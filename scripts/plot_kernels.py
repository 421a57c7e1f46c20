"""Draw the kernels of every layer of a trained model.

overview.png shows all layers. The picture of a layer has its Toeplitz matrix, the coefficients by distance, the
frequency response and the poles of a recurrence. The numbers are in kernels.json, of the whole kernel whatever
--length is drawn: the horizon is the distance within which 90% of the weight is, and the weight of a lag is the
absolute value of its coefficient. A kernel that has not decayed within 32,768 positions has a lower bound in place of
a horizon. The low-rank part of ski is shown by the kernel that it interpolates.

Example:
    python scripts/plot_kernels.py --model_name_or_path outputs/demo --output_dir outputs/kernels
    python scripts/plot_kernels.py --model_name_or_path outputs/demo-modal --output_dir outputs/kernels --length 1024
"""

import argparse
import sys
from pathlib import Path

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.atomic import claim, saving_errors, write_json
from tnn_programs.cli.model_path import check_model_path
from tnn_programs.cli.parser import ProgramParser, check_counts


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--length", type=int)
    args = parser.parse_args()
    check_model_path(args.model_name_or_path)
    check_counts(args, "length", least=2)
    return args


def load_model(name: str):
    """The model without its head."""
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification
    from transformers.utils import logging

    from modeling_tnn import TnnForImageClassification
    from tnn_programs.cli.model_path import load

    logging.set_verbosity_error()  # the heads of a checkpoint are not needed here
    config = load(AutoConfig, name)
    if config.model_type != "tnn":
        raise ValueError(f"--model_name_or_path must be a TNN, got {name} of {config.model_type}")
    images = TnnForImageClassification.__name__ in (config.architectures or [])  # AutoModel would load a text model
    return load(AutoModelForImageClassification if images else AutoModel, name).base_model


def run(args: argparse.Namespace):
    """Read the kernels, draw them, and report their horizons."""
    with importing("scripts"):
        from tnn_programs.plotting import figures
        from tnn_programs.plotting.reading import read_model

    model = load_model(args.model_name_or_path)
    length = args.length or model.config.axis_length
    kernels, rows = read_model(model, length)
    with saving_errors(args.output_dir):
        title = f"What the layers of {Path(args.model_name_or_path).name} attend to"
        pictures = figures.save_all(kernels, title, args.output_dir)
    content = {"model": args.model_name_or_path, "tno_type": ", ".join(model.config.tno_types)}
    write_json(args.output_dir / "kernels.json", content | {"length": length, "layers": rows})
    for row in rows:
        horizon = f"{'>= ' if 'horizon_median' in row['lower_bounds'] else ''}{row['horizon_median']:.0f}"
        sys.stdout.write(
            f"{row['label']}: horizon {horizon} positions (median of {row['channels']} channels), "
            f"most weight at {row['main_range']} ({row['main_range_share']:.0%})\n"
        )
    sys.stdout.write(f"{len(pictures)} pictures and kernels.json in {args.output_dir}\n")


@report_errors
def main():
    args = parse_arguments()
    with claim(args.output_dir):
        run(args)


if __name__ == "__main__":
    main()
