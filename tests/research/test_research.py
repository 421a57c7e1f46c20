"""Programs of `docs/research`, each run once, as a toy."""

import json
import sys
from importlib import import_module

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.scripts import ROOT, TEXT, read, save_model, table_rows, words

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
