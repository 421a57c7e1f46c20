"""The measurement of a GPU, on the CPU: every part runs, and what fails says so."""

import json
from types import SimpleNamespace

import pytest
import torch

from helpers.scripts import start_script, table_rows
from tnn_scripts.benchmarks import gpu, gpu_pretraining, gpu_products

ARGS = SimpleNamespace(device="cpu", threads=1, repeats=1, quick=True)


def measure(folder, *options) -> tuple[dict, str]:
    """The figures and the messages, from a process of its own: parts are forks of one that imports all."""
    options = ["--device", "cpu", "--quick", "--repeats", 1, "--output_dir", folder, *options]
    process = start_script("benchmark", "gpu", *options)
    messages, _ = process.communicate(timeout=300)
    assert process.returncode == 0, messages
    return json.loads((folder / "gpu.json").read_text()), messages


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
    failures = {row["way"].split()[0] for part in rows.values() for row in part if "error" in row}
    assert failures <= {"triton"}
    assert {row["cache"] for row in rows["decoding"]} == {"dynamic", "static, compiled"}
    assert all(row["ms_per_token"] > 0 for row in rows["decoding"])
    assert {row["way"] for row in rows["training"]} >= {"auto bf16", "gpt2 bf16", "llama bf16", "mamba2 bf16"}
    assert [row["step"] for row in rows["recipe"]] == [row["step"] for row in rows["pretrain"]] == [1, 2]
    page = (tmp_path / "gpu.md").read_text()
    assert page.splitlines()[2] == gpu.NOT_A_GPU and table_rows(page) == table_rows(messages)


@pytest.mark.slow
def test_a_part_that_fails_says_so(tmp_path):
    """The others go on, and the program ends well. The rows of the oracles are not lost."""
    (tmp_path / "generated.txt").mkdir(parents=True)
    found, messages = measure(tmp_path, "--parts", "pretrain", "oracles-eager")
    first, second = found["parts"]
    assert first["error"].startswith("IsADirectoryError") and first["rows"] == []
    assert second["error"] is None and len(second["rows"]) == 24
    assert f"pretrain ({first['error']})" in (tmp_path / "gpu.md").read_text()
    assert "IsADirectoryError" in (tmp_path / "gpu-pretrain.log").read_text()


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_ended(tmp_path):
    """So are the parts for which no time is left."""
    found, _ = measure(tmp_path, "--parts", "recipe", "memory", "--minutes", 0.05)
    first, second = found["parts"]
    assert first["error"].startswith("it was ended after 3 s")
    assert second == gpu.failed("memory", "no time was left for it")


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
        rows = list(gpu_products.oracles("fused", ARGS))
        assert len(rows) == 24 and not any(row["right"] for row in rows)
        assert {row.get("error") for row in rows} == {error} and json.dumps(rows, allow_nan=False)
        assert {row["right"] for row in gpu_products.summary(rows)} == {0}


def test_log_of_pretraining():
    log = "training:  50%|xx | 1/2 [00:00<00:00, 49.53step/s, loss 6.864, lr 1.2e-07, 25977 tokens/s]\n"
    assert gpu_pretraining.LOGGED.findall(log) == [("1", "6.864", "25977")]
