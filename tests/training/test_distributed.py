"""Several processes: accelerate's configurations; two processes, and shards by FSDP2, do what one process does."""

import functools
import json
import pickle
import shutil

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from torch.distributed.checkpoint import FileSystemWriter, save

from helpers import scripts
from helpers.hybrids import HYBRIDS
from helpers.models import tiny_config
from helpers.scripts import (
    ROOT,
    Malicious,
    assert_same_weights,
    read,
    run_ranks,
    run_script,
    words,
    write_config,
    write_text,
)
from tnn_programs.training.processes import check_tables

FOLDER = ROOT / "configuration" / "accelerate"
CONFIGS = {"cpu": "NO", "cpu-gloo": "MULTI_GPU", "cpu-fsdp2": "FSDP", "gpu": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}


def test_accelerate_reads_every_configuration():
    """It refuses fields that it does not know."""
    assert {path.stem for path in FOLDER.glob("*.yaml")} == CONFIGS.keys()
    for name, kind in CONFIGS.items():
        file = FOLDER / f"{name}.yaml"
        config, given = load_config_from_file(str(file)), yaml.safe_load(file.read_text())
        assert config.distributed_type == DistributedType(kind)
        assert {key: getattr(config, key) for key in given} == given
        args = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
        args, _, _ = _validate_launch_command(args)
        assert (args.num_processes, args.mixed_precision) == (given["num_processes"], given["mixed_precision"])
        assert args.use_fsdp == name.endswith("fsdp2")


@pytest.mark.slow
def test_two_processes_of_pretrain_are_one_and_resume(tmp_path, monkeypatch):
    """The same global batch in one process and in two; masked, so that they have unequal numbers of targets."""
    config, text = write_config(tmp_path / "config", causal=False, hidden_dropout_prob=0.0), tmp_path / "text.txt"
    options = [f"--objective mlm --config_name {config} --train_file {write_text(text)} --max_steps 12 --eval_steps 5",
               "--learning_rate 0.01 --adam_epsilon 1e-4 --checkpointing_steps 6",
               "--per_device_eval_batch_size 5"]  # fmt: skip
    run_script("pretrain", *options, f"--output_dir {tmp_path}/one --per_device_train_batch_size 6")
    options += ["--global_batch_tokens 192"]
    two = f"--output_dir {tmp_path}/two"
    with scripts.start_script("pretrain", *options, two, launcher=scripts.two_processes()) as process:
        output, _ = process.communicate(timeout=120)
    assert (tmp_path / "two" / "metrics.json").exists(), output
    one, two = (read(tmp_path / name, "metrics") for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2) and one["tokens"] == two["tokens"]
    for first, second in zip(one["evaluations"], two["evaluations"], strict=True):
        assert first == pytest.approx(second, rel=1e-5)
    assert_same_weights(tmp_path / "one", tmp_path / "two", tolerance=2e-5)
    shutil.copytree(tmp_path / "two" / "checkpoint-6", tmp_path / "resumed" / "checkpoint-6")
    run_ranks("pretrain", *options, f"--output_dir {tmp_path}/resumed --resume_from_checkpoint latest")
    assert_same_weights(tmp_path / "two", tmp_path / "resumed")
    alone = type("One", (), {"num_processes": 1})
    monkeypatch.setattr("tnn_programs.training.pretrain.Accelerator", lambda **options: alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2 processes were started, accelerate sees 1"):  # and one folder
        run_script("pretrain", *options, f"--output_dir {tmp_path}/out")


# Beside gradients that are rounding alone, Adam would divide rounding by rounding.
SMALL = "--max_steps 3 --save_strategy no --report_to none --use_cpu --learning_rate 0.01 --adam_epsilon 1e-4"
MODEL = "--config_overrides hidden_size=8,num_hidden_layers=1,intermediate_size=8,rpe_dim=4,hidden_dropout_prob=0"
PROGRAMS = {
    "run_ablation": f"{MODEL},max_position_embeddings=16,vocab_size=300 --dataset_name {ROOT}/LICENSE --variants rpe "
    "--eval_tokens 100",
    "run_synthetic": "--task delay --memory 4 --length 30 --max_train_samples 40 --max_eval_samples 10 "
    "--hidden_size 4 --num_hidden_layers 1 --state_sizes 2",
    # A batch norm would have the statistics of each process alone.
    "run_lra": f"{MODEL},classifier_dropout=0,norm_type=layernorm --task listops --config_name tnn-listops "
    "--max_train_samples 50",
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_two_processes_of_trainer_are_one(program, tmp_path):
    """The same rows in each step, so the same scores; one table and one file of results."""
    options = [PROGRAMS[program], SMALL]
    printed = scripts.run(program, *options, f"--per_device_train_batch_size 4 --output_dir {tmp_path}/one").stdout
    two = f"--per_device_train_batch_size 2 --output_dir {tmp_path}/two"
    (first, _), (second, _) = run_ranks(program, *options, two)
    one, two = ([row[0] for row in scripts.table_rows(text)] for text in (printed, first))
    assert not second.strip() and one == two
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    if program == "run_lra":
        assert two["test_accuracy"] == pytest.approx(one["test_accuracy"])
        assert_same_weights(tmp_path / "one", tmp_path / "two", tolerance=2e-5)
    else:
        assert two["settings"]["batch_size"] == one["settings"]["batch_size"] == 4
        figure = "perplexity" if program == "run_ablation" else "error"
        assert two["rows"][0][figure] == pytest.approx(one["rows"][0][figure], rel=1e-4)


def write_options(folder, **fields) -> list:
    """A run whose steps have six rows of unequal numbers of targets, three steps between two checkpoints."""
    config = write_config(folder / "config", causal=False, hidden_dropout_prob=0.0, **fields)
    text = write_text(folder / "text.txt")
    return words(f"--objective mlm --config_name {config} --train_file {text} --max_steps 6 --learning_rate 0.01",
                 "--checkpointing_steps 3 --eval_steps 5 --max_eval_blocks 7 --max_grad_norm 0.5")  # fmt: skip


def shard(*options, count=2, **settings) -> list[str]:
    return run_ranks("pretrain", *options, config="cpu-fsdp2", count=count, **settings)


def rows(number: int, passes: int = 1) -> str:
    return f"--per_device_train_batch_size {number} --gradient_accumulation_steps {passes}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    options = write_options(folder)
    run_script("pretrain", *options, f"--output_dir {folder}/one", rows(6))
    shard(*options, f"--output_dir {folder}/two", rows(3))
    return folder, options


@pytest.mark.slow
def test_two_shards_are_one_model(runs):
    folder, _ = runs
    one, two = read(folder / "one", "metrics"), read(folder / "two", "metrics")
    assert two["distributed_type"] == "FSDP"
    assert two["parameters_per_process"] == [two["parameters"] // 2] * 2
    assert (one["distributed_type"], one["parameters_per_process"]) == ("NO", [one["parameters"]])
    for first, second in zip(one["evaluations"], two["evaluations"], strict=True):
        assert first == pytest.approx(second, rel=1e-5)
    assert_same_weights(folder / "one", folder / "two", tolerance=2e-5)
    names = [{path.name for path in (folder / run).iterdir()} for run in ("one", "two")]
    assert names[0] == names[1]
    assert (folder / "one" / "config.json").read_text() == (folder / "two" / "config.json").read_text()


@pytest.mark.slow
def test_another_number_of_processes_resumes(runs):
    """The shards of two processes in three, with the same global batch; in one process they cannot be read."""
    folder, options = runs
    shutil.copytree(folder / "two" / "checkpoint-3", folder / "three" / "checkpoint-3")
    resumed = [*options, f"--output_dir {folder}/three", "--resume_from_checkpoint latest"]
    with pytest.raises(SystemExit, match="another run.\n  sharded must be True, got False"):
        run_script("pretrain", *resumed, rows(6))
    with pytest.raises(SystemExit, match="another run.\n  blocks_per_step must be 6, got 5\n  sharded"):
        run_script("pretrain", *resumed, rows(5))
    shard(*resumed, rows(1, passes=2), count=3)
    assert_same_weights(folder / "two", folder / "three", tolerance=1e-6)


@pytest.mark.slow
def test_the_same_processes_resume(runs, tmp_path):
    """Bit for bit; without shards, two processes go on from the checkpoint of one."""
    folder, options = runs
    for name, resumed, tolerance in (("two", shard, 0.0), ("one", functools.partial(run_ranks, "pretrain"), 2e-5)):
        shutil.copytree(folder / name / "checkpoint-3", tmp_path / name / "checkpoint-3")
        resumed(*options, f"--output_dir {tmp_path / name} --resume_from_checkpoint latest", rows(3))
        assert_same_weights(folder / name, tmp_path / name, tolerance)
    assert read(tmp_path / "one", "metrics")["distributed_type"] == "MULTI_CPU"


def test_a_table_of_shards_runs_nothing(tmp_path):
    """PyTorch reads it from an unrestricted pickle."""
    save({"weight": torch.zeros(3)}, storage_writer=FileSystemWriter(tmp_path / "shards"), no_dist=True)
    check_tables(tmp_path)
    victim = tmp_path / "victim"
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(Malicious(victim)))
    with pytest.raises(pickle.UnpicklingError, match="must hold sizes and places only, got pathlib.Path.touch"):
        check_tables(tmp_path)
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(torch.load))
    with pytest.raises(pickle.UnpicklingError, match="got torch"):
        check_tables(tmp_path)
    assert not victim.exists()


@pytest.mark.slow
def test_an_engine_that_is_not_in_use(runs, monkeypatch, tmp_path):
    """accelerate would copy the model to each process, or train in one, without a word."""
    for engine, message in (("FSDP", "FSDP was asked for, but accelerate runs NO with 1 process on cpu"),
                            ("DEEPSPEED", "does not run with DeepSpeed: .*fsdp2.yaml divides the same")):  # fmt: skip
        with monkeypatch.context() as patched, pytest.raises(SystemExit, match=message):
            patched.setenv(f"ACCELERATE_USE_{engine}", "true")
            run_script("pretrain", *runs[1], f"--output_dir {tmp_path}/out", rows(6))


# Trains two steps in bfloat16, and writes the dtypes of the weights while they are used.
IN_BFLOAT16 = """
import json, sys, torch
from modeling_tnn import TnnConfig, TnnForCausalLM, tno_rpe, modeling_tnn
from tnn_programs.training.processes import prepare
from tnn_programs.cli.training_arguments import PretrainArguments
from tnn_programs.training.pretrain import build_accelerator

accelerator, seen = build_accelerator(PretrainArguments()), {}
for name, owner in (("kernels", tno_rpe.RelativePositionEncoder), ("blocks", modeling_tnn.TnnGatedLinearUnit)):
    method = "features" if name == "kernels" else "forward"
    def recorded(self, *args, name=name, original=getattr(owner, method)):
        seen.setdefault(name, set()).update(str(p.dtype) for p in self.parameters())
        return original(self, *args)
    setattr(owner, method, recorded)
model = TnnForCausalLM(TnnConfig(**json.loads(sys.argv[1])))
model, optimizer = prepare(accelerator, model, torch.optim.AdamW(model.parameters()))
ids = torch.arange(22).view(2, 11)
for _ in range(2):
    accelerator.backward(model(ids, labels=ids).loss)
    optimizer.step()
print(json.dumps({name: sorted(dtypes) for name, dtypes in seen.items()}))
"""


@pytest.mark.slow
def test_what_makes_the_kernels_stays_in_float32():
    fields = json.dumps(tiny_config().to_diff_dict())
    outputs = run_ranks("-c", IN_BFLOAT16, fields, config="cpu-fsdp2", launcher=("--mixed_precision", "bf16"))
    for output, _ in outputs:
        assert json.loads(output.splitlines()[-1]) == {"kernels": ["torch.float32"], "blocks": ["torch.bfloat16"]}


# Fields, options and the largest difference of a weight.
OF_ONE_RUN = {
    "poles": ({"tno_type": "rtf", "rtf_constraint": None}, ["--max_pole_radius", 0.2], 3e-5),
    "hybrid": (
        HYBRIDS["full"],
        ["--gradient_checkpointing", "--parameter_groups", r"\.tno\.:learning_rate=0.1"],
        3e-5,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ONE_RUN)
def test_options(name, tmp_path):
    fields, more, tolerance = OF_ONE_RUN[name]
    options = [*write_options(tmp_path, **fields), *more]
    run_script("pretrain", *options, f"--output_dir {tmp_path}/one", rows(6))
    shard(*options, f"--output_dir {tmp_path}/two", rows(1, passes=3))
    assert_same_weights(tmp_path / "one", tmp_path / "two", tolerance)


@pytest.mark.slow
def test_shards_within_copies(runs, tmp_path):
    """HSDP: two groups of two processes, each with a whole model in shards. One such group resumes."""
    folder, options = runs
    groups = ["--use_fsdp", "--fsdp_version", 2, "--use_parallelism_config",
              "--parallelism_config_dp_replicate_size", 2, "--parallelism_config_dp_shard_size", 2]  # fmt: skip
    run_script("pretrain", *options, f"--output_dir {tmp_path}/one", rows(8))
    shard(*options, f"--output_dir {tmp_path}/four", rows(2), count=4, launcher=groups)
    figures = read(tmp_path / "four", "metrics")
    assert figures["parameters_per_process"] == [figures["parameters"] // 2] * 4
    assert_same_weights(tmp_path / "one", tmp_path / "four", tolerance=2e-5)
    shutil.copytree(tmp_path / "four" / "checkpoint-3", tmp_path / "two" / "checkpoint-3")
    shard(*options, f"--output_dir {tmp_path}/two", "--resume_from_checkpoint latest", rows(4))
    assert_same_weights(tmp_path / "four", tmp_path / "two", tolerance=1e-6)
