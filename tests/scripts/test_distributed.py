"""Several processes: the configurations of accelerate, and two processes that do what one does."""

import json
import shutil

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType

from helpers.scripts import (
    ROOT,
    assert_same_weights,
    run_ranks,
    run_script,
    start_script,
    two_processes,
    write_config,
    write_text,
)

FOLDER = ROOT / "configuration" / "accelerate"
CONFIGS = {
    "cpu": DistributedType.NO,
    "cpu-gloo": DistributedType.MULTI_GPU,
    "cpu-fsdp2": DistributedType.FSDP,
    "gpu": DistributedType.NO,
    "ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
}


def test_every_configuration_is_known():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_reads(name):
    """It refuses fields that it does not know."""
    file = FOLDER / f"{name}.yaml"
    config = load_config_from_file(str(file))
    assert config.distributed_type == CONFIGS[name]
    given = yaml.safe_load(file.read_text())
    assert {key: getattr(config, key) for key in given} == given
    args = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    args, _, _ = _validate_launch_command(args)
    assert (args.num_processes, args.mixed_precision) == (given["num_processes"], given["mixed_precision"])
    assert args.use_fsdp == name.endswith("fsdp2")


def launch(*options) -> str:
    with start_script("pretrain", *options, launcher=two_processes()) as process:
        output, _ = process.communicate(timeout=120)
    return output


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same global batch in one process and in two; masked, so that processes have unequal numbers of targets."""
    folder = tmp_path_factory.mktemp("runs")
    config = write_config(folder / "config", causal=False, hidden_dropout_prob=0.0)
    options = ["--objective", "mlm", "--config_name", config, "--train_file", write_text(folder / "text.txt"),
               "--max_steps", 12, "--learning_rate", 0.01, "--checkpointing_steps", 6, "--eval_steps", 5,
               "--per_device_eval_batch_size", 5]  # fmt: skip
    run_script("pretrain", *options, "--output_dir", folder / "one", "--per_device_train_batch_size", 6)
    two = [*options, "--output_dir", folder / "two", "--global_batch_tokens", 6 * 32]
    output = launch(*two)
    assert (folder / "two" / "metrics.json").exists(), output
    return folder, two


def metrics_of(folder) -> dict:
    return json.loads((folder / "metrics.json").read_text())


@pytest.mark.slow
def test_two_processes_are_one(runs):
    folder, _ = runs
    one, two = metrics_of(folder / "one"), metrics_of(folder / "two")
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["tokens"] == two["tokens"]
    for first, second in zip(one["evaluations"], two["evaluations"], strict=True):
        assert first == pytest.approx(second, rel=1e-5)
    assert_same_weights(folder / "one", folder / "two", tolerance=2e-5)


@pytest.mark.slow
def test_two_processes_resume(runs):
    folder, options = runs
    shutil.copytree(folder / "two" / "checkpoint-6", folder / "resumed" / "checkpoint-6")
    run_ranks("pretrain", *options, "--output_dir", folder / "resumed", "--resume_from_checkpoint", "latest")
    assert_same_weights(folder / "two", folder / "resumed")


@pytest.mark.slow
def test_processes_that_do_not_know_of_each_other(runs, monkeypatch, tmp_path):
    """Two of them would write into one folder."""
    monkeypatch.setattr(
        "tnn_scripts.runs.pretrain.Accelerator", lambda **options: type("One", (), {"num_processes": 1})
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2 processes were started, but accelerate sees 1"):
        run_script("pretrain", *runs[1], "--output_dir", tmp_path / "out")
