"""The measurement of a GPU, on the CPU: every part runs, and what fails says so."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationMixin, masking_utils

from helpers.scripts import run, table_rows
from modeling_tnn.benchmarks import gpu, gpu_models
from modeling_tnn.benchmarks import measure as measurements


@pytest.fixture
def measure(tmp_path):
    def measure(*options) -> tuple[list[dict], str]:
        """The parts in the file, and the tables that are shown."""
        given = ["--device", "cpu", "--quick", "--repeats", 1, "--output_dir", tmp_path, *options]
        shown = run("benchmark", "gpu", *given).stdout
        return json.loads((tmp_path / "gpu.json").read_text())["parts"], shown

    return measure


def test_every_part_runs(measure, tmp_path):
    parts, shown = measure()
    rows = {part["part"]: part["rows"] for part in parts}
    assert list(rows) == list(gpu.PARTS) and all(rows.values()) and not any(part["error"] for part in parts)
    # Errors are of what cannot run here; none is measured under another one's name.
    failures = {row["way"].split(",")[0] for part in rows.values() for row in part if "error" in row}
    assert failures <= {"triton", "PyTorch's linear_cross_entropy"}
    assert all(row["ms_per_token"] > 0 for row in rows["decoding"])
    page = (tmp_path / "gpu.md").read_text()
    assert page.splitlines()[2] == gpu.NOT_A_GPU and table_rows(page) == table_rows(shown)


def test_what_fails_says_so_and_the_others_go_on(measure, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_models, "step", lambda *given: 1 / 0)
    (steps,), _ = measure("--parts", "steps")
    assert {row["error"] for row in steps["rows"]} == {"ZeroDivisionError: division by zero"}
    assert len(steps["rows"]) > 3


def test_no_row_begins_after_the_time(measure, monkeypatch, tmp_path):
    """A part that had no time is in the file too."""

    def slow(args):
        yield {"way": "slow"}
        time.sleep(0.5)
        yield {"way": "slow"}
        raise AssertionError("a row after the end")

    monkeypatch.setitem(gpu.PARTS, "losses", ("A slow one", slow))
    parts, shown = measure("--parts", "losses", "steps", "--minutes", 0.5 / 60)
    assert [(part["part"], len(part["rows"])) for part in parts] == [("losses", 2), ("steps", 0)]
    for part in parts:
        assert f"{part['part']} (no time was left after {len(part['rows'])} rows)" in shown


@pytest.mark.slow
def test_every_part_has_its_real_arguments(monkeypatch):
    """Those of a GPU, on the meta device, where what compiles, has values or decodes is replaced.

    Only what this machine or its PyTorch does not have is an error.
    """
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    monkeypatch.setattr(
        measurements, "measure", lambda ways, args: {way: [(run(), 1.0)[1]] for way, run in ways.items()}
    )

    def generate(model, ids, max_new_tokens, streamer, **options):
        model(ids, use_cache=False)
        for _ in range(max_new_tokens + 1):
            streamer.put(None)

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    sizes = {name: values[False] for name, values in gpu.SIZES.items()}
    args = SimpleNamespace(device="meta", threads=1, repeats=1, quick=False, **sizes)
    rows = {name: list(rows_of(args)) for name, (_, rows_of) in gpu.PARTS.items()}
    errors = {error for part in rows.values() for row in part if (error := row.get("error"))}
    assert all(error.startswith(("not measured: it needs", "AttributeError: module 'torch.nn")) for error in errors)
    assert [row["length"] for row in rows["steps"]] == [n for n in (2048, 512, 8192) for _ in gpu_models.WAYS]
    assert {(row["way"], row["cache"], row["batch_size"]) for row in rows["decoding"]} == {
        (way, cache, batch) for way, cache in gpu_models.DECODED for batch in (1, 64)
    }
