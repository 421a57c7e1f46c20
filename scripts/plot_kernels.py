"""Draw the kernels of every layer of a trained model: PNG files, and an HTML page beside them.

The page has an overview of all layers and, for each layer, its Toeplitz matrices, coefficients by lag, frequency
response, horizon (the distance within which 90% of the weight is) and the poles of a recurrence. The numbers are in
kernels.json, of the whole kernel whatever --length is drawn. A kernel that has not decayed within 32,768 positions has
a lower bound in place of a horizon.

Example:
    python scripts/plot_kernels.py --model_name_or_path outputs/demo --output_dir outputs/kernels
    python scripts/plot_kernels.py --model_name_or_path outputs/demo-modal --output_dir outputs/kernels --length 1024
"""

import argparse
import html
import sys
from pathlib import Path

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.atomic import claim, saving_errors, write_json, write_text
from tnn_programs.cli.model_path import check_model_path
from tnn_programs.cli.parser import ProgramParser

# Figures of a layer -> title and format of their column.
COLUMNS = {
    "channels": ("channels", "{:.0f}"),
    "horizon_median": ("horizon, median", "{:.0f}"),
    "horizon_10_percent": ("10th percentile", "{:.0f}"),
    "horizon_90_percent": ("90th percentile", "{:.0f}"),
    "main_range": ("most weight at", "{}"),
    "main_range_share": ("its share", "{:.0%}"),
    "largest_pole": ("largest pole", "{:.4f}"),
}
BOUND = "\N{GREATER-THAN OR EQUAL TO} "


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--length", type=int)
    parser.add_argument("--matrix_size", type=int, default=64, help="Rows and columns of the matrices that are drawn.")
    parser.add_argument("--dpi", type=int, default=100, help="Resolution of the pictures.")
    args = parser.parse_args()
    check_model_path(args.model_name_or_path)
    for name in ("length", "matrix_size", "dpi"):
        if (value := getattr(args, name)) is not None and value < 2:
            parser.error(f"--{name} must be at least 2, got {value}")
    return args


def page(title: str, note: str, rows: list[dict], pictures: dict[str, list[Path]]) -> str:
    """The HTML page. `pictures` has the files of each section by its heading."""
    from tabulate import tabulate

    head = ("layer", *(name for name, _ in COLUMNS.values()))
    table = tabulate(list(map(cells, rows)), head, "html", disable_numparse=True)
    sections = ""
    for name, files in pictures.items():
        sections += f"<h2>{name}</h2>" + "".join(f'<img alt="{file.stem}" src="{file.name}">' for file in files)
    title, note = html.escape(title), html.escape(note)
    head = f'<meta charset="utf-8"><title>{title}</title>'
    return f"<!DOCTYPE html>\n{head}<h1>{title}</h1><p>{note}</p>{table}{sections}\n"


def cells(row: dict) -> list[str]:
    shown = {key: "" if row[key] is None else form.format(row[key]) for key, (_, form) in COLUMNS.items()}
    return [row["label"], *(BOUND * (key in row["lower_bounds"]) + text for key, text in shown.items())]


def describe(config, length: int, rows: list[dict]) -> str:
    side = "causal" if config.causal else "bidirectional"
    lines = [
        f"tno_type={', '.join(config.tno_types)}, {side}, {config.num_hidden_layers} layers, {config.gtu_dim} "
        f"channels each; kernels drawn at {length} positions (trained at {config.axis_length}).",
        "The weight of a lag is the absolute value of its coefficient over the sum of those of its channel, at all "
        "lags, drawn or not.",
    ]
    if any(row["lower_bounds"] for row in rows):
        lines.append(f"{BOUND}marks lower bounds: such kernels go on after 32,768 positions.")
    if "ski" in config.tno_types:
        lines.append("The low-rank part of ski is shown by the kernel that it interpolates.")
    return " ".join(lines)


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
    (kernels, rows), size = read_model(model, length), min(args.matrix_size, length)
    title = f"What the layers of {Path(args.model_name_or_path).name} attend to"
    drawn = {"All layers": {"overview": figures.overview(kernels, title)}}
    for kernel in kernels:
        name = kernel.label.replace(" ", "-")
        of_layer = {name: figures.layer(kernel, size), f"{name}-matrices": figures.matrices(kernel, size)}
        drawn[kernel.label.capitalize()] = of_layer
    pictures = {}
    for heading, named in drawn.items():
        pictures[heading] = [args.output_dir / f"{name}.png" for name in named]
        for path, figure in zip(pictures[heading], named.values(), strict=True):
            with saving_errors(path, path):
                figure.savefig(path, dpi=args.dpi)
    write_text(args.output_dir / "index.html", page(title, describe(model.config, length, rows), rows, pictures))
    content = {"model": args.model_name_or_path, "tno_type": ", ".join(model.config.tno_types)}
    content |= {"length": length, "layers": rows}
    write_json(args.output_dir / "kernels.json", content)
    for row in rows:
        horizon = f"{'>= ' if 'horizon_median' in row['lower_bounds'] else ''}{row['horizon_median']:.0f}"
        sys.stdout.write(
            f"{row['label']}: horizon {horizon} positions (median of {row['channels']} channels), "
            f"most weight at {row['main_range']} ({row['main_range_share']:.0%})\n"
        )
    sys.stdout.write(f"{sum(map(len, pictures.values()))} pictures and index.html in {args.output_dir}\n")


@report_errors
def main():
    args = parse_arguments()
    with claim(args.output_dir):
        run(args)


if __name__ == "__main__":
    main()
