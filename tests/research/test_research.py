"""Programs of `docs/research`, each run once, as a toy."""

import json
import re
import runpy
import subprocess
import sys
from argparse import Namespace
from importlib import import_module

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from helpers.models import tiny_config
from helpers.scripts import ROOT, TEXT, read, save_model, table_rows, words
from modeling_tnn.tno_auto import build_tno
from tnn_programs.cli.parser import load_config, parse_overrides

sys.path.append(str(ROOT / "docs" / "research"))
pytestmark = pytest.mark.slow
suites, distil, products = map(import_module, ("benchmark", "distil", "suites.products"))


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


@pytest.mark.parametrize("causal", [True, False])
def test_released_form_is_the_same_product(causal):
    operator = build_tno(tiny_config(causal=causal)).double()
    v = torch.randn(2, 37, operator.channels, dtype=torch.float64)
    torch.testing.assert_close(products.released_product(operator, v), operator(v))


@pytest.mark.parametrize("fit", distil.FITS)
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
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64, "vocab_size": 300}
# The recipes of the families have these.
RECIPES = {"kernels": {}, "ski": {"tno_type": "ski", "causal": False}, "fd": {"tno_type": "fd"}}


@pytest.mark.parametrize("family", RECIPES)
def test_every_start(family):
    auto_class = AutoModelForMaskedLM if family == "ski" else AutoModelForCausalLM
    for name, start in STARTS["FAMILIES"][family].items():
        config = load_config("tnn-tiny", SMALL | RECIPES[family], parse_overrides(start.fields))
        with torch.no_grad():
            start.change(model := auto_class.from_config(config))
        assert all(np.isfinite(kernels).all() for kernels in STARTS["kernels_of"](model)), name


def test_dna(tmp_path):
    """Chains of letters that take turns, on both strands: all are as likely, until the one before is known."""
    pytest.importorskip("Bio")
    (tmp_path / "a.fa").write_text(f">one\n{'AC' * 1200}\n")
    lines = import_module("dna").markov(Namespace(train_file=str(tmp_path / "a.fa"), block_size=20))
    assert lines[0] == "order 0: 2.0000 bits per base"
    assert all(re.fullmatch(rf"order {order}: 0.0\d+ bits per base", lines[order]) for order in (1, 2))


def test_experiments_for_a_gpu(tmp_path):
    """Each kind runs once; what has figures is left out the second time."""
    rows = [" ".join(f"word{(17 * i + j) % 97}" for j in range(300)) for i in range(12)]
    for split in ("train", "validation"):
        Dataset.from_dict({"text": rows}).to_parquet(tmp_path / f"{split}.parquet")
    reviews = Dataset.from_dict({"text": rows, "label": [0, 1] * 6})
    for split in ("train", "test"):
        reviews.to_parquet(tmp_path / "lra" / "imdb" / f"{split}.parquet")
    (tmp_path / "lra" / "README.md").write_text("---\nconfigs:\n- {config_name: imdb, data_dir: imdb}\n---\n")
    names = ["lm-hybrid-1e-3", "lm-mamba2-1e-3", "copying-64", "fd-speed", "long-range"]
    names += ["state-size", "lra-listops", "lra-text"]
    command = [sys.executable, ROOT / "docs" / "research" / "gpu.py", "--quick", "--minutes", "60", "--text", tmp_path]
    command += ["--output_dir", tmp_path / "out", "--lra", tmp_path / "lra", "--only", *names]
    for attempt in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("was there") == len(names) * attempt
    records = {name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in names}
    assert all(records[name]["figures"]["steps"] == 2 for name in names[:2])
    assert records["copying-64"]["figures"]["rows"] and records["fd-speed"]["figures"]["rows"]
    assert records["fd-speed"]["quick"] and records["fd-speed"]["device"] == "cpu"
