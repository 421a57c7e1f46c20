"""The benchmarks of state size and of long sequences."""

from types import SimpleNamespace

import pytest
import torch

from helpers.scripts import table_rows
from tnn_scripts.benchmarks import long_range as benchmark_long_range
from tnn_scripts.benchmarks import s4_layer
from tnn_scripts.benchmarks import state_size as benchmark_state_size
from tnn_scripts.benchmarks.measure import saved_bytes
from tnn_scripts.options.benchmark import WAYS

SETTINGS = {"batch_size": 1, "device": "cpu", "threads": 1, "repeats": 1}


@pytest.mark.parametrize("length", [1, 2, 3, 17, 64])
def test_scan_is_the_recurrence(length):
    """Values and gradients, against a loop."""
    torch.manual_seed(0)
    rates = (0.9 * torch.rand(5, dtype=torch.complex128)).requires_grad_()
    inputs = torch.randn(2, length, 5, dtype=torch.complex128, requires_grad=True)
    states = [inputs[:, 0]]
    for step in range(1, length):
        states.append(rates * states[-1] + inputs[:, step])
    expected, actual = torch.stack(states, dim=1), benchmark_state_size.scan(rates, inputs)
    torch.testing.assert_close(actual, expected)
    options = {"materialize_grads": True, "allow_unused": True}
    gradients = [torch.autograd.grad(y.abs().square().sum(), (rates, inputs), **options) for y in (actual, expected)]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def recurrent_taps(poles, low_rank, inputs, outputs, step, length: int) -> torch.Tensor:
    """The taps of one channel of an `S4Layer` by its recurrence: Tustin's rule, then powers of A."""
    poles, low_rank, inputs, outputs = (torch.cat([part, part.conj()]) for part in (poles, low_rank, inputs, outputs))
    unit = torch.eye(len(poles), dtype=poles.dtype)
    half = step / 2 * (torch.diag(poles) - torch.outer(low_rank, low_rank.conj()))
    matrix = torch.linalg.solve(unit - half, unit + half)
    state = torch.linalg.solve(unit - half, step * inputs)
    outputs = torch.linalg.solve((unit - torch.linalg.matrix_power(matrix, length)).T, outputs)
    taps = []
    for _ in range(length):
        taps.append(outputs @ state)
        state = matrix @ state
    taps = torch.stack(taps)
    assert taps.imag.abs().max() < 1e-12
    return taps.real


@pytest.mark.parametrize("length", [2, 16, 33])
def test_s4_is_its_recurrence(length, monkeypatch):
    """Values and gradients; the roots of unity in several parts."""
    monkeypatch.setattr(s4_layer, "ENTRIES", 2 * 6 * 5)
    torch.manual_seed(0)
    parts = [part + 0.1 * torch.randn(2, 3, dtype=part.dtype) for part in s4_layer.legendre_parts(6)]
    steps = 0.1 + torch.rand(2, 1, dtype=torch.float64)
    arguments = [*parts, torch.randn(2, 3, dtype=torch.complex128), steps]
    for argument in arguments:
        argument.requires_grad_()
    actual = s4_layer.taps_of(*arguments, length)
    expected = torch.stack([recurrent_taps(*channel, length) for channel in zip(*arguments, strict=True)])
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(2, length, dtype=torch.float64)
    gradients = [torch.autograd.grad((taps * weights).sum(), arguments) for taps in (actual, expected)]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_s4_begins_as_hippo():
    """The poles, p and b are those of HiPPO-LegS in another basis: the matrix has its eigenvalues -1 to -N."""
    poles, low_rank, inputs = (torch.cat([part, part.conj()]) for part in s4_layer.legendre_parts(6))
    matrix = torch.diag(poles) - torch.outer(low_rank, low_rank.conj())
    values = torch.linalg.eigvals(matrix)
    torch.testing.assert_close(values.real.sort().values, -torch.arange(6.0, 0, -1, dtype=torch.float64))
    assert values.imag.abs().max() < 1e-9
    expected = torch.linalg.multi_dot([inputs.conj()[None], matrix, inputs[:, None]]).item()
    index = torch.arange(6, dtype=torch.float64)
    hippo = -torch.tril((2 * index + 1).sqrt()[:, None] * (2 * index + 1).sqrt(), -1) - torch.diag(index + 1)
    weights = (2 * index + 1).sqrt()
    assert expected == pytest.approx((weights @ hippo @ weights).item())


def test_saved_bytes():
    """Each storage once, and none of the excluded tensors."""
    x, weights = torch.ones(10, requires_grad=True), torch.ones(2, 10, requires_grad=True)
    assert saved_bytes(lambda: x * weights[0] * x) == 4 * (10 + 20 + 10)
    assert saved_bytes(lambda: x * weights[0] * x, excluded=[weights]) == 4 * (10 + 10)


def test_state_size():
    args = SimpleNamespace(state_sizes=[4, 8, 64], length=[50, 100], hidden_size=6, largest_scan=8, **SETTINGS)
    rows = benchmark_state_size.run(args)
    ways = [(row["length"], row["way"], row["state_size"]) for row in rows]
    others = [(way, size) for way in ("s4d", "s4") for size in (4, 8, 64)] + [("scan", 4), ("scan", 8)]
    short = [("rtf", 4), ("rtf", 8), *others]  # a transfer function has fewer states than samples
    assert ways == [(50, *way) for way in short] + [(100, *way) for way in [*short[:2], ("rtf", 64), *others]]
    rows = dict(zip(ways, rows, strict=True))
    kept = {key: row["saved_mebibytes"] for key, row in rows.items()}
    assert kept[100, "scan", 8] > 1.5 * kept[100, "scan", 4]
    assert kept[100, "s4d", 64] < 0.2 * (6 * 32 * 100 * 16 / 2**20), "no Vandermonde matrix"
    assert kept[100, "s4", 64] < 0.5 * (6 * 64 * 51 * 8 / 2**20), "no Cauchy matrix"
    assert rows[100, "rtf", 4]["over_smallest"] == rows[100, "s4d", 4]["over_smallest"] == 1
    assert rows[50, "s4d", 64]["over_rtf"] is None and rows[100, "rtf", 64]["over_rtf"] == 1
    assert benchmark_state_size.table(list(rows.values())).count("\n") == 22


def test_long_range():
    """The transformer has as many parameters as the TNN, but for its table of positions."""
    settings = SETTINGS | {"batch_size": 2, "config_overrides": "num_hidden_layers=2"}
    rows = benchmark_long_range.run(SimpleNamespace(lengths=[64, 70], models=WAYS["long_range"], **settings))
    assert [(row["length"], row["way"]) for row in rows] == [(n, way) for n in (64, 70) for way in WAYS["long_range"]]
    assert all(row["steps_per_second"] > 0 for row in rows)
    assert all(row["over_first"] == 1 for row in rows if row["way"] == "rpe")
    kept = {(row["way"], row["length"]): row["saved_mebibytes"] for row in rows}
    assert all(0.1 < kept[way, 64] < kept[way, 70] for way in WAYS["long_range"])
    parameters = {row["way"]: row["parameters"] for row in rows if row["length"] == 64}
    assert parameters["transformer"] - 64 * 128 == pytest.approx(parameters["rpe"], rel=0.1)
    headings, _, *lines = table_rows(benchmark_long_range.table(rows))
    assert headings == ["model", "64", "70", "64, MiB", "70, MiB"]
    assert [line[0] for line in lines] == list(WAYS["long_range"])
