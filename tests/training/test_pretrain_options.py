"""Options of pretraining: what follows from others, recipes, presets, the batch that fits; see test_programs.py."""

import copy
import json
from types import SimpleNamespace

from tnn_programs.cli.errors import MemoryExceededError

import pytest
import torch
from accelerate import Accelerator
from transformers import GPT2Config

from helpers.models import seeded, tiny_config
from helpers.programs import parse
from helpers.scripts import write_config
from modeling_tnn import TnnForCausalLM
from modeling_tnn.configuration_tnn import LENGTH_FIELDS
from tnn_programs.cli.declared import training_options
from tnn_programs.cli.training_arguments import PretrainArguments, choose_schedule
from tnn_programs.finetune_glue import GlueArguments
from tnn_programs.training import costs, optimizers
from tnn_programs.training.models import build_config

DECAYING = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": '{"num_decay_steps": 400}'}
TO_AN_END = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": '{"lr_end": 0.005}'}


def test_a_run_has_room_for_its_schedule():
    """transformers' would jump down at the end of the warm-up, or rise to its end."""
    PretrainArguments(max_steps=600, warmup_steps=200, **DECAYING)
    PretrainArguments(max_steps=450, warmup_steps=0.1, **DECAYING)
    PretrainArguments(max_steps=3, warmup_steps=200, **DECAYING)  # a trial that ends in the warm-up
    optimizers.try_schedule(PretrainArguments(learning_rate=0.01, **TO_AN_END))
    for fields, message in (
        ({"max_steps": 599, "warmup_steps": 200, **DECAYING}, "at least 600, for warm-up and decay, got 599"),
        ({"max_steps": 400, "warmup_steps": 0.1, **DECAYING}, "at least 440, for warm-up and decay, got 400"),
    ):
        with pytest.raises(ValueError, match=message):
            PretrainArguments(**fields)
    with pytest.raises(ValueError, match="--lr_scheduler_kwargs must be .* for polynomial, got .*lr_end"):
        optimizers.try_schedule(PretrainArguments(learning_rate=0.001, **TO_AN_END))


def test_a_batch_has_whole_passes():
    for given, expected in (
        ("", (65536, None, None)),
        ("--per_device_train_batch_size 4", (65536, 4, None)),
        ("--gradient_accumulation_steps 4", (None, 8, 4)),  # as before the recipe had tokens
    ):
        (args,) = parse([PretrainArguments], "--recipe wikitext103", given)
        found = args.global_batch_tokens, args.per_device_train_batch_size, args.gradient_accumulation_steps
        assert found == expected
    for tokens, size, processes, message in (
        (100, None, 1, r"--global_batch_tokens must be a multiple of 32 \(the --block_size\), got 100"),
        (96, None, 2, r"must be a multiple of 64 \(2 x 32, a block for each process\), got 96"),
        (384, 4, 2, r"--per_device_train_batch_size must divide the 6 blocks of a process in a step .*, got 4"),
    ):
        args = PretrainArguments(global_batch_tokens=tokens, per_device_train_batch_size=size, block_size=32)
        with pytest.raises(ValueError, match=message):
            costs.blocks_of_process(args, processes)


def batch_on_a_gpu(fitting, processes=1, **fields):
    """Arguments with the blocks of a pass that are chosen for GPUs on which so many blocks fit, for each process."""
    args = PretrainArguments(global_batch_tokens=96 * 32 * processes, block_size=32, **fields)
    state = SimpleNamespace(device=torch.device("cuda"), num_processes=processes, distributed_type="MULTI_GPU")

    def try_step(args, accelerator, model, size):
        if size > fitting[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def gather_object(own):
        return own + [costs.largest_divisor(96, int(most)) for most in fitting[1:]]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(costs, "try_step", try_step)
        patched.setattr(costs, "gather_object", gather_object)
        line = costs.choose_micro_batch(args, state, None)
    return line, args.per_device_train_batch_size, args.gradient_accumulation_steps


def test_a_batch_that_fits_the_gpu(monkeypatch):
    """The largest one of the whole, a half and so on; the same for all processes."""
    assert batch_on_a_gpu([1000])[1:] == (96, 1)
    assert batch_on_a_gpu([50])[1:] == (48, 2)
    assert batch_on_a_gpu([20])[1:] == (12, 8)
    assert batch_on_a_gpu([1000, 6], processes=2)[1:] == (6, 16)
    assert batch_on_a_gpu([0.5], per_device_train_batch_size=32)[1:] == (32, 3), "by hand"
    with pytest.raises(MemoryExceededError, match="not enough memory for a training step with one block"):
        batch_on_a_gpu([1000, 0.5], processes=2)
    monkeypatch.setattr(costs, "MOST_TOKENS", 1000)
    assert batch_on_a_gpu([1000])[0] == "24 blocks of 32 tokens in a forward pass, 4 passes in a step of each process"


def test_a_trial_leaves_no_trace(monkeypatch):
    memory = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    model = seeded(TnnForCausalLM, tiny_config(norm_type="batchnorm", hidden_dropout_prob=0.1))
    before = copy.deepcopy(model.state_dict())
    costs.try_step(PretrainArguments(block_size=16), Accelerator(cpu=True), model, 3)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_length_of_the_model_follows_the_blocks(tmp_path):
    tnn = write_config(tmp_path / "tnn", tno_type="fd")
    config = build_config(PretrainArguments(config_name=str(tnn), block_size=100))
    assert config.fd_resolution == 128
    assert {getattr(config, name) for name in LENGTH_FIELDS - {"fd_resolution"}} == {100}
    args = PretrainArguments(config_name=str(tnn), config_overrides="max_position_embeddings=48")
    assert build_config(args).max_position_embeddings == args.block_size == 48
    GPT2Config(n_positions=64).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="--block_size must be at most max_position_embeddings=64 .*, got 100"):
        build_config(PretrainArguments(config_name=str(tmp_path / "gpt2"), block_size=100))


def test_the_rate_of_a_run_that_names_none():
    """The preset's, with its schedule as long as the run; what was given stays."""
    cosine, masked = ("cosine", 0.1), {"objective": "mlm", "config_name": "tnn-tiny"}
    for given, rate, schedule, source in (
        ({}, 8e-3, cosine, "measured for tnn-tiny"),
        ({"config_name": "tnn-small", "max_steps": 240}, 4e-3, ("warmup_stable_decay", 20), "measured for tnn-small"),
        ({"config_name": "tnn-small", "lr_scheduler_type": "linear"}, 4e-3, ("linear", 83), "measured for tnn-small"),
        ({"config_name": "tnn-causal", "max_steps": 500}, 5e-4, ("inverse_sqrt", 40), "after a paper; not measured"),
        ({"config_overrides": "hidden_size=256"}, 4e-3, cosine, "by the rule for a width of 256"),
        ({"objective": "mlm"}, 2e-3, ("warmup_stable_decay", 50), "measured for tnn-bidirectional-small"),
        (masked | {"config_overrides": "causal=false"}, 8e-3, cosine, "by the rule for a width"),
        ({"learning_rate": 0.02, "config_name": "tnn-small"}, 0.02, cosine, None),
    ):
        args = PretrainArguments(**given)
        line = choose_schedule(args, build_config(args))
        assert args.learning_rate == rate and (args.lr_scheduler_type, args.warmup_steps) == schedule, given
        assert line is None if source is None else line.startswith(f"learning rate {rate:g}, ") and source in line
        if schedule[0] == "warmup_stable_decay":
            assert json.loads(args.lr_scheduler_kwargs) == {"num_decay_steps": 200 if args.objective == "mlm" else 40}


def test_options_come_before_a_recipe_and_other_data_replace_its_data(tmp_path, monkeypatch):
    """With all that describes them; an option that only adds to them does not."""
    monkeypatch.chdir(tmp_path)
    for name in ("my.txt", "my.csv"):
        (tmp_path / name).write_text("text,label\na,b\n")
    (tmp_path / "other").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "own.yaml").write_text("# a comment\ntrain_file: my.txt\ndocuments: rows\nmax_steps: 99\n"
                                       "learning_rate: 1.0e-3\ngradient_checkpointing: true\n")  # fmt: skip
    for given, expected in {
        "--max_steps 2 --recipe own.yaml": {"max_steps": 2, "learning_rate": 1e-3, "gradient_checkpointing": True},
        "--recipe wikitext2 --train_file my.txt":
            {"train_file": "my.txt", "dataset_name": [], "dataset_config_name": [], "vocab_size": 4096},
        "--recipe=wikitext2 --dataset_name=other": {"dataset_name": ["other"], "dataset_config_name": []},
        "--recipe wikitext2 --validation_file my.txt":
            {"dataset_config_name": ["wikitext-2-v1"], "validation_file": "my.txt"},
        "--recipe wikitext2 --recipe own.yaml":
            {"train_file": "my.txt", "documents": "rows", "dataset_name": [], "learning_rate": 1e-3},
        "--recipe own.yaml --dataset_name other": {"train_file": None, "dataset_name": ["other"], "documents": None},
    }.items():  # fmt: skip
        (args,) = parse([PretrainArguments], given)
        assert {name: getattr(args, name) for name in expected} == expected
    given = f"--recipe glue --train_file my.csv --validation_file my.csv --model_name_or_path {tmp_path}"
    args, _ = parse([GlueArguments, training_options()], given)
    assert (args.task_name, args.train_file, args.max_seq_length) == (None, "my.csv", 512)
