"""Draw the pictures of the pages: a kernel, its matrix, a circulant one, the gated unit, the files of the package, the
folders of both packages, how the kernels of FD fall, the stable denominators of RTF, time and memory by state size, of
classifiers by length, of a training step on a GPU and of long rows, how small language models learn, mixers by task,
and a forecast.

Example:
    python docs/research/draw.py
"""

import ast
import json
from collections import Counter
from importlib.util import resolve_name
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle
from matplotlib.ticker import ScalarFormatter
from page_tables import FIGURES, load
from theory import FD_ACTS, FD_INPUTS, fd_envelope, initial_denominators

from modeling_tnn import dense_toeplitz

PACKAGE = Path(__file__).parents[2] / "modeling_tnn"
PICTURES = Path(__file__).parents[1] / "pictures"
COLORS = matplotlib.colormaps["RdBu_r"]
SIZE = 12  # rows of the matrices
SMALL_CAUSAL = {
    "rpe": "RPE, the papers' start, 2e-3",
    "learned": "RPE, learned decays, 2e-3",
    "fd": "FD, 2e-3",
    "rtf": "RTF, 2e-3",
    "alibi": "ALiBi, 1e-3",
    "rotary": "rotary, 1e-3",
}
SMALL_CAUSAL_LONGER = {"rpe": "RPE, 4e-3", "slower": "RPE, 2e-3", "rotary": "rotary, 1e-3"}
LEARNED_DECAY = {
    "rpe": "RPE, the papers' start",
    "learned": "RPE, learned decays",
    "fd": "FD",
    "explicit": "free coefficients",
}
SMALL_MASKED = {
    "rpe": "RPE, the papers' start, 2e-3",
    "learned": "RPE, learned decays, 2e-3",
    "fd": "FD, 2e-3",
    "ski": "SKI, the released start, 4e-3",
    "ski_local": "SKI, local start, 2e-3",
    "rtf": "RTF, 2e-3",
    "rotary": "rotary positions, 2e-3",
}
# Task -> its title, the trained length, and a longer one.
MIXER_TASKS = {
    "recall": ("recall, % right", 64, 256),
    "selective": ("selective copying, % right", 64, 256),
    "passkey": ("passkey, % right", 64, 256),
    "delay": ("delay, % right", 64, 256),
    "text": ("WikiText-2, bits per byte\n(lower is better)", 512, 2048),
}
# Corners (a1, a2) of the stable denominators of order 2, and of Montel's region.
TRIANGLE = [(-2, 1), (2, 1), (0, -1)]
SQUARE = [(-1, 0), (0, 1), (1, 0), (0, -1)]


def kernel() -> torch.Tensor:
    """Coefficients at the lags -11 .. 11, `(1, 23)`: a decaying wave, weaker to the right of the diagonal."""
    lags = torch.arange(1 - SIZE, SIZE)
    side = torch.where(lags < 0, 0.6, 1.0)
    return (side * 0.8 ** lags.abs() * torch.cos(0.9 * lags))[None]


def save(figure, name: str):
    figure.savefig(PICTURES / f"{name}.png", dpi=110, facecolor="white")
    pyplot.close(figure)


def draw_matrix():
    taps = kernel()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(3, 2))
    lags = np.arange(1 - SIZE, SIZE)
    left.bar(lags, taps[0], color=COLORS(0.5 + taps[0].numpy() / 2), edgecolor="gray", linewidth=0.5)
    left.axhline(0, color="gray", linewidth=0.8)
    left.set(xlabel="lag i - j", ylabel="coefficient", title="the kernel: one number for each lag")
    right.imshow(dense_toeplitz(taps)[0], cmap=COLORS, vmin=-1, vmax=1)
    right.set(xlabel="position j", ylabel="position i", title="its matrix: constant diagonals")
    save(figure, "concept-matrix")


def draw_circulant():
    taps, n = kernel()[0].numpy(), SIZE
    column = np.concatenate([taps[n - 1 :], [0], taps[: n - 1]])  # (2n,): lags 0 .. n-1, none, -(n-1) .. -1
    matrix = np.stack([np.roll(column, shift) for shift in range(2 * n)], axis=1)
    figure, axes = pyplot.subplots(figsize=(4.6, 4.6), layout="constrained")
    axes.imshow(matrix, cmap=COLORS, vmin=-1, vmax=1)
    axes.add_patch(Rectangle((-0.5, -0.5), n, n, fill=False, edgecolor="black", linewidth=2.5))
    axes.set_title(f"a circulant matrix of {2 * n} rows;\nthe Toeplitz matrix of {n} rows is its corner", fontsize=11)
    axes.set(xticks=[], yticks=[])
    save(figure, "concept-circulant")


def draw_gate():
    """From left to right: the input, two projections, the operator on one of them, their product, the output."""
    boxes = {
        "x": (0.0, 1.0, "x"),
        "u": (1.7, 1.8, "linear,\nSiLU"),
        "v": (1.7, 0.2, "linear,\nSiLU"),
        "T": (3.6, 0.2, "Toeplitz\noperator"),
        "product": (5.5, 1.0, "product"),
        "out": (7.2, 1.0, "linear"),
    }
    figure, axes = pyplot.subplots(figsize=(8.5, 2.8), layout="constrained")
    width, height = 1.15, 0.75
    for name, (x, y, label) in boxes.items():
        color = "#c6dbef" if name == "T" else "#f0f0f0"
        style = "round,pad=0.02,rounding_size=0.08"
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor="black"))
        axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=11)
    for start, end in (("x", "u"), ("x", "v"), ("v", "T"), ("u", "product"), ("T", "product"), ("product", "out")):
        (x, y, _), (to_x, to_y, _) = boxes[start], boxes[end]
        ends = (x + width, y + height / 2), (to_x, to_y + height / 2)
        axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=14, shrinkA=2, shrinkB=2))
    axes.text(3.0, 2.75, "the gate: each position for itself", fontsize=10, color="dimgray")
    axes.text(1.75, -0.15, "the mixer: positions exchange information", fontsize=10, color="dimgray")
    axes.set(xlim=(-0.1, 8.5), ylim=(-0.3, 3.0))
    axes.axis("off")
    save(figure, "concept-gate")


def imports() -> dict[str, set[str]]:
    """The flat files of the package, and those that each of them imports."""
    found = {}
    for path in sorted(PACKAGE.glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        if path.stem != "__init__":
            found[path.stem] = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level}
    return found


def floor_of(name: str, imported: dict[str, set[str]]) -> int:
    return 1 + max((floor_of(below, imported) for below in imported[name]), default=-1)


def draw_architecture():
    """A row for each floor, the lowest at the bottom; a line from each file to those that it imports."""
    imported = imports()
    floors: dict[int, list[str]] = {}
    for name in imported:
        floors.setdefault(floor_of(name, imported), []).append(name)
    places = {}
    for floor, names in floors.items():
        edges = np.cumsum([0, *(len(name) + 3 for name in sorted(names))])  # long names have more room
        middles = (edges[:-1] + edges[1:]) / (2 * edges[-1])
        places |= {name: (middle, floor) for name, middle in zip(sorted(names), middles, strict=True)}
    figure, axes = pyplot.subplots(figsize=(11, 8), layout="constrained")
    for name, below in imported.items():
        for other in sorted(below):  # lines that cross are mixed in the order in which they are drawn
            axes.plot(*zip(places[name], places[other], strict=True), color="#9ecae1", linewidth=0.7, zorder=1)
    box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#3182bd"}
    for name, place in places.items():
        axes.text(*place, name, ha="center", va="center", fontsize=9, family="monospace", bbox=box, zorder=2)
    axes.set(xlim=(0, 1), ylim=(-0.5, max(floors) + 0.5))
    axes.axis("off")
    save(figure, "architecture")


# The packages from the ground: a row has folders that do not import each other.
ROWS = [
    ["modeling_tnn"],
    ["kernels", "data"],
    ["compile", "parallel", "tools"],
    ["serving"],
    ["cli", "original", "plotting"],
    ["data", "serving"],
    ["training"],
    ["benchmarks"],
    ["programs"],
]
PROGRAMS = 4  # the first row of the programs


def room_of(module: str) -> tuple[str, int]:
    """The name and the row of the folder that a module stands in; flat files are `modeling_tnn` or `programs`."""
    package, *parts = module.split(".")
    rows = range(PROGRAMS) if package == "modeling_tnn" else range(PROGRAMS, len(ROWS))
    flat = "modeling_tnn" if package == "modeling_tnn" else "programs"
    return next((name, row) for name in (*parts[:1], flat) for row in rows if name in ROWS[row])


def room_imports() -> Counter:
    """The numbers of imports from one folder to another, those inside functions included."""
    found = Counter()
    for package, folder in (("modeling_tnn", PACKAGE), ("tnn_programs", PACKAGE.parent / "scripts")):
        for path in folder.rglob("*.py"):
            module = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and path.parent / path.stem != PACKAGE / "__init__":
                    base = resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
                    name = f"{base}.{node.names[0].name}" if base.count(".") < 1 else base
                    if base.startswith(("modeling_tnn", "tnn_programs")) and room_of(name) != room_of(module):
                        found[room_of(module), room_of(name)] += 1
    return found


def draw_packages():
    """A box for each folder, the lowest at the bottom; lines are as thick as imports are many, upward ones red."""
    places = {
        (name, row): ((i + 1) / (len(names) + 1), row)
        for row, names in enumerate(ROWS)
        for i, name in enumerate(names)
    }
    figure, axes = pyplot.subplots(figsize=(9, 7), layout="constrained")
    for (start, end), number in room_imports().items():
        color = "#9ecae1" if start[1] > end[1] else "#de2d26"
        axes.plot(*zip(places[start], places[end], strict=True), color=color, linewidth=0.5 + number / 12, zorder=1)
    for (name, row), place in places.items():
        edge = "#3182bd" if row < PROGRAMS else "#e6550d"
        box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": edge}
        axes.text(*place, name, ha="center", va="center", fontsize=11, family="monospace", bbox=box, zorder=2)
    axes.axhline(PROGRAMS - 0.5, color="gray", linewidth=0.8, linestyle="dashed")
    for row, name in ((PROGRAMS - 0.4, "tnn_programs"), (PROGRAMS - 0.7, "modeling_tnn")):
        axes.text(0.01, row, name, fontsize=10, color="dimgray", family="monospace")
    axes.set(xlim=(0, 1), ylim=(-0.5, len(ROWS) - 0.5))
    axes.axis("off")
    save(figure, "packages")


def draw_decay():
    """The largest tap from each lag on, for both inputs of the encoder (SKI paper, theorems 2 to 4)."""
    lags = [2**power for power in range(12)]
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axes, (fd_input, title) in zip(panels, FD_INPUTS.items(), strict=True):
        for (act, name), marker in zip(FD_ACTS.items(), "osv", strict=True):
            # Below that is rounding, which depends on the machine: the picture does not.
            envelope = np.maximum(fd_envelope(act, fd_input, lags), 1e-12)
            axes.loglog(lags, envelope, marker=marker, markersize=4, label=name)
        axes.loglog(lags[2:], [lag**-2.0 for lag in lags[2:]], color="gray", linestyle="--", label="1 / lag$^2$")
        axes.set(xlabel="lag", title=f"input of the encoder: {title}", ylim=(1e-13, 2))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("tap, over the largest")
    panels[0].legend()
    save(figure, "fd-decay")


def draw_stable_region():
    """Stable denominators of order 2, Montel's region, and where training begins (RTF paper, figure 4)."""
    figure, axes = pyplot.subplots(figsize=(6, 4.4), layout="constrained")
    axes.add_patch(Polygon(TRIANGLE, facecolor="#deebf7", edgecolor="#3182bd", label="stable: poles in the circle"))
    axes.add_patch(Polygon(SQUARE, facecolor="#9ecae1", edgecolor="#08519c", label=r"Montel: $|a_1| + |a_2| \leq 1$"))
    for initializer, color in (("xavier", "#e6550d"), ("montel", "black")):
        points = initial_denominators(initializer, None, channels=300)
        axes.scatter(*points.T, s=5, color=color, label=f"initialised by {initializer!r}")
    axes.set(xlabel="$a_1$", ylabel="$a_2$", xlim=(-2.2, 2.2), ylim=(-1.15, 1.85), aspect="equal")
    axes.legend(fontsize=8, loc="upper center", ncols=2)
    save(figure, "rtf-stable-region")


def draw_state_size():
    """Time and memory of a layer by its state size, from the figures of the page of results."""
    rows = load("state-size-lengths")["rows"]
    lengths = sorted({row["length"] for row in rows})
    figure, panels = pyplot.subplots(2, len(lengths), figsize=(10, 5), sharex=True, sharey="row", layout="constrained")
    for column, length in zip(panels.T, lengths, strict=True):
        for axes, suffix in zip(column, ("", "_kept"), strict=True):
            for way, label in {"rtf": "RTF", "s4d": "S4D", "s4": "S4", "scan": "scan"}.items():
                found = [row for row in rows if row["length"] == length and way + suffix in row]
                axes.plot(*zip(*((row["states"], row[way + suffix]) for row in found), strict=True), "o-", label=label)
            axes.set(xscale="log", yscale="log")
            axes.grid(alpha=0.3)
        column[0].set_title(f"{length:,} steps", fontsize=10)
        column[1].set_xlabel("states")
    panels[0, 0].set_ylabel("forward and backward, ms")
    panels[1, 0].set_ylabel("kept for backward, MiB")
    panels[0, 0].legend(fontsize=9)
    save(figure, "state-size")


def draw_long_range():
    """Training steps per second and memory of classifiers by length (TNN paper, table 5)."""
    rows = [row for row in load("lra-speed")["rows"] if row["model"].startswith("here: ")]
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, key, label in zip(
        panels, ("at", "kept"), ("training steps per second", "kept for backward, MiB"), strict=True
    ):
        for row in rows:
            figures = [row[f"{key}_{length}k"] for length in range(1, 6)]
            axes.plot(range(1, 6), figures, "o-", markersize=4, label=row["model"].removeprefix("here: "))
        axes.set(xlabel="length in units of 1,024 tokens", ylabel=label, xticks=range(1, 6))
        axes.grid(alpha=0.3)
    panels[0].set(yscale="log", yticks=(0.2, 0.5, 1, 2, 5, 10), yticklabels=("0.2", "0.5", "1", "2", "5", "10"))
    panels[1].set_ylim(bottom=0)
    panels[1].legend(fontsize=8)
    save(figure, "lra-lengths")


def draw_bubbles():
    """Speed, accuracy and, as area, memory of the classifiers of Text (TNN figure 1, SKI figure 1a)."""
    figure, axes = pyplot.subplots(figsize=(6.5, 4), layout="constrained")
    for row in load("lra-bubbles")["rows"]:
        mean = np.mean(row["accuracy"])
        points = axes.scatter(row["over_rpe"], mean, s=20 * row["kept"], alpha=0.5)
        axes.vlines(row["over_rpe"], *row["accuracy"], color=points.get_facecolor())
        text = f"{row['model'].split()[0]}\n{row['kept']:.0f} MiB"
        side, aligned = (-22, "right") if text.startswith("RTF") else (22, "left")  # FD is at the right of RTF
        place = {"xytext": (side, 0), "textcoords": "offset points", "ha": aligned, "va": "center"}
        axes.annotate(text, (row["over_rpe"], mean), fontsize=9, **place)
    axes.set(xlabel="training steps per second, over those of TNN", ylabel="accuracy on Text, %", xlim=(0.4, 1.12))
    axes.grid(alpha=0.3)
    save(figure, "lra-bubbles")


def draw_gpu_step():
    """Time of a training step by length on a GPU, beside transformers."""
    bars = [
        ("gpu-targets", None, "TNN (rpe), commit c73b996", "0.8"),
        ("gpu-step", "Llama, compiled", "Llama, compiled", "C2"),
        ("gpu-step", "GPT-2, compiled with its loss, in one CUDA graph", "GPT-2, compiled, CUDA graph", "C1"),
        (
            "gpu-step",
            "TNN as `tnn pretrain` runs it: compiled, in one CUDA graph",
            "TNN (rpe), compiled, CUDA graph",
            "C0",
        ),
    ]
    figure, axes = pyplot.subplots(figsize=(6.5, 3.2), layout="constrained")
    for place, (name, what, label, color) in enumerate(bars):
        rows = load(name)["rows"]
        row = next((row for row in rows if row["what"] == what), None)
        milliseconds = [rows[i]["before"] for i in (0, 1)] if row is None else [row["at_512"], row["at_2048"]]
        drawn = axes.barh([place, place + 5], milliseconds, color=color, label=label)
        axes.bar_label(drawn, fmt="%.1f", fontsize=8, padding=2)
    axes.set(
        xlim=(0, 100),
        xlabel="ms of a step of 16,384 tokens",
        ylabel="positions",
        yticks=(1.5, 6.5),
        yticklabels=("512", "2,048"),
    )
    axes.legend(fontsize=8, reverse=True)
    save(figure, "gpu-step")


def draw_lengths(device: str):
    """Time and memory of a training step and a prefill of one row, by length, if they were measured."""
    if not (FIGURES / f"lengths/{device}.json").exists():
        return
    rows = load(f"lengths/{device}")["rows"]
    labels = {"milliseconds": "ms", "peak_mebibytes": "MiB at most"}
    labels = {key: label for key, label in labels.items() if any(key in row for row in rows)}
    size = {"figsize": (9.5, 3.2 * len(labels)), "sharex": True, "squeeze": False}
    figure, panels = pyplot.subplots(len(labels), 2, **size, layout="constrained")
    for line, (key, label) in zip(panels, labels.items(), strict=True):
        for axes, (kind, title) in zip(line, {"step": "training step", "prefill": "prefill"}.items(), strict=True):
            for way in dict.fromkeys(row["way"] for row in rows):
                found = [row for row in rows if (row["way"], row["pass"]) == (way, kind) and key in row]
                points = [(row["length"], row[key]) for row in found]
                axes.loglog(*zip(*points, strict=True), "o-", markersize=4, label=way) if points else None
            axes.set(ylabel=label, title=title)
            axes.set_xticks(lengths := sorted({row["length"] for row in rows}), [f"{length:,}" for length in lengths])
            axes.minorticks_off()
            axes.tick_params("x", rotation=20)
            axes.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=8)
    save(figure, f"lengths-{device}")


def draw_mixers():
    """A bar for each mixer and task at the trained length, a point at four times the length."""
    rows = load("mixers")["rows"][::-1]
    figure, panels = pyplot.subplots(1, len(MIXER_TASKS), figsize=(13, 4.2), layout="constrained", sharey=True)
    for axes, (key, (title, trained, longer)) in zip(panels, MIXER_TASKS.items(), strict=True):
        bars, points = ([np.mean(row[f"{key}_{length}"]) for row in rows] for length in (trained, longer))
        names = [row["mixer"].replace("`", "") for row in rows]
        axes.barh(names, bars, color="#9ecae1", label=f"at {trained:,} tokens, as trained")
        axes.plot(points, range(len(rows)), "o", color="#08306b", markersize=5, label=f"at {longer:,}")
        axes.set_title(title, fontsize=10)
        axes.grid(axis="x", alpha=0.3)
        axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, -0.28))
        if key == "text":
            axes.set_xlim(left=2)
    save(figure, "mixers")


def plain_numbers(axes):
    """A logarithmic scale of perplexity whose marks are 60 and 200, not powers of ten."""
    axes.set(yscale="log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter())


def draw_small_causal():
    """Learning curves of the small causal models, and their perplexity by length and loss by context."""
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    figures = {"small-causal-curves": "tokens", "small-causal-lengths": "length", "small-causal-context": "first"}
    for axes, (name, key) in zip(panels, figures.items(), strict=True):
        rows = load(name)["rows"]
        for model, label in SMALL_CAUSAL.items():
            axes.plot(*zip(*((row[key], row[model]) for row in rows), strict=True), "o-", markersize=3, label=label)
        axes.grid(alpha=0.3)
    panels[0].set(xlabel="tokens of training, millions", ylabel="validation perplexity")
    plain_numbers(panels[0])
    panels[1].set(xlabel="length of what is read at once", ylabel="test perplexity, WikiText-2", xscale="log")
    panels[2].set(xlabel="tokens before a token, at least", ylabel="its loss in nats, books", xscale="log")
    panels[1].axvline(512, color="gray", linestyle="--", linewidth=1)
    panels[0].legend(fontsize=8)
    save(figure, "small-causal")


def draw_learning_curves(name: str, labels: dict[str, str], perplexity: str = "validation perplexity"):
    """One line for each model of the figures `NAME-curves`."""
    figure, axes = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    rows = load(f"{name}-curves")["rows"]
    for model, label in labels.items():
        axes.plot(*zip(*((row["tokens"], row[model]) for row in rows), strict=True), "o-", markersize=3, label=label)
    axes.set(xlabel="tokens of training, millions", ylabel=perplexity)
    plain_numbers(axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, name)


def draw_forecast():
    """A series, and what a model and the last season say about its end."""
    found = json.loads((FIGURES / "signals/airline.json").read_text(encoding="utf-8"))
    figure, axes = pyplot.subplots(figsize=(7.5, 3.4), layout="constrained")
    years = 1949 + np.arange(len(found["values"])) / 12
    axes.plot(years, found["values"], color="black", linewidth=1, label="airline passengers, thousands")
    for name, label in {"naive": "the last year repeated", "model": "TNN"}.items():
        label = f"{label}: mean error {found[f'error_{name}']:.0f}"
        axes.plot(years[found["first"] :], found[name], linewidth=1.5, label=label)
    axes.axvline(years[found["first"]], color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="year")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    save(figure, "signals-airline")


def main():
    matplotlib.use("Agg")
    draw_forecast()
    draw_small_causal()
    draw_learning_curves("small-masked", SMALL_MASKED, "validation perplexity of hidden tokens")
    draw_learning_curves("small-causal-longer", SMALL_CAUSAL_LONGER)
    draw_learning_curves("learned-decay", LEARNED_DECAY, "perplexity of the training text")
    draw_matrix()
    draw_circulant()
    draw_gate()
    draw_architecture()
    draw_packages()
    draw_decay()
    draw_stable_region()
    draw_state_size()
    draw_long_range()
    draw_bubbles()
    draw_gpu_step()
    draw_lengths("gpu")
    draw_lengths("cpu")
    draw_mixers()


if __name__ == "__main__":
    main()
