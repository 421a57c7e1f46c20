"""Measure where trained kernels are rough, and what a sparse plus low-rank matrix leaves of them (SKI paper).

    near      share of sum_k t_k^2 at the lags |k| <= m
    rough     sum_k (t_k - (t_{k-1} + t_{k+1}) / 2)^2 / sum_k t_k^2, over |k| <= m and over the others
    rank      singular values above 1% of the largest one, of the block of T around the diagonal and of the block that
              is farthest from it, n / 4 positions each
    left      ||T - W A W^T|| / ||T||, and the same with a sparse matrix of the lags |k| <= m beside W A W^T, whose
              kernel is then a straight line between the lags -m and m

n positions, m = 8 lags, points of W at every h-th position, h = 8. All are medians over the channels of a layer.

Example:
    python docs/research/kernel_shapes.py outputs/wikitext2-masked --output_file kernel-shapes.json
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from theory import Interpolated
from transformers import AutoConfig, AutoModel

import modeling_tnn  # noqa: F401  (registers the models)
from modeling_tnn import dense_toeplitz
from tnn_programs.benchmarks.measure import markdown
from tnn_programs.cli.atomic import write_json

LENGTH, NEAR, STEP = 129, 8, 8
FORMATS = {"model": "", "layer": "", "near": ".2f", "rough_near": ".2f", "rough_far": ".2f", "rank_near": ".0f"}
FORMATS |= {"rank_far": ".0f", "left_low_rank": ".2f", "left_both": ".2f"}


def rank(block: torch.Tensor) -> int:
    values = torch.linalg.svdvals(block)
    return int((values > 0.01 * values[0]).sum())


def roughness(kernel: np.ndarray, chosen: np.ndarray) -> float:
    """Distance from the mean of the neighbours: 0 on a line, 1.5 for white noise, 4 if signs alternate."""
    between = kernel[1:-1] - (kernel[:-2] + kernel[2:]) / 2
    return float((between[chosen] ** 2).sum() / max((kernel[1:-1][chosen] ** 2).sum(), 1e-30))


def left(kernel: np.ndarray, lags: np.ndarray) -> float:
    """||T - W A W^T||^2 for the kernel at the lags, with linear interpolation."""
    parts = Interpolated(
        lambda s: torch.from_numpy(np.interp(s.numpy(), lags, kernel)), LENGTH, (LENGTH - 1) // STEP + 1
    )
    return float((parts.toeplitz - parts.product()).square().sum())


def shape(kernel: np.ndarray) -> dict[str, float]:
    """The figures of one channel, `(2n - 1,)`."""
    lags = np.arange(1 - LENGTH, LENGTH)
    inside, quarter = np.abs(lags) <= NEAR, LENGTH // 4
    matrix = dense_toeplitz(torch.from_numpy(kernel)[None])[0]
    total = float(matrix.square().sum())
    smooth = np.where(inside, np.interp(lags, lags[~inside], kernel[~inside]), kernel)
    return {
        "near": float((kernel[inside] ** 2).sum() / (kernel**2).sum()),
        "rough_near": roughness(kernel, inside[1:-1]),
        "rough_far": roughness(kernel, ~inside[1:-1]),
        "rank_near": rank(matrix[:quarter, :quarter]),
        "rank_far": rank(matrix[-quarter:, :quarter]),
        "left_low_rank": (left(kernel, lags) / total) ** 0.5,
        "left_both": (left(smooth, lags) / total) ** 0.5,
    }


@torch.no_grad()
def layers_of(model, name: str) -> list[dict]:
    """One row for each layer: medians over its channels."""
    rows = []
    for index, layer in enumerate(model.layers):
        kernels = layer.mixer.tno.double().coefficients(LENGTH).numpy()  # (D, 2n - 1)
        shapes = [shape(kernel) for kernel in kernels]
        medians = {key: float(np.median([one[key] for one in shapes])) for key in shapes[0]}
        rows.append({"model": name, "layer": index} | medians)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="Folders of bidirectional models.")
    parser.add_argument("--output_file", type=Path)
    args = parser.parse_args()
    rows = []
    for folder in args.models:
        torch.manual_seed(0)
        rows += layers_of(AutoModel.from_config(AutoConfig.from_pretrained(folder)), f"{folder.name}, untrained")
        rows += layers_of(AutoModel.from_pretrained(folder), folder.name)
    sys.stdout.write(markdown(rows, FORMATS) + "\n")
    if args.output_file is not None:
        write_json(args.output_file, {"rows": rows})


if __name__ == "__main__":
    main()
