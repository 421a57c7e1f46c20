"""The benchmarks of `docs/research`: peers and products outside the library are right, and every suite runs."""

import json
import sys
from importlib import import_module

import pytest
import torch

from helpers.models import random
from helpers.scripts import ROOT, table_rows, words

sys.path.append(str(ROOT / "docs" / "research"))
program, memory = import_module("benchmark"), import_module("suites.memory")
mixing, s4_layer, state_size = (import_module(f"suites.{name}") for name in ("mixing", "s4_layer", "state_size"))


def same(actual: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]):
    """Values and gradients."""
    torch.testing.assert_close(actual, expected)
    weights, options = torch.randn_like(expected), {"materialize_grads": True, "allow_unused": True}
    first, second = (torch.autograd.grad((y * weights).real.sum(), inputs, **options) for y in (actual, expected))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("length", [1, 2, 3, 17, 64])
def test_scan_is_the_recurrence(length):
    rates = (0.9 * torch.rand(5, dtype=torch.complex128)).requires_grad_()
    inputs = torch.randn(2, length, 5, dtype=torch.complex128, requires_grad=True)
    states = [inputs[:, 0]]
    for step in range(1, length):
        states.append(rates * states[-1] + inputs[:, step])
    same(state_size.scan(rates, inputs), torch.stack(states, dim=1), [rates, inputs])


def recurrent_taps(poles, low_rank, inputs, outputs, step, length: int) -> torch.Tensor:
    """The taps of one channel of an `S4Layer` by its recurrence: Tustin's rule, then powers of A."""
    poles, low_rank, inputs, outputs = (torch.cat([part, part.conj()]) for part in (poles, low_rank, inputs, outputs))
    unit = torch.eye(len(poles), dtype=poles.dtype)
    half = step / 2 * (torch.diag(poles) - torch.outer(low_rank, low_rank.conj()))
    matrix = torch.linalg.solve(unit - half, unit + half)
    state = torch.linalg.solve(unit - half, step * inputs)
    outputs = torch.linalg.solve((unit - torch.linalg.matrix_power(matrix, length)).T, outputs)
    return torch.stack([outputs @ torch.linalg.matrix_power(matrix, lag) @ state for lag in range(length)]).real


@pytest.mark.parametrize("length", [2, 16, 33])
def test_s4_is_its_recurrence(length, monkeypatch):
    """The roots of unity are in several parts."""
    monkeypatch.setattr(s4_layer, "ENTRIES", 2 * 6 * 5)
    torch.manual_seed(0)
    parts = [part + 0.1 * torch.randn(2, 3, dtype=part.dtype) for part in s4_layer.legendre_parts(6)]
    steps = 0.1 + torch.rand(2, 1, dtype=torch.float64)
    arguments = [*parts, torch.randn(2, 3, dtype=torch.complex128), steps]
    for argument in arguments:
        argument.requires_grad_()
    expected = torch.stack([recurrent_taps(*channel, length) for channel in zip(*arguments, strict=True)])
    same(s4_layer.taps_of(*arguments, length), expected, arguments)


def test_s4_begins_as_hippo():
    """In another basis: the matrix of HiPPO-LegS has the eigenvalues -1 to -N, and b* A b stays."""
    poles, low_rank, inputs = (torch.cat([part, part.conj()]) for part in s4_layer.legendre_parts(6))
    matrix, index = torch.diag(poles) - torch.outer(low_rank, low_rank.conj()), torch.arange(6, dtype=torch.float64)
    values, weights = torch.linalg.eigvals(matrix), (2 * index + 1).sqrt()
    torch.testing.assert_close(values.real.sort().values, -(index + 1).flip(0))
    hippo = -torch.tril(torch.outer(weights, weights), -1) - torch.diag(index + 1)
    assert (inputs.conj() @ matrix @ inputs).real.item() == pytest.approx((weights @ hippo @ weights).item())


def test_saved_bytes():
    """Each storage once, and none of the excluded tensors."""
    x, weights = torch.ones(10, requires_grad=True), torch.ones(2, 10, requires_grad=True)
    assert memory.saved_bytes(lambda: x * weights[0] * x) == 4 * (10 + 20 + 10)
    assert memory.saved_bytes(lambda: x * weights[0] * x, excluded=[weights]) == 4 * (10 + 10)


@pytest.fixture
def measure(tmp_path, monkeypatch, capsys):
    def measure(suite: str, *options) -> tuple[list[dict], list[list[str]]]:
        """The rows of its file, and of the table that it shows."""
        output = tmp_path / "figures.json"
        given = [suite, "--repeats", 1, "--output_file", output, "--plot", tmp_path / "figures.png", *options]
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *words(*given)])
        program.main()
        return json.loads(output.read_text())["rows"], table_rows(capsys.readouterr().out)[2:]

    return measure


@pytest.mark.parametrize(("suite", "options", "ways"), [
    ("training", "", ["released", "fused", "hybrid", "gpt2", "llama", "mamba", "matmul"]),
    ("training", "--bidirectional", ["rpe", "fd", "ski"]),
    ("training", "--blocks_only", ["fused", "fused bf16", "matmul"]),
    pytest.param("memory", "", ["released", "fused"], marks=pytest.mark.slow),
])  # fmt: skip
def test_suites_of_steps(suite, options, ways, measure, tmp_path):
    rows, shown = measure(suite, f"--hidden_size 64 --lengths 16 100 --tokens 200 {options}", "--ways", *ways)
    assert [(row["length"], row["way"]) for row in rows] == [(length, way) for length in (16, 100) for way in ways]
    assert [cells[:2] for cells in shown] == [[str(row["length"]), row["way"]] for row in rows]
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_streaming(measure):
    rows, _ = measure("streaming", "--hidden_size 64 --lengths 512 --segment 64 --ways rtf")
    assert [(row["way"], row["tokens"]) for row in rows] == [("rtf", 512)]


def test_generation(measure):
    models = ["rpe", "rtf", "modal", "hybrid", "attention", "gpt2", "weights"]
    options = "--hidden_size 64 --num_hidden_layers 2 --vocab_size 100 --contexts 16 300"
    rows, shown = measure("generation", options, "--models", *models)
    assert [cells[:2] for cells in shown] == [[row["model"], str(row["context"])] for row in rows]
    states = {(row["model"], row["context"]): row["state_mebibytes"] for row in rows}
    grown = {model: states[model, 300] - states[model, 16] for model in models}
    assert grown["rtf"] == 0 < grown["gpt2"] == pytest.approx(grown["attention"])
    assert grown["gpt2"] / 2 < grown["hybrid"] < grown["gpt2"] / 2 + grown["rpe"]  # one of its two layers is attention


def test_state_size(measure):
    rows, _ = measure(
        "state_size", "--state_sizes 4 8 64 --length 50 100 --hidden_size 6 --largest_scan 8 --batch_size 1"
    )
    kept = {(row["length"], row["way"], row["state_size"]): row["saved_mebibytes"] for row in rows}
    others = [(way, size) for way in ("s4d", "s4") for size in (4, 8, 64)] + [("scan", 4), ("scan", 8)]
    short = [("rtf", 4), ("rtf", 8), *others]  # a transfer function has fewer states than samples
    assert list(kept) == [(50, *way) for way in short] + [(100, *way) for way in [*short[:2], ("rtf", 64), *others]]
    assert kept[100, "scan", 8] > 1.5 * kept[100, "scan", 4]
    assert kept[100, "s4d", 64] < 0.2 * (6 * 32 * 100 * 16 / 2**20), "no Vandermonde matrix"
    assert kept[100, "s4", 64] < 0.5 * (6 * 64 * 51 * 8 / 2**20), "no Cauchy matrix"


def test_long_range(measure):
    """The transformer has as many parameters as the TNN, but for its table of positions."""
    rows, shown = measure("long_range", "--lengths 64 70 --config_overrides num_hidden_layers=2")
    ways = program.DEFAULTS["long_range"]
    assert [(row["length"], row["way"]) for row in rows] == [(n, way) for n in (64, 70) for way in ways]
    assert [line[0] for line in shown] == ways
    parameters = {row["way"]: row["parameters"] for row in rows if row["length"] == 64}
    assert parameters["transformer"] - 64 * 128 == pytest.approx(parameters["rpe"], rel=0.1)


def test_columns_of_table_1(measure):
    rows, _ = measure("mixing", "--lengths 17 --channels 64")
    assert [row["way"] for row in rows] == program.WAYS["mixing"] and rows[0]["over_toeplitz"] == 1
    x = random(2, 17, 64)
    feature = 1 + torch.nn.functional.elu(x)
    weights = feature @ feature.mT
    same(mixing.linear_attention(x), weights / weights.sum(-1, keepdim=True) @ x, [x])
