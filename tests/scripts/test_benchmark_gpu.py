"""The measurement of a GPU, on the CPU: every part runs, and what fails says so."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationMixin, masking_utils

from helpers.scripts import start_script, table_rows
from tnn_scripts.benchmarks import gpu, gpu_models, gpu_pretraining, gpu_products
from tnn_scripts.common.parser import parse_arguments
from tnn_scripts.common.training_arguments import PretrainArguments

ARGS = SimpleNamespace(device="cpu", threads=1, repeats=1, quick=True)


def measure(folder, *options) -> tuple[dict, str]:
    """The figures and the messages, from a process of its own: parts are forks of one that imports all."""
    options = ["--device", "cpu", "--quick", "--repeats", 1, "--output_dir", folder, *options]
    process = start_script("benchmark", "gpu", *options)
    messages, _ = process.communicate(timeout=300)
    assert process.returncode == 0, messages
    return json.loads((folder / "gpu.json").read_text()), messages


@pytest.fixture
def real_parts(monkeypatch):
    """All parts with the arguments of a GPU, on the meta device: what compiles, has values or decodes is replaced."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)
    monkeypatch.setattr(gpu_products, "relative_error", lambda actual, expected: float(actual.shape != expected.shape))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    monkeypatch.setattr(gpu_products, "WARM_UP", 0)
    monkeypatch.setattr(gpu_products, "measure", lambda ways, args: {way: [run() or 1.0] for way, run in ways.items()})

    def generate(model, ids, max_new_tokens, stopping_criteria, **options):
        model(ids, use_cache=False)
        for count in range(max_new_tokens + 1):
            stopping_criteria(ids[:, :1].expand(-1, ids.shape[1] + count), None)

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    args = SimpleNamespace(device="meta", threads=1, repeats=1, quick=False)
    return {name: list(part.rows(gpu.sized(args))) for name, part in gpu.parts().items() if name != "recipe"}


@pytest.mark.slow
def test_every_part_has_its_real_arguments(real_parts):
    """Only what this machine or its PyTorch does not have is an error."""
    errors = {error for rows in real_parts.values() for row in rows if (error := row.get("error"))}
    assert all(error.startswith(("not measured: it needs", "AttributeError: module 'torch.nn")) for error in errors)
    assert all(row["right"] for name, rows in real_parts.items() if name.startswith("oracles") for row in rows)
    steps = real_parts["steps"]
    assert [row["length"] for row in steps] == [n for n in (2048, 512, 8192) for _ in gpu_models.WAYS]
    assert {row["tokens"] for row in steps} == {16384}
    assert {(row["way"], row["cache"], row["batch_size"]) for row in real_parts["decoding"]} == {
        (way, cache, batch) for way, cache in gpu_models.DECODED for batch in (1, 64)
    }


def test_a_step_has_as_many_tokens_as_fit(monkeypatch):
    def step(way, args, ids):
        if ids.numel() > 4096:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda: None

    monkeypatch.setattr(gpu_models, "step", step)
    args = gpu.sized(SimpleNamespace(device="cpu", threads=1, repeats=1, quick=False))
    row = gpu_models.fitting_step("mamba2", 2048, args)
    assert row["tokens"] == 4096 and row["tokens_per_second"] > 0
    assert gpu_models.fitting_step("mamba2", 8192, args) == {
        "tokens": 8192,
        "error": "OutOfMemoryError: CUDA out of memory",
    }


@pytest.mark.parametrize("quick", [False, True])
def test_the_program_takes_the_options_of_the_recipe(quick, tmp_path, monkeypatch):
    """With less text than on a GPU."""
    args = gpu.sized(SimpleNamespace(device="cuda", threads=1, repeats=1, quick=quick, output_dir=tmp_path))
    args.lines, args.words, args.vocab_size = 40, 50, 300
    monkeypatch.setattr("sys.argv", ["pretrain", *map(str, gpu_pretraining.options_of(args))])
    (parsed,) = parse_arguments([PretrainArguments], None)
    assert parsed.mixed_precision == "bf16" and parsed.dataset_name == [str(tmp_path / "generated.txt")]


@pytest.mark.slow
def test_every_part_runs(tmp_path):
    found, messages = measure(tmp_path)
    assert [part["part"] for part in found["parts"]] == list(gpu.parts())
    assert [part["error"] for part in found["parts"]] == [None] * len(found["parts"])
    rows = {part["part"]: part["rows"] for part in found["parts"]}
    assert all(rows.values())
    proved = [row for name, part in rows.items() if name.startswith("oracles-") for row in part]
    assert len(proved) == 3 * 4 * 2 * 3 and all(row["right"] for row in proved)
    # Errors are of implementations that cannot run here; none is measured under another one's name.
    failures = {row["way"].split(",")[0] for part in rows.values() for row in part if "error" in row}
    assert failures <= {"triton", "PyTorch's linear_cross_entropy"}
    assert all(row["ms_per_token"] > 0 for row in rows["decoding"])
    assert [row["step"] for row in rows["recipe"]] == [1, 2]
    page = (tmp_path / "gpu.md").read_text()
    assert page.splitlines()[2] == gpu.NOT_A_GPU and table_rows(page) == table_rows(messages)


@pytest.mark.slow
def test_a_part_that_fails_says_so(tmp_path):
    """The others go on, and the program ends well. The rows of the oracles are not lost."""
    (tmp_path / "generated.txt").mkdir(parents=True)
    found, messages = measure(tmp_path, "--parts", "recipe", "oracles-eager")
    first, second = found["parts"]
    assert first["error"].startswith("IsADirectoryError") and first["rows"] == []
    assert second["error"] is None and len(second["rows"]) == 24
    assert f"recipe ({first['error']})" in (tmp_path / "gpu.md").read_text()
    assert "IsADirectoryError" in (tmp_path / "gpu-recipe.log").read_text()


@pytest.mark.slow
def test_a_killed_program_leaves_its_rows(tmp_path):
    options = ["--device", "cpu", "--quick", "--parts", "oracles-eager", "decoding", "--output_dir", tmp_path]
    process, figures = start_script("benchmark", "gpu", *options), tmp_path / "gpu.json"
    while not ((tmp_path / "gpu.md").exists() and json.loads(figures.read_text())["parts"][0]["rows"]):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert json.loads(figures.read_text())["parts"][0]["rows"] and "| eager " in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_ended(tmp_path):
    """So are the parts for which no time is left."""
    found, _ = measure(tmp_path, "--parts", "recipe", "steps", "--minutes", 0.05)
    first, second = found["parts"]
    assert first["error"].startswith("it was ended after 3 s")
    assert (second["part"], second["rows"], second["error"]) == ("steps", [], "no time was left for it")


def test_oracles_find_what_is_wrong(monkeypatch):
    """NaN that is left in fresh memory, and an implementation that raises."""

    def unwritten(implementation, causal, v, *others):
        found = true(implementation, causal, v, *others)
        return found if implementation == "eager" else [torch.empty_like(x) for x in found]

    def raising(implementation, *others):
        return true(implementation, *others) if implementation == "eager" else 1 / 0

    true = gpu_products.with_gradients
    for way, error in ((unwritten, None), (raising, "ZeroDivisionError: division by zero")):
        monkeypatch.setattr(gpu_products, "with_gradients", way)
        rows = list(gpu_products.oracles("fused", gpu.sized(ARGS)))
        assert len(rows) == 24 and not any(row["right"] for row in rows)
        assert {row.get("error") for row in rows} == {error} and json.dumps(rows, allow_nan=False)
        assert {row["right"] for row in gpu_products.summary(rows)} == {0}


def test_log_of_pretraining():
    log = "training:  50%|xx | 1/2 [00:00<00:00, 49.53step/s, loss 6.864, lr 1.2e-07, 25977 tokens/s]\n"
    assert gpu_pretraining.LOGGED.findall(log) == [("1", "6.864", "25977")]
