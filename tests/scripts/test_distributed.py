"""Several processes: the configurations of accelerate, and two processes that do what one does, of each program."""

import shutil

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType

from helpers import scripts
from helpers.glue import glue_options
from helpers.scripts import ROOT, assert_same_weights, read, run_ranks, run_script, write_config, write_text

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
    monkeypatch.setattr("modeling_tnn.training.pretrain.Accelerator", lambda **options: alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2 processes were started, but accelerate sees 1"):  # and one folder
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


@pytest.mark.slow
def test_two_processes_fine_tune(encoder, glue, tmp_path):
    """On a task, with the predictions for its test rows."""
    options = [f"--task_name sst2 --dataset_path {glue} --do_predict --use_cpu --max_steps 4 --adam_epsilon 1e-4",
               "--config_overrides hidden_dropout_prob=0,classifier_dropout=0"]  # fmt: skip
    run_script("finetune_glue", *glue_options(encoder, tmp_path / "one"), *options)
    two = glue_options(encoder, tmp_path / "two")
    run_ranks("finetune_glue", *two, *options, "--per_device_train_batch_size 8")
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert (two["eval_samples"], two["eval_accuracy"]) == (60, pytest.approx(one["eval_accuracy"]))
    assert_same_weights(tmp_path / "one", tmp_path / "two", tolerance=2e-5)
    predicted = [(tmp_path / name / "predict_results_sst2.txt").read_text() for name in ("one", "two")]
    assert predicted[0] == predicted[1] and len(predicted[0].splitlines()) == 21
