"""The pictures of the suites: the main figure by length, with a line for each variant."""

from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, ScalarFormatter

matplotlib.use("Agg")

# For each suite: x, series, y, and the labels of the axes.
AXES = {
    "training": ("length", "way", "tokens_per_second", "sequence length", "tokens per second in training"),
    "memory": ("length", "way", "peak_mebibytes", "sequence length", "peak of a training step, MiB"),
    "generation": ("context", "model", "ms_per_token", "tokens seen before", "ms per new token"),
    "state_size": ("state_size", "way", "milliseconds", "state size", "forward and backward, ms"),
    "long_range": ("length", "way", "steps_per_second", "sequence length", "training steps per second"),
    "mixing": ("length", "way", "milliseconds", "sequence length", "forward and backward, ms"),
    "products": ("length", "way", "milliseconds", "sequence length", "forward and backward, ms"),
    "decoding": ("context", "way", "microseconds_per_token", "tokens seen before", "µs per token"),
    "streaming": ("tokens", "way", "microseconds_per_token", "tokens streamed", "µs per token"),
}


def plot(suite: str, rows: list[dict], path: Path):
    """Write the picture of a suite's rows as PNG."""
    x, series, y, x_label, y_label = AXES[suite]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in dict.fromkeys(row[series] for row in rows):
        points = sorted((row[x], row[y]) for row in rows if row[series] == name)
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="linear" if suite == "streaming" else "log", xlabel=x_label, ylabel=y_label)
    if suite == "streaming":
        axes.set_ylim(bottom=0)
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set_xticks(sorted({row[x] for row in rows}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
