"""Benchmarks of `docs/research`, each run once, as a toy."""

import json
import sys
from importlib import import_module

import pytest

from helpers.scripts import ROOT, table_rows, words

sys.path.append(str(ROOT / "docs" / "research"))
pytestmark = pytest.mark.slow
suites = import_module("benchmark")


@pytest.fixture
def measure(tmp_path, monkeypatch, capsys):
    def measure(suite: str, *options) -> tuple[list[dict], list[list[str]]]:
        """The rows of its file, and of the table that it shows."""
        output = tmp_path / "figures.json"
        given = [suite, "--repeats", 1, "--output_file", output, *options]
        given += ["--plot", tmp_path / "figures.png"] if suite in suites.AXES else []
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *words(*given)])
        suites.main()
        return json.loads(output.read_text())["rows"], table_rows(capsys.readouterr().out)[2:]

    return measure


STEPS = "--hidden_size 64 --lengths 16 100 --tokens 200"
SUITES = [
    ("training", STEPS, ["released", "fused", "hybrid", "gpt2", "llama", "mamba", "matmul"]),
    ("training", f"{STEPS} --bidirectional", ["rpe", "fd", "ski"]),
    ("memory", STEPS, ["released", "fused"]),
    ("generation", "--hidden_size 64 --num_hidden_layers 2 --vocab_size 100 --contexts 16 300",
     ["rpe", "rtf", "modal", "hybrid", "attention", "gpt2", "weights"]),
    ("state_size", "--state_sizes 4 8 64 --length 50 100 --hidden_size 6 --largest_scan 8 --batch_size 1",
     ["rtf", "s4d", "s4", "scan"]),
    ("long_range", "--lengths 64 70 --config_overrides num_hidden_layers=2", suites.DEFAULTS["long_range"]),
    ("mixing", "--lengths 17 --channels 64", suites.WAYS["mixing"]),
    ("products", f"{STEPS} --decay 1", ["released", "rpe", "fd", "rtf"]),
    ("products", f"{STEPS} --bidirectional", ["released", "rpe", "rpe eager", "ski"]),
    ("decoding", "--hidden_size 16 --contexts 5 70", ["fd", "modal", "matmul", "vecdot"]),
    ("serving", "--hidden_size 64 --num_hidden_layers 2 --vocab_size 100 --requests 4 --alone 1 --new_tokens 5",
     ["rtf", "modal"]),
]  # fmt: skip


@pytest.mark.parametrize(("suite", "options", "ways"), SUITES)
def test_suites(suite, options, ways, measure):
    """A row for every way, in the file and in the table."""
    name = "model" if suite in ("generation", "serving") else "way"
    given = [] if suite in ("state_size", "long_range", "mixing") else [f"--{name}s", *ways]
    rows, shown = measure(suite, options, *given)
    assert {row[name] for row in rows} == set(ways) and shown
