"""The measurement of a GPU, on the CPU: every part runs, what fails says so, and only what was right gets a row."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.scripts import start_script, table_rows
from modeling_tnn import toeplitz_measured
from modeling_tnn.toeplitz_measured import Row
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
    assert len(proved) == 5 * 4 * 2 * 3 and all(row["right"] for row in proved)
    # Errors are of implementations that cannot run here; none is measured under another one's name.
    failures = {row["way"].split()[0] for part in rows.values() for row in part if "error" in row}
    assert failures <= {"triton", "cudnn"}
    assert {row["cache"] for row in rows["decoding"]} == {"dynamic", "static, compiled"}
    assert all(row["ms_per_token"] > 0 for row in rows["decoding"])
    assert {row["way"] for row in rows["training"]} >= {"auto bf16", "gpt2 bf16", "llama bf16", "mamba2 bf16"}
    assert [row["step"] for row in rows["recipe"]] == [row["step"] for row in rows["pretrain"]] == [1, 2]
    page = (tmp_path / "gpu.md").read_text()
    assert page.splitlines()[2] == gpu.NOT_A_GPU and table_rows(page) == table_rows(messages)
    # Nothing was measured on a GPU, so the table stays as it is.
    assert (tmp_path / "toeplitz_measured.py").read_text() == Path(toeplitz_measured.__file__).read_text()


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


def oracle_rows(name: str, dtype: str, right: bool = True, by: str | None = None) -> dict:
    row = {"implementation": name, "dtype": dtype, "computed_by": by or name, "right": right}
    return {"part": f"oracles-{name}", "error": None, "rows": [row]}


def product_rows(dtype: str, speeds: dict[str, dict[int, float]]) -> dict:
    rows = [
        {"dtype": dtype, "taps": taps, "implementation": name, "fused_over_this": speed}
        for name, by_taps in speeds.items()
        for taps, speed in by_taps.items()
    ]
    return {"part": "products", "error": None, "rows": rows}


FAST = {"fused": dict.fromkeys((128, 256, 512), 1.0), "triton": {128: 3.0, 256: 2.0, 512: 0.5}}


@pytest.mark.parametrize(
    ("triton", "rows"),
    [
        ({}, (Row("bfloat16", 256, "triton"),)),
        ({"right": False}, ()),
        ({"by": "fused"}, ()),  # another one computed
    ],
)
def test_only_what_was_right_gets_a_row(triton, rows):
    proofs = [oracle_rows("fused", "bfloat16"), oracle_rows("triton", "bfloat16", **triton)]
    assert gpu_products.fastest_rows([*proofs, product_rows("bfloat16", FAST)]) == rows
    assert gpu_products.fastest_rows([product_rows("bfloat16", FAST)]) == ()  # nothing was proved
    proofs[1]["error"] = "it was ended after 120 s"  # and the cases that were left may be wrong
    assert gpu_products.fastest_rows([*proofs, product_rows("bfloat16", FAST)]) == ()


def test_rows_of_neighbours_are_one():
    speeds = {"fused": dict.fromkeys((128, 256, 512, 1024), 1.0), "triton": {128: 2.0}, "cudnn": {512: 2.0, 1024: 3.0}}
    proofs = [oracle_rows(name, "float16") for name in speeds]
    assert gpu_products.fastest_rows([*proofs, product_rows("float16", speeds)]) == (
        Row("float16", 128, "triton"), Row("float16", 256, "fused"), Row("float16", 1024, "cudnn"),
    )  # fmt: skip


def test_table_of_a_device():
    """The rows of other devices stay."""
    before = SimpleNamespace(__file__=toeplitz_measured.__file__, MEASURED={"sm_80": (Row("float16", 64, "cudnn"),)})
    found = {"sm_90": (Row("bfloat16", 256, "triton"), Row("float32", 64, "cudnn"))}
    space = {"__name__": "table"}
    exec(gpu_products.measured_source(before, found), space)  # as the file would be imported
    assert {name: tuple(map(tuple, rows)) for name, rows in space["MEASURED"].items()} == {
        "sm_80": (("float16", 64, "cudnn"),),
        "sm_90": (("bfloat16", 256, "triton"), ("float32", 64, "cudnn")),
    }


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
