"""Programs of `docs/research`: benchmarks of peers and other products, fits by gradients, first kernels."""

import json
import runpy
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, TrainingArguments

from helpers.models import random, seeded, slow, tiny_config
from helpers.scripts import ROOT, TEXT, read, save_model, table_rows, words
from modeling_tnn import TnnForCausalLM
from modeling_tnn.tools.recurrent import kernel_to_fit
from modeling_tnn.training.grouping_trainer import GroupingTrainer
from tnn_cli.parser import load_config, parse_overrides
from tnn_cli.training_arguments import GroupArguments

sys.path.append(str(ROOT / "docs" / "research"))
suites, memory = import_module("benchmark"), import_module("suites.memory")
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


@pytest.fixture
def measure(tmp_path, monkeypatch, capsys):
    def measure(suite: str, *options) -> tuple[list[dict], list[list[str]]]:
        """The rows of its file, and of the table that it shows."""
        output = tmp_path / "figures.json"
        given = [suite, "--repeats", 1, "--output_file", output, "--plot", tmp_path / "figures.png", *options]
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *words(*given)])
        suites.main()
        return json.loads(output.read_text())["rows"], table_rows(capsys.readouterr().out)[2:]

    return measure


@pytest.mark.parametrize(("suite", "options", "ways"), [
    ("training", "", ["released", "fused", "hybrid", "gpt2", "llama", "mamba", "matmul"]),
    *slow(("training", "--bidirectional", ["rpe", "fd", "ski"]),
          ("training", "--blocks_only", ["fused", "fused bf16", "matmul"]), ("memory", "", ["released", "fused"])),
])  # fmt: skip
def test_suites_of_steps(suite, options, ways, measure, tmp_path):
    rows, shown = measure(suite, f"--hidden_size 64 --lengths 16 100 --tokens 200 {options}", "--ways", *ways)
    assert [(row["length"], row["way"]) for row in rows] == [(length, way) for length in (16, 100) for way in ways]
    assert [cells[:2] for cells in shown] == [[str(row["length"]), row["way"]] for row in rows]
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
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


@pytest.mark.slow
def test_long_range(measure):
    """The transformer has as many parameters as the TNN, but for its table of positions."""
    rows, shown = measure("long_range", "--lengths 64 70 --config_overrides num_hidden_layers=2")
    ways = suites.DEFAULTS["long_range"]
    assert [(row["length"], row["way"]) for row in rows] == [(n, way) for n in (64, 70) for way in ways]
    assert [line[0] for line in shown] == ways
    parameters = {row["way"]: row["parameters"] for row in rows if row["length"] == 64}
    assert parameters["transformer"] - 64 * 128 == pytest.approx(parameters["rpe"], rel=0.1)


def test_columns_of_table_1(measure):
    rows, _ = measure("mixing", "--lengths 17 --channels 64")
    assert [row["way"] for row in rows] == suites.WAYS["mixing"] and rows[0]["over_toeplitz"] == 1
    x = random(2, 17, 64)
    feature = 1 + torch.nn.functional.elu(x)
    weights = feature @ feature.mT
    same(mixing.linear_attention(x), weights / weights.sum(-1, keepdim=True) @ x, [x])


sys.path.append(str(ROOT / "docs" / "research"))
distil = import_module("distil")
EVERY_FIT = pytest.mark.parametrize("fit", distil.FITS)


def operator_with(decay: float):
    return seeded(TnnForCausalLM, tiny_config(decay=decay)).double().model.layers[0].mixer.tno


@pytest.mark.slow
@EVERY_FIT
def test_recovers_a_decaying_kernel(fit):
    """A kernel that is a decaying exponential in every channel is found, and its pole is the largest one."""
    operator = operator_with(0.8)
    with torch.no_grad():  # a position encoder that says the same of every lag
        operator.rpe.out.linear.weight.zero_()
        operator.rpe.out.linear.bias.uniform_(0.5, 1.5)
    # A pair of complex poles reaches a real one only in the limit.
    order, precision = (1, 1e-3) if fit == "gradient" else (2, 2e-2)
    fitted, report = distil.fit_operator(operator, tiny_config(decay=0.8), distil.FITS[fit], order, 1, 300, 0.02)
    assert report["l2_worst"] < precision and report["largest_pole"] == pytest.approx(0.8, abs=precision)
    torch.testing.assert_close(fitted.coefficients(20), operator.coefficients(20), rtol=precision, atol=precision)


@EVERY_FIT
def test_errors_of_the_report(fit):
    """They are those of the taps, by definition, and fall with more steps."""
    operator, given = operator_with(0.9), (tiny_config(decay=0.9), distil.FITS[fit], 6, 4)
    first = distil.fit_operator(operator, *given, steps=1, learning_rate=0.03)[1]
    fitted, report = distil.fit_operator(operator, *given, steps=60, learning_rate=0.03)
    assert report["l2_layer"] < 0.5 * first["l2_layer"]
    taps = kernel_to_fit(operator, 4)
    error = fitted.coefficients(taps.shape[1]) - taps
    relative = error.norm(dim=1) / taps.norm(dim=1)
    expected = {"mse": error.square().mean(), "l2_layer": error.norm() / taps.norm(), "l2_worst": relative.max()}
    expected["mse_of_unit_kernels"] = (relative.square() / taps.shape[1]).mean()
    assert {name: report[name] for name in expected} == pytest.approx({k: v.item() for k, v in expected.items()})


@EVERY_FIT
def test_program_decodes_with_the_fit(fit, tmp_path, monkeypatch):
    folder, output = save_model(tmp_path / "model", decay=0.9), tmp_path / "out"
    (tmp_path / "text.txt").write_text(TEXT * 60)
    options = f"--model_name_or_path {folder} --output_dir {output} --dataset_name {tmp_path}/text.txt --rows 1"
    options += f" --fit {fit} --order 6 --steps 40 --block_size 64"
    monkeypatch.setattr(sys, "argv", ["distil.py", *words(options)])
    distil.main()
    report = read(output, "conversion")
    assert (report["fit"], report["steps"], report["modes"]) == (fit, 40, None)
    for layer in report["layers"]:
        assert layer["l2_layer"] < 1 and layer["largest_pole"] < 1 and 0 < layer["direct_l2_layer"] < 1
    converted, prompt = AutoModelForCausalLM.from_pretrained(output), torch.tensor([[5, 6, 7]])
    assert (converted.config.tno_type, converted.config.converted_from) == (distil.FITS[fit].tno_type, "rpe")
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = converted.generate(prompt, use_cache=False, **options)
    assert torch.equal(converted.generate(prompt, **options), expected)


STARTS = runpy.run_path(str(ROOT / "docs" / "research" / "starts.py"))
FAMILIES, kernels_of, effective_rank, horizon = (
    STARTS[name] for name in ("FAMILIES", "kernels_of", "effective_rank", "horizon")
)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64, "vocab_size": 300}
# The recipes of the families have these.
RECIPES = {"kernels": {}, "ski": {"tno_type": "ski", "causal": False}, "fd": {"tno_type": "fd"}}


def started_model(name: str, family: str = "kernels"):
    start, fields = FAMILIES[family][name], SMALL | RECIPES[family]
    torch.manual_seed(0)
    auto_class = AutoModelForMaskedLM if family == "ski" else AutoModelForCausalLM
    model = auto_class.from_config(load_config("tnn-tiny", fields, parse_overrides(start.fields)))
    with torch.no_grad():
        start.change(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", RECIPES)
def test_every_start(family, tmp_path):
    """A model is built, and only what a start says has a rate of its own."""
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, learning_rate=0.01)
    for name, start in FAMILIES[family].items():
        groups = GroupArguments(parameter_groups=start.groups(0.01)).groups()
        trainer = GroupingTrainer(started_model(name, family), arguments, groups=groups)
        found = {group["lr"] for group in trainer.create_optimizer().param_groups}
        assert found == ({0.01} if start.rate is None else {0.01, start.rate[1] * 0.01}), name
        assert all(np.isfinite(kernels).all() for kernels in kernels_of(trainer.model)), name
