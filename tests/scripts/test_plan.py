"""The counts of `tnn plan` against what steps take, and against the formulas of the pages."""

import json

import pytest

from helpers.models import VARIANTS
from helpers.scripts import ROOT, run, run_ranks
from modeling_tnn import TnnConfig, TnnForCausalLM
from tnn_scripts.planning import steps
from tnn_scripts.planning.steps import Settings, count, measure_all
from tnn_scripts.runs import plan

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
    settings = plan_of(tno_type=tno_type, causal=causal, hidden_dropout_prob=0.1)
    check(count(settings), measure_all([settings])[0], 0.02)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    settings = plan_of(options=OPTIONS[name])
    check(count(settings), measure_all([settings])[0], 0.02)


def test_long_text():
    """In windows, and in several chunks."""
    settings = plan_of(length=20000, num_hidden_layers=1)
    check(count(settings), measure_all([settings])[0], 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
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


def test_what_is_sent():
    """The formulas of docs/pages/guides/parallel.md, in numbers that a process sends to others."""
    layers, length, d, channels, processes = 3, 512, 64, 192, 4
    share = (processes - 1) / processes
    found = {engine: count(plan_of(engine, processes))["sent_numbers"] for engine in ("ddp", "fsdp2", "tp", "sp")}
    parameters = found["ddp"] / share / 2
    assert parameters == TnnForCausalLM(plan_of().config).num_parameters()
    assert found["fsdp2"] == pytest.approx(3 * parameters * share, rel=0.05)  # shards of one size
    exchanges = layers * 4 * length * channels / processes * share
    assert found["sp"] == pytest.approx(exchanges + 2 * parameters * share, rel=0.001)
    # A sum of embeddings, one of gradients of the head's inputs, and all logits.
    ends = 2 * 2 * length * d + length * SIZES["vocab_size"]
    assert found["tp"] == pytest.approx((layers * 12 * length * d + ends) * share, rel=0.01)


DEEP = [(engine, some) for engine in ("ddp", "fsdp2", "tp", "sp") for some in (False, True)]
DEEP = [pytest.param(*one, marks=[] if one == ("sp", True) else pytest.mark.exhaustive) for one in DEEP]


@pytest.mark.parametrize(("engine", "saving"), DEEP)
def test_deep_models(engine, saving, monkeypatch):
    """Three and four layers say what nine take."""
    options = {"gradient_checkpointing": True, "precision": "bf16"} if saving else {}
    settings = plan_of(engine, 4, num_hidden_layers=9, options=options)
    found = count(settings)
    monkeypatch.setattr(steps, "FEW", (9, 9))
    everything = count(settings)
    for name in ("peak", "kept", "sent_numbers"):
        assert found[name] == pytest.approx(everything[name], rel=0.01), name


def figures(name: str) -> list[dict]:
    return json.loads((ROOT / "docs" / "figures" / f"{name}.json").read_text())["rows"]


@pytest.mark.parametrize("engine", ["sp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_tables_of_the_page(engine):
    """One row of each, counted again."""
    memory, sent = (next(row for row in figures(name) if row["length"] == 2048 and row["shape"] == "45M")
                    for name in ("scaling-memory", "scaling-sent"))  # fmt: skip
    for checkpointing, expected in zip((False, True), memory[engine], strict=True):
        config = plan.configuration(memory["config_name"], memory["config_overrides"], memory["length"])
        found = count(Settings(config, 2048, engine, 8, 1, "bf16", gradient_checkpointing=checkpointing))
        assert found["peak"] / 2**30 == pytest.approx(expected, abs=0.01)
        assert checkpointing or found["sent_bytes"] / 2**30 == pytest.approx(sent[engine], abs=0.01)


def test_measured_table():
    """Every count of the page is within a tenth of what was measured."""
    pairs = [value for row in figures("scaling-measured") for value in row.values() if isinstance(value, list)]
    assert len(pairs) > 30
    for counted, measured in pairs:
        assert counted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("states", "activations", "fewest"), [(10, 10, 1), (100, 10, 2), (10, 1000, 16), (0, 50, 1)])
def test_fewest_devices(states, activations, fewest, monkeypatch):
    """What is divided, in GiB; 72 of them fit."""
    monkeypatch.setattr(plan, "count", lambda settings: {"peak": (states + activations) / settings.processes})
    given = plan_of("fsdp2+sp", 8)
    assert plan.fewest_devices(given, plan.count(given)["peak"], 72) == fewest


def test_devices_that_do_not_help(monkeypatch):
    monkeypatch.setattr(plan, "count", lambda settings: {"peak": 80 + 100 / settings.processes})
    assert plan.fewest_devices(plan_of("sp", 8), 92.5, 72) is None
    assert plan.fewest_devices(plan_of("ddp", 8), 92.5, 72) is None
    assert plan.fewest_devices(plan_of("ddp", 8), 70, 72) == 1


def test_program(tmp_path):
    file = tmp_path / "plan.json"
    fields = ",".join(f"{name}={value}" for name, value in SIZES.items())
    done = run("plan", "--config_overrides", fields, "--lengths", 64, "--engines", "ddp", "sp", "--processes", 4,
               "--device_memory", 1, "--output_file", file)  # fmt: skip
    ddp, sp = json.loads(file.read_text())["rows"]
    assert (ddp["tokens"], sp["tokens"]) == (256, 64)
    assert ddp["peak"] == sum(ddp[part] for part in ("weights", "gradients", "optimizer", "activations", "working"))
    assert sp["peak"] < ddp["peak"] and ddp["fewest_devices"] == sp["fewest_devices"] == 1
    table = {line.split(" ", 2)[1]: line.split("|") for line in done.stdout.splitlines() if line.startswith("| ")}
    every = [name.strip() for name in table["engine"]].index("all devices")
    assert float(table["ddp"][every]) == pytest.approx(4 * ddp["peak"] / 2**30, abs=6e-4)
    parameters = f"{TnnForCausalLM(plan.configuration('tnn-causal', fields, 64)).num_parameters():,} parameters"
    for said in (parameters, "--processes 4", "float32", "GiB per device", "sent per step", "fewest devices"):
        assert said in done.stdout


def test_length_of_the_configuration():
    """Fields that follow from the length are derived again, unless they are given."""
    assert plan.configuration("tnn-causal-fd", None, 4096).fd_resolution == 8192
    assert plan.configuration("tnn-causal-fd", "fd_resolution=1024", 4096).fd_resolution == 1024
    assert plan.configuration("tnn-causal-fd", None, 64).max_position_embeddings == 512


def test_only_what_follows_from_the_length_changes(tmp_path):
    """The width of a preset's GLU and the layers of a saved hybrid stay."""
    assert plan.configuration("tnn-causal-s4-rtf", None, 4096).intermediate_size == 2730
    fields = {"num_hidden_layers": 2, "layer_types": ["toeplitz", "full_attention"], "intermediate_size": 48}
    saved = TnnConfig(**SIZES | fields)
    saved.save_pretrained(tmp_path)
    longer = plan.configuration(str(tmp_path), None, 4096)
    assert longer.layer_types == saved.layer_types
    assert (longer.intermediate_size, longer.max_position_embeddings) == (48, 4096)


def test_refusals():
    for options, message in {
        ("--processes", 0): "--processes must be at least 1, got 0",
        ("--lengths", 1): "--lengths must be at least 2, got 1",
        ("--measure", "--processes", 3): "--processes must be the number that torchrun has started, 1, got 3",
    }.items():
        assert message in run("plan", *options, check=False).stderr
