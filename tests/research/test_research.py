"""Benchmarks and experiments of `docs/research`, each run once, as a toy."""

import argparse
import json
import re
import subprocess
import sys
import threading
from importlib import import_module

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from helpers.models import seeded, tiny_config
from helpers.scripts import ROOT, table_rows, words
from modeling_tnn import TnnForCausalLM
from modeling_tnn.tools.comparing import memory_per_sequence

sys.path.append(str(ROOT / "docs" / "research"))
pytestmark = pytest.mark.slow
suites, gpu, gpu_models = map(import_module, ("benchmark", "suites.gpu", "suites.gpu_models"))
lengths, gpus, debian_texts = map(import_module, ("suites.lengths", "gpu", "debian_texts"))


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


SIZES = {"vocab_size": 99, "hidden_size": 16}
LLAMA = LlamaConfig(
    **SIZES, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
)  # fmt: skip
MAMBA2 = Mamba2Config(
    **SIZES, num_hidden_layers=2, num_heads=4, head_dim=8, state_size=8, n_groups=1, chunk_size=16
)  # fmt: skip


@pytest.fixture
def folders(tmp_path):
    models = {"tnn": seeded(TnnForCausalLM, tiny_config("rpe", True)), "llama": LlamaForCausalLM(LLAMA)}
    models["mamba2"] = Mamba2ForCausalLM(MAMBA2)
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    return [str(tmp_path / name) for name in models]


def test_models(folders, measure):
    """The state is that of one sequence after the context and a token."""
    options = "--block_size 9 --tokens 30 --contexts 5 70 --batch_size 2"
    rows, shown = measure("models", options, "--model_name_or_path", *folders)
    assert [(row["model"], row["context"]) for row in rows] == [(f, c) for c in (5, 70) for f in folders]
    assert all(row["training_time"] == row["decoding_time"] == 1 for row in rows[::3])
    assert all(row["ms_per_token"] > 0 and row["training_tokens_per_second"] > 0 for row in rows)
    assert [cells[1] for cells in shown] == 3 * ["5"] + 3 * ["70"]
    states = {(row["model"], row["context"]): row["state_mebibytes"] * 2**20 for row in rows}
    model = TnnForCausalLM.from_pretrained(folders[0])
    for context in (5, 70):
        cache, one = None, torch.zeros(1, 1, dtype=torch.long)
        for ids in (one.expand(1, context), one):
            cache = model(ids, past_key_values=cache, use_cache=True).past_key_values
        assert states[folders[0], context] == memory_per_sequence(cache)
        # keys and values of float32, of 2 heads of 4, in 3 layers
        assert states[folders[1], context] == (context + 1) * 2 * 4 * 2 * 4 * 3
        # 4 heads of 8 with 8 states, and a convolution of 4 over 32 + 2 x 8 channels, in 2 layers
        assert states[folders[2], context] == (4 * 8 * 8 + 4 * 48) * 4 * 2


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
    names = ["lm-hybrid-1e-3", "lm-mamba2-1e-3", "copying-64", "fd-speed", "long-range", "state-size", "lengths"]
    names += ["lra-listops-s4d-0"]
    command = [sys.executable, ROOT / "docs" / "research" / "gpu.py", "--quick", "--minutes", "60", "--text", tmp_path]
    for attempt in range(2):
        command_of = [*command, "--output_dir", tmp_path / "out", "--only", *names]
        done = subprocess.run(command_of, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("was there") == len(names) * attempt
    records = {name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in names}
    assert all(records[name]["figures"]["steps"] == 2 for name in names[:2])
    assert records["fd-speed"]["quick"] and records["fd-speed"]["device"] == "cpu"


LENGTHS = ["--hidden_size", "64", "--num_hidden_layers", "1", "--vocab_size", "100", "--passes", "prefill", "--ways"]


def test_lengths_go_on_and_say_where_a_model_stops(measure, tmp_path):
    """What is in the file is not measured again. Out of memory or time is a row, after which a model has none."""
    ways = [*LENGTHS, "rpe", "gpt2", "--memory", 2]
    assert len(measure("lengths", *ways, "--lengths", 16)[0]) == 2
    file = tmp_path / "figures.json"
    file.write_text(file.read_text().replace('"milliseconds": ', '"milliseconds": 1e9, "seen": '))
    rows, _ = measure("lengths", *ways, "--vocab_size", 100, "--lengths", 16, 4_000_000, 8_000_000)
    found = {(row["way"], row["length"]): row for row in rows}
    assert len(found) == len(rows) == 4 and all(found[way, 16]["milliseconds"] == 1e9 for way in ("rpe", "gpt2"))
    assert all("memory" in found[way, 4_000_000]["error"] for way in ("rpe", "gpt2"))
    assert found["rpe", 4_000_000]["planned_mebibytes"] > 2048 and found["gpt2", 16]["peak_mebibytes"] > 0
    with pytest.raises(SystemExit):
        measure("lengths", *ways, "--hidden_size", 128, "--lengths", 16)
    for end, error in (("time').sleep(100)", "stopped after 10 s"), ("os')._exit(3)", "the process ended with 3")):
        steps = ["{'known': 1}", f"__import__('{end}"]
        assert lengths.apart(10, map, eval, steps) == {"known": 1, "error": error}


def test_a_training_that_time_ends_twice_has_the_figures_of_one_without_a_stop(tmp_path, monkeypatch):
    rows = [" ".join(f"word{(17 * i + j * j) % 97}" for j in range(300)) for i in range(12)]
    for split in ("train", "validation"):
        Dataset.from_dict({"text": rows}).to_parquet(tmp_path / f"{split}.parquet")
    experiment = gpus.language_model("rpe", "4e-3")
    quick = (*experiment.quick, "--config_overrides", f"{gpus.TINY['tnn']},hidden_dropout_prob=0.1", "--max_steps", 40)
    quick += ("--eval_steps", 16, "--checkpointing_steps", 40, "--logging_steps", 1)
    monkeypatch.setattr(gpus, "experiments", lambda: {"lm": experiment._replace(quick=quick)})
    args = argparse.Namespace(text=tmp_path, corpus=None, lra=None, quick=True, jobs=1)
    gpus.prepare(tmp_path)

    def train(folder: str, stops: tuple[int, ...] = ()) -> dict:
        args.output_dir = tmp_path / folder
        for stop in stops:
            assert "goes on with it" in gpus.run("lm", args, AtStep(tmp_path / folder / "lm.log", stop))
        gpus.run("lm", args, threading.Event())
        return json.loads((tmp_path / folder / "lm.json").read_text())["figures"]

    whole, parts = train("whole"), train("parts", (8, 20))
    for name in ("evaluations", "perplexity_before", "perplexity", "best_step", "steps", "tokens"):
        assert whole[name] == parts[name], name
    *_, last = (tmp_path / "parts" / "lm.log").read_text().split("Continue with")
    assert min(steps_in(last)) >= 20


class AtStep(threading.Event):
    """Set when the log of a training shows a step."""

    def __init__(self, log, step: int):
        super().__init__()
        self.log, self.step = log, step

    def wait(self, timeout=None):
        return max(steps_in(self.log.read_text()), default=0) >= self.step or super().wait(timeout)


def steps_in(log: str) -> list[int]:
    return [int(step) for step in re.findall(r" (\d+)/40 ", log)]


def test_a_text_of_packages_has_each_long_paragraph_once():
    page = b"<html><head>x</head><body><nav>menu</nav><p>one &amp; <b>two</b></p><!-- no --><p>three</p></body></html>"
    assert debian_texts.content("a.html", page) == "one & two\n\nthree"
    assert debian_texts.content("a.c", b"\xff") is None and debian_texts.content("a.js", b"x" * 1000) is None
    licence, code = "This is free software. " * 10, "x = 1"
    documents = {f"{name}.py": "\n\n".join([licence, code, f"{name} " * 100]) for name in "abc"}
    found = debian_texts.chosen(documents, set())
    assert list(found) == sorted(documents, key=debian_texts.key)
    assert [licence in text for text in found.values()] == [True, False, False]
    assert all(code in text for text in found.values())
    assert debian_texts.rows_of(found)["source"] == list(found)
