"""Products that the library leaves out are right, so that their speed can be compared."""

from types import SimpleNamespace

import pytest
import torch

from helpers.models import random, relative_error
from modeling_tnn import dense_toeplitz
from modeling_tnn.tno_ski import InducingGrid
from tnn_scripts.benchmarks import alternatives


def agree(fast, dense, inputs: list[torch.Tensor]):
    """In values and gradients."""
    cotangent = torch.randn_like(inputs[0])
    assert relative_error(fast, dense) < 1e-12
    gradients = [torch.autograd.grad((y * cotangent).sum(), inputs, retain_graph=True) for y in (fast, dense)]
    for actual, expected in zip(*gradients, strict=True):
        assert relative_error(actual, expected) < 1e-12


@pytest.mark.parametrize("way", [alternatives.causal_by_prefix_sums, alternatives.causal_by_intervals])
@pytest.mark.parametrize(("length", "step"), [(2, 1), (17, 4), (63, 9), (64, 8), (65, 8)])
def test_causal_ski(way, length, step):
    grid = InducingGrid(length, 1, step)
    v, taps = random(3, 2, length), random(3, 2 * grid.num_points + 1)[:, 1:-1]
    weights = grid.matrix(v)
    matrix = (weights @ dense_toeplitz(taps) @ weights.t()).tril()
    agree(way(v, taps, grid), torch.einsum("dij,dbj->dbi", matrix, v), [v, taps])


@pytest.mark.parametrize("length", [2, 6, 64, 100])
def test_split_product(length):
    v, taps = random(3, 2, length), random(3, 2 * length - 1)
    dense = torch.einsum("dij,dbj->dbi", dense_toeplitz(taps), v)
    agree(alternatives.SplitProduct.apply(v, taps), dense, [v, taps])


def test_suite():
    settings = {"channels": 2, "batch_size": 1, "rank": 8, "device": "cpu", "threads": 1, "repeats": 1}
    rows = alternatives.run(SimpleNamespace(subjects=list(alternatives.SUBJECTS), lengths=[64], **settings))
    assert [row["way"] for row in rows] == [way for ways in alternatives.SUBJECTS.values() for way in ways]
    kept = {row["way"]: row["saved_mebibytes"] for row in rows}
    assert kept["prefix"] > 4 * kept["filter"] and kept["split"] == kept["fused"]
    assert alternatives.table(rows).count("\n") == 6
