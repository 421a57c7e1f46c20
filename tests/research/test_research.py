"""Benchmarks and experiments of `docs/research`, each run once, as a toy."""

import json
import subprocess
import sys
from importlib import import_module

import pytest
from datasets import Dataset

from helpers.scripts import ROOT, table_rows, words

sys.path.append(str(ROOT / "docs" / "research"))
pytestmark = pytest.mark.slow
suites, gpu, gpu_models = map(import_module, ("benchmark", "suites.gpu", "suites.gpu_models"))


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


@pytest.fixture
def measure_gpu(tmp_path, monkeypatch, capsys):
    def measure_gpu(*options) -> tuple[list[dict], str]:
        """The parts in the file, and the tables that are shown."""
        given = ["--device", "cpu", "--quick", "--repeats", 1, "--output_dir", tmp_path, *options]
        monkeypatch.setattr(sys, "argv", ["benchmark.py", "gpu", *words(*given)])
        suites.main()
        return json.loads((tmp_path / "gpu.json").read_text())["parts"], capsys.readouterr().out

    return measure_gpu


def test_every_part_runs(measure_gpu, tmp_path):
    """Without a GPU, in tiny sizes: minutes on one are few. Errors are of what cannot run here."""
    parts, shown = measure_gpu()
    rows = {part["part"]: part["rows"] for part in parts}
    assert list(rows) == list(gpu.PARTS) and all(rows.values()) and not any(part["error"] for part in parts)
    failures = {row["way"].split(",")[0] for part in rows.values() for row in part if "error" in row}
    assert failures <= {"triton", "PyTorch's linear_cross_entropy"}
    assert all(row["ms_per_token"] > 0 for row in rows["decoding"])
    assert table_rows((tmp_path / "gpu.md").read_text()) == table_rows(shown)


def test_what_fails_says_so_and_the_others_go_on(measure_gpu, monkeypatch):
    monkeypatch.setattr(gpu_models, "step", lambda *given: 1 / 0)
    (steps,), _ = measure_gpu("--parts", "steps")
    assert {row["error"] for row in steps["rows"]} == {"ZeroDivisionError: division by zero"}


def test_experiments_for_a_gpu(tmp_path):
    """Each kind runs once; what has figures is left out the second time."""
    rows = [" ".join(f"word{(17 * i + j) % 97}" for j in range(300)) for i in range(12)]
    for split in ("train", "validation"):
        Dataset.from_dict({"text": rows}).to_parquet(tmp_path / f"{split}.parquet")
    names = ["lm-hybrid-1e-3", "lm-mamba2-1e-3", "copying-64", "fd-speed", "long-range", "state-size", "lra-listops"]
    command = [sys.executable, ROOT / "docs" / "research" / "gpu.py", "--quick", "--minutes", "60", "--text", tmp_path]
    for attempt in range(2):
        command_of = [*command, "--output_dir", tmp_path / "out", "--only", *names]
        done = subprocess.run(command_of, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("was there") == len(names) * attempt
    records = {name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in names}
    assert all(records[name]["figures"]["steps"] == 2 for name in names[:2])
    assert records["fd-speed"]["quick"] and records["fd-speed"]["device"] == "cpu"
