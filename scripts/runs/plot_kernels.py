"""Draw the kernels of every layer: PNG files and one page."""

import argparse
import base64
import html
import sys
from pathlib import Path

from matplotlib.figure import Figure
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification
from transformers.utils import logging

from modeling_tnn import TnnForImageClassification
from tnn_scripts.common.atomic import saving_errors, write_json, write_text
from tnn_scripts.common.loading import load
from tnn_scripts.plotting import figures as kernel_figures
from tnn_scripts.plotting.reading import LONGEST, read_model

STYLE = """body { font-family: sans-serif; max-width: 1400px; margin: 2em auto; padding: 0 1em; color: #222; }
img { max-width: 100%; } table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: 0.3em 0.8em; border-bottom: 1px solid #ccc; text-align: right; }
td:first-child { text-align: left; }"""
COLUMNS = {
    "channels": "channels",
    "horizon_median": "horizon, median",
    "horizon_10_percent": "10th percentile",
    "horizon_90_percent": "90th percentile",
    "main_range": "most weight at",
    "main_range_share": "its share",
    "largest_pole": "largest pole",
}


def write_page(path: Path, title: str, note: str, rows: list[dict], pictures: dict[str, list[Path]]):
    """Write the HTML page. `pictures` has the files of each section by its heading."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("layer", *COLUMNS.values()))
    body = "".join(f"<tr><td>{html.escape(row['label'])}</td>{cells(row)}</tr>" for row in rows)
    sections = "".join(
        f"<h2>{html.escape(heading)}</h2>" + "".join(embed(file) for file in files)
        for heading, files in pictures.items()
    )
    write_text(
        path,
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1><p>{html.escape(note)}</p>"
        f"<table><tr>{head}</tr>{body}</table>{sections}</body></html>\n",
    )


def cells(row: dict) -> str:
    texts = {"main_range_share": "{:.0%}", "largest_pole": "{:.4f}", "main_range": "{}"}
    signs = dict.fromkeys(row["lower_bounds"], "\N{GREATER-THAN OR EQUAL TO} ")
    shown = {key: texts.get(key, "{:.0f}").format(row[key]) for key in COLUMNS if row[key] is not None}
    values = (signs.get(key, "") + shown.get(key, "") for key in COLUMNS)
    return "".join(f"<td>{html.escape(value)}</td>" for value in values)


def embed(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<img alt="{html.escape(file.stem)}" src="data:image/png;base64,{data}">'


def save(figure: Figure, path: Path, dpi: int) -> Path:
    with saving_errors(path, path):
        figure.savefig(path, dpi=dpi)
    return path


def describe(config, length: int, rows: list[dict]) -> str:
    side = "causal" if config.causal else "bidirectional"
    text = f"tno_type={config.tno_type}, {side}, {config.num_hidden_layers} layers, {config.gtu_dim} channels each; "
    text += f"kernels drawn at {length} positions (trained at {config.axis_length}). "
    text += "The weight of a lag is the absolute value of its coefficient over the sum of those of its channel, at "
    text += "all lags, drawn or not."
    if any(row["lower_bounds"] for row in rows):
        text += f" \N{GREATER-THAN OR EQUAL TO} marks lower bounds: such kernels go on after {LONGEST:,} positions, "
        text += "and the pictures show shares of what is drawn of them."
    if config.tno_type == "ski":
        text += " The low-rank part of ski is shown by the kernel that it interpolates."
    return text


def run(args: argparse.Namespace):
    """Read the kernels, draw them, and report their horizons."""
    logging.set_verbosity_error()  # the heads of a checkpoint are not needed here
    config = load(AutoConfig, args.model_name_or_path)
    if config.model_type != "tnn":
        raise ValueError(f"--model_name_or_path must be a TNN, got {args.model_name_or_path} of {config.model_type}")
    images = TnnForImageClassification.__name__ in (config.architectures or [])  # AutoModel would load a text model
    model = load(AutoModelForImageClassification if images else AutoModel, args.model_name_or_path).base_model
    length = args.length or model.config.axis_length
    kernels, rows = read_model(model, length)
    title = f"What the layers of {Path(args.model_name_or_path).name} attend to"
    size = min(args.matrix_size, length)
    pictures = {
        "All layers": [save(kernel_figures.overview(kernels, title), args.output_dir / "overview.png", args.dpi)]
    }
    for kernel in kernels:
        name = kernel.label.replace(" ", "-")
        pictures[kernel.label.capitalize()] = [
            save(kernel_figures.layer(kernel, size), args.output_dir / f"{name}.png", args.dpi),
            save(kernel_figures.matrices(kernel, size), args.output_dir / f"{name}-matrices.png", args.dpi),
        ]
    write_page(args.output_dir / "index.html", title, describe(model.config, length, rows), rows, pictures)
    figures = {"model": args.model_name_or_path, "tno_type": model.config.tno_type, "length": length, "layers": rows}
    write_json(args.output_dir / "kernels.json", figures)
    for row in rows:
        horizon = f"{'>= ' if 'horizon_median' in row['lower_bounds'] else ''}{row['horizon_median']:.0f}"
        sys.stdout.write(
            f"{row['label']}: horizon {horizon} positions (median of {row['channels']} channels), "
            f"most weight at {row['main_range']} ({row['main_range_share']:.0%})\n"
        )
    sys.stdout.write(f"{sum(map(len, pictures.values()))} pictures and index.html in {args.output_dir}\n")
