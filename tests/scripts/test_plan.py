"""The counts of `tnn plan` against what steps take, and against the formulas of the pages."""

import json

import pytest

from helpers.models import VARIANTS
from helpers.scripts import run, run_ranks
from modeling_tnn import TnnConfig
from tnn_scripts.planning.steps import Settings, count, measure_all

SIZES = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "rpe_dim": 16, "rpe_layers": 2, "decay": 0.9}
SIZES |= {"rtf_state_size": 8, "ski_rank": 8, "hidden_dropout_prob": 0.0}
OPTIONS = {
    "bf16": {"precision": "bf16"},
    "checkpointing": {"gradient_checkpointing": True},
    "muon": {"optim": "muon"},
    "batch": {"batch": 3},
}


def plan_of(engine: str = "ddp", processes: int = 1, length: int = 512, options: dict | None = None, **fields):
    config = TnnConfig(max_position_embeddings=length, **SIZES | fields)
    return Settings(config, length, engine, processes, **options or {})


def check(counted: dict, measured: dict, tolerance: float):
    for name in ("peak", "kept"):
        assert counted[name] == pytest.approx(measured[name], rel=tolerance), (name, counted, measured)


@pytest.mark.parametrize(("tno_type", "causal"), [one for one in VARIANTS if one[0] in ("rpe", "fd", "ski", "rtf")])
def test_operators(tno_type, causal):
    """One process: what its allocator gives out at most in a step, and what the forward pass keeps."""
    plan = plan_of(tno_type=tno_type, causal=causal, hidden_dropout_prob=0.1)
    check(count(plan), measure_all([plan])[0], 0.02)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    plan = plan_of(options=OPTIONS[name])
    check(count(plan), measure_all([plan])[0], 0.02)


def test_long_text():
    """In windows, and in several chunks."""
    plan = plan_of(length=20000, num_hidden_layers=1)
    check(count(plan), measure_all([plan])[0], 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes(processes, tmp_path):
    """Real processes with gloo, which takes memory of its own for sums in shards."""
    fields = ",".join(f"{name}={value}" for name, value in SIZES.items())
    file = tmp_path / "plan.json"
    run_ranks(
        "plan", "--config_overrides", fields, "--lengths", 512, "--measure", "--output_file", file, count=processes
    )
    for row in json.loads(file.read_text())["rows"]:
        check(row, {name: row[f"measured_{name}"] for name in ("peak", "kept")}, 0.1)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_formula_of_the_page(precision, dropout):
    """Bytes that a token leaves for the backward pass in a layer, see docs/pages/guides/scaling.md."""
    d, length = 64, 256
    counts = [
        count(
            plan_of(
                length=length,
                num_hidden_layers=layers,
                hidden_dropout_prob=dropout,
                intermediate_size=96,
                options={"precision": precision, "batch": 64},
            )
        )["kept"]
        for layers in (2, 3)
    ]
    channels, inner, size = 3 * d, 96, 4 if precision == "no" else 2
    expected = 16 * d + size * (4 * channels + 3 * inner) + (2 * d if dropout else 0)
    assert (counts[1] - counts[0]) / (64 * length) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("processes", [2, 8])
def test_what_is_sent(processes):
    """The formulas of docs/pages/guides/parallel.md, in numbers that a process sends to others."""
    layers, length, d, channels = 3, 512, 64, 192
    share = (processes - 1) / processes
    found = {engine: count(plan_of(engine, processes))["sent_numbers"] for engine in ("ddp", "fsdp2", "tp", "sp")}
    parameters = count(plan_of())["parts"]["weights"] // 4
    assert found["ddp"] == pytest.approx(2 * parameters * share, rel=0.001)
    assert found["fsdp2"] == pytest.approx(3 * parameters * share, rel=0.05)
    exchanges = layers * 4 * length * channels / processes * share
    assert found["sp"] == pytest.approx(exchanges + 2 * parameters * share, rel=0.001)
    assert found["tp"] > layers * 8 * length * d * share


def test_program(tmp_path):
    file = tmp_path / "plan.json"
    fields = ",".join(f"{name}={value}" for name, value in SIZES.items())
    done = run("plan", "--config_overrides", fields, "--lengths", 64, "--engines", "ddp", "sp", "--processes", 4,
               "--device_memory", 0.005, "--output_file", file)  # fmt: skip
    ddp, sp = json.loads(file.read_text())["rows"]
    assert (ddp["tokens"], sp["tokens"]) == (256, 64)
    assert ddp["peak"] == sum(ddp[part] for part in ("weights", "gradients", "optimizer", "activations", "working"))
    assert sp["peak"] < ddp["peak"]
    assert ddp["fewest_devices"] is None or ddp["fewest_devices"] == 1
    assert "| ddp " in done.stdout


def test_refusals():
    for options, message in {
        ("--processes", 0): "--processes must be at least 1, got 0",
        ("--lengths", 1): "--lengths must be at least 2, got 1",
        ("--measure", "--processes", 3): "--processes must be the number that torchrun has started, 1, got 3",
    }.items():
        assert message in run("plan", *options, check=False).stderr
