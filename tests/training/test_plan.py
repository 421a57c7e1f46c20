"""The counts of `tnn plan` against what PyTorch's allocator gives out in the same step, with each engine."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from helpers.models import slow
from helpers.scripts import read, run_script
from modeling_tnn import TnnConfig
from tnn_programs.cli.training_arguments import PretrainArguments, read_presets
from tnn_programs.training import plan

SIZES = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "rpe_dim": 16, "rpe_layers": 2, "decay": 0.9}
FIELDS = ",".join(f"{name}={value}" for name, value in SIZES.items())


def measured_peak(args: PretrainArguments, config: TnnConfig, engine: str, processes: int) -> int:
    """The most bytes that the allocator has given out during the step, on tensors with values."""
    with plan.pretended_gpus(processes) as mesh:
        return peak_of(plan.training_step(args, config, engine, mesh))


def peak_of(step: Iterator) -> int:
    """The most bytes that the allocator has given out at a time after what `step` yields first."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        next(step)
        with record_function("start"):
            list(step)
    events = profiler.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == "start")
    total = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total) if event.start_ns() > start else 0
    return peak


def real_ddp(model: PreTrainedModel, *_) -> tuple:
    """DDP, whose messages go nowhere either."""

    def without_message(state, bucket) -> torch.futures.Future[torch.Tensor]:
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    copies = DistributedDataParallel(model)
    copies.register_comm_hook(None, without_message)
    return copies, nullcontext()


@pytest.mark.parametrize(
    ("engine", "processes", "fields", "options"),
    [
        ("", 1, {}, {"mixed_precision": "bf16"}),
        *slow(
            ("sp", 4, {}, {}),
            ("", 1, {"tno_type": "rtf", "rtf_state_size": 8}, {"gradient_checkpointing": True}),
            ("ddp", 4, {"tno_type": "ski", "ski_rank": 8, "causal": False}, {"objective": "mlm"}),
            ("fsdp2", 4, {"tno_type": "fd", "hidden_size": 256}, {"mixed_precision": "bf16"}),
        ),
    ],
)
def test_counted_is_measured(engine, processes, fields, options, monkeypatch):
    """All but DDP, which takes no tensors without values, run the same code in both."""
    config = TnnConfig(max_position_embeddings=512, **SIZES | fields)
    args = PretrainArguments(block_size=512, per_device_train_batch_size=3, learning_rate=1e-3, **options)
    counted = plan.count(args, config, engine, processes)
    monkeypatch.setitem(plan.ENGINES, "ddp", real_ddp)
    assert counted["peak"] == pytest.approx(measured_peak(args, config, engine, processes), rel=0.01)
    assert counted["peak"] == sum(counted[part] for part in ("states", "activations", "working"))


# The kinds of layers of Evo 2, each alone and all in one model.
KINDS = {
    "explicit": {"layer_types": ["explicit"], "explicit_length": 7, "num_filter_groups": 8},
    "exponential": {"layer_types": ["exponential"], "num_modes": 16, "hyena_skip": True},
    "attention": {"layer_types": ["full_attention"], "num_attention_heads": 2},
    "all": {"layer_types": ["explicit", "exponential", "full_attention"], "hidden_dropout_prob": 0.0},
}
RTF = {"tno_type": "rtf", "rtf_constraint": "l1_montel"}  # whose poles are looked at in a long prompt


@pytest.mark.parametrize(
    ("kind", "length", "dtype", "on_cpu"),
    [("all", 3000, "bfloat16", True), *slow(*((kind, 20_000, "bfloat16", True) for kind in KINDS)),
     *slow(("all", 20_000, "float32", True), ("all", 3000, "bfloat16", False), ("rtf", 20_000, "float32", False))],
)  # fmt: skip
def test_counted_reading_is_measured(kind, length, dtype, on_cpu):
    """Also where the state is made from a long prompt. Of a CPU, the code of a CPU runs."""
    fields = {"num_hidden_layers": 1, "toeplitz_mixer": "hyena", "gtu_expansion": 1, "norm_type": "rmsnorm"}
    fields |= {"num_hidden_layers": 3} if kind == "all" else {}
    config = TnnConfig(vocab_size=300, hidden_size=64, **fields | (KINDS | {"rtf": RTF})[kind])
    args = PretrainArguments(block_size=length, per_device_train_batch_size=2, learning_rate=1e-3)
    counted = plan.count_reading(args, config, getattr(torch, dtype), on_cpu)
    with nullcontext() if on_cpu else plan.pretended_gpus(1):
        step = plan.reading(args, config, getattr(torch, dtype))
        next(step)
        assert counted["peak"] == pytest.approx(peak_of(step), rel=0.01)
    assert counted["peak"] == sum(counted[part] for part in ("weights", "cache", "working"))


@pytest.mark.slow
def test_real_values(tmp_path):
    """The head of a preset, the memory of which grows with the length; sequences of values are not divided."""
    for name in ("tnn-forecaster", "tnn-speech-commands"):
        run_script("plan", f"--config_name {name} --lengths 64 128 --processes 1 2 --engines ddp",
                   f"--output_file {tmp_path}/plan.json")  # fmt: skip
        rows = read(tmp_path, "plan")["rows"]
        assert {row["parameters"] for row in rows} == {read_presets()[name].parameters}
        assert rows[0]["peak"] < rows[2]["peak"] and rows[0]["flops_per_token"] > 3 * rows[0]["parameters"]
    run_script("plan", f"--config_name tnn-forecaster --lengths 64 --read --output_file {tmp_path}/plan.json")
    assert read(tmp_path, "plan")["rows"][0]["peak"] < rows[0]["peak"]
    with pytest.raises(SystemExit, match="--engines must be ddp or fsdp2 for a model of real values, got sp"):
        run_script("plan", "--config_name tnn-forecaster --processes 2")


def test_program(tmp_path, capsys):
    """One row without an engine for one GPU; the speed is the share of the peak over the operations of a token."""
    file = tmp_path / "plan.json"
    run_script("plan", f"--config_overrides {FIELDS} --lengths 64 600 --processes 1 2 --engines sp --gpu A100",
               f"--device_memory 0.02 --model_flop_use 0.1 --output_file {file}")  # fmt: skip
    rows = read(tmp_path, "plan")["rows"]
    assert [(row["engine"], row["gpus"], row["length"]) for row in rows] == [
        (engine, gpus, length) for length in (64, 600) for engine, gpus in (("", 1), ("sp", 2))
    ]
    assert [row["fits"] for row in rows] == ["yes", "yes", "no", "yes"]
    assert rows[1]["tokens_per_second"] == round(2 * 0.1 * 19.5e12 / rows[1]["flops_per_token"])
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit, match="must be a model of sequences, got tnn-image-tiny"):
        run_script("plan", "--config_name tnn-image-tiny --objective mlm --lengths 196")
    for text in (f"{rows[0]['parameters']:,} parameters", "10.0% of the peak of A100", f"{rows[2]['peak']:,.2f}"):
        assert text in shown
