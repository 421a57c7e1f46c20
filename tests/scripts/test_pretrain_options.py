"""Options of pretraining: what is refused and when, recipes, presets, and the estimate of a run."""

import copy
import json
import logging
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import GPT2Config

from helpers.models import seeded, tiny_config
from helpers.scripts import ROOT, pretrain_options, run_script, write_config, write_text
from modeling_tnn import TnnForCausalLM
from modeling_tnn.configuration_tnn import LENGTH_FIELDS
from tnn_scripts.common import micro_batch
from tnn_scripts.common.arguments import parse_arguments, training_options
from tnn_scripts.common.chosen_schedule import choose_schedule
from tnn_scripts.common.devices import MemoryExceededError
from tnn_scripts.common.pretrain_arguments import PretrainArguments
from tnn_scripts.data.text import load_corpus, train_tokenizer
from tnn_scripts.options.glue import GlueArguments
from tnn_scripts.runs.pretrain import build_config


@dataclass
class Nothing:
    """No options."""


REFUSED = {
    "missing file": (["--train_file", "nowhere.txt"], "nowhere.txt does not exist"),
    "empty file": (["--validation_file", "EMPTY"], "is empty"),
    "short blocks": (["--block_size", 1], "--block_size must be at least 2 for a token to predict, got 1"),
    "short text": (["--block_size", 30000], "The train text is shorter than one block of 30000 tokens"),
    "large vocabulary": (
        ["--tokenizer_name", "TOKENIZER", "--vocab_size", 290],
        r"below vocab_size=290 .*--vocab_size 300",
    ),
    "small vocabulary": (["--vocab_size", 100], "--vocab_size must be at least 260 .*, got 100"),
    "no mask token": (
        ["--tokenizer_name", "TOKENIZER", "--objective", "mlm", "--config_overrides", "causal=false"],
        "must have a mask token",
    ),
    "wrong objective": (["--objective", "mlm"], "`causal` must be False for TnnForMaskedLM"),
    "wrong column": (["--text_column", "body"], "--text_column must be a column of .*, got body"),
    "unknown field": (["--config_overrides", "tno_typ=fd"], "fields of TnnConfig, got tno_typ; did you mean tno_type"),
    "wrong field": (["--config_overrides", "tno_type=fdd"], "`tno_type` must be one of .*, got 'fdd'"),
    "precision of a GPU": (["--mixed_precision", "fp16", "--use_cpu"], "must be no or bf16 on a CPU, got fp16"),
    "nothing to resume": (["--resume_from_checkpoint", "latest"], "holds no complete checkpoint"),
    "no checkpoint": (["--resume_from_checkpoint", "nowhere"], "the folder of a complete checkpoint, got nowhere"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    given, message = REFUSED[name]
    options = [*pretrain_options(tmp_path, "clm"), "--output_dir", tmp_path / "out"]
    (tmp_path / "empty.txt").touch()
    if "TOKENIZER" in given:
        train_tokenizer(load_corpus(str(tmp_path / "text.txt"))["train"], 300).save_pretrained(tmp_path / "tokenizer")
    given = [
        {"EMPTY": tmp_path / "empty.txt", "TOKENIZER": tmp_path / "tokenizer"}.get(value, value) for value in given
    ]
    with pytest.raises(SystemExit, match=message):
        run_script("pretrain", *options, *given)
    assert not list(tmp_path.glob("out/checkpoint-*"))


@pytest.mark.parametrize(
    "given, message",
    [
        (["--objective", "seq2seq"], "--objective must be one of clm, mlm, got seq2seq"),
        (["--lr_scheduler_type", "cos"], "--lr_scheduler_type must be one of linear, cosine"),
        (["--lr_scheduler_type", "greedy"], "--lr_scheduler_type must be one of .*, got greedy"),
        (["--lr_scheduler_type", "warmup_stable_decay"], "--lr_scheduler_kwargs must be .* 'num_decay_steps'"),
        (["--lr_scheduler_kwargs", '{"x": 1}'], "must be a JSON object for cosine, got .* argument 'x'"),
        (["--lr_scheduler_kwargs", "x=1"], "--lr_scheduler_kwargs must be a JSON object for cosine, got x=1"),
        (["--max_pole_radius", "1"], r"--max_pole_radius must be in \(0, 1\), got 1.0"),
        (["--max_steps", "0"], "--max_steps must be at least 1, got 0"),
        (["--global_batch_tokens", 64, "--gradient_accumulation_steps", 2], "absent with --global_batch_tokens, got"),
        (["--optim", "adamw_troch"], "did you mean --optim adamw_torch[?] --optim must be one of"),
        (["--report_to", "mlflow"], "one of none, tensorboard, wandb, trackio"),
        (["--dataset_name", "x", "--train_file", "y"], "--dataset_name must be absent with --train_file, got x"),
        (["--validation_file", "y"], "given together with --train_file"),
        (["--recipe", "nowhere.yaml"], "--recipe must be a recipe or a file, got nowhere.yaml"),
        (["--recepi", "x"], "--recepi is not an option of this program; did you mean --recipe[?]"),
    ],
)
def test_refused_options(given, message, capsys):
    with pytest.raises(SystemExit) as error:
        run_script("pretrain", *given)
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_end_of_a_schedule_is_compared_with_the_learning_rate():
    schedule = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": '{"lr_end": 0.005}'}
    PretrainArguments(learning_rate=0.01, **schedule)
    with pytest.raises(ValueError, match="--lr_scheduler_kwargs must be .* for polynomial, got .*lr_end"):
        PretrainArguments(learning_rate=0.001, **schedule)


def test_a_run_has_room_for_warmup_and_decay():
    """transformers' schedule would jump down at the end of the warm-up otherwise."""
    decaying = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": '{"num_decay_steps": 400}'}
    PretrainArguments(max_steps=600, warmup_steps=200, **decaying)
    PretrainArguments(max_steps=450, warmup_steps=0.1, **decaying)
    PretrainArguments(max_steps=3, warmup_steps=200, **decaying)  # a trial that ends in the warm-up
    with pytest.raises(ValueError, match="--max_steps must be at least 600, for warm-up and decay, got 599"):
        PretrainArguments(max_steps=599, warmup_steps=200, **decaying)
    with pytest.raises(ValueError, match="--max_steps must be at least 440, for warm-up and decay, got 400"):
        PretrainArguments(max_steps=400, warmup_steps=0.1, **decaying)


@pytest.mark.parametrize("script", ["pretrain", "finetune_glue", "evaluate_lm"])
def test_help(script, capsys):
    with pytest.raises(SystemExit) as error:
        run_script(script, "--help")
    shown = capsys.readouterr().out
    assert error.value.code == 0 and f"\n    python scripts/{script}.py --" in shown and "--output_dir" in shown


@pytest.mark.parametrize(
    "given, expected",
    [
        ([], (65536, None, None)),
        (["--per_device_train_batch_size", 4], (65536, 4, None)),
        (["--gradient_accumulation_steps", 4], (None, 8, 4)),  # as before the recipe had tokens
    ],
)
def test_the_batch_of_a_recipe(given, expected, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--recipe", "wikitext103", *map(str, given)])
    (args,) = parse_arguments([PretrainArguments], "")
    found = args.global_batch_tokens, args.per_device_train_batch_size, args.gradient_accumulation_steps
    assert found == expected


@pytest.mark.parametrize(
    "tokens, size, processes, message",
    [
        (100, None, 1, r"--global_batch_tokens must be a multiple of 32 \(the --block_size\), got 100"),
        (96, None, 2, r"must be a multiple of 64 \(2 x 32, a block for each process\), got 96"),
        (384, 4, 2, r"--per_device_train_batch_size must divide the 6 blocks of a process in a step .*, got 4"),
    ],
)
def test_a_batch_of_no_whole_passes(tokens, size, processes, message):
    args = PretrainArguments(global_batch_tokens=tokens, per_device_train_batch_size=size, block_size=32)
    with pytest.raises(ValueError, match=message):
        micro_batch.blocks_of_process(args, processes)


def batch_on_a_gpu(fitting, processes=1, **fields):
    """Arguments with the blocks of a pass that are chosen for GPUs on which so many blocks fit, for each process."""
    args = PretrainArguments(global_batch_tokens=96 * 32 * processes, block_size=32, **fields)
    state = SimpleNamespace(device=torch.device("cuda"), num_processes=processes, distributed_type="MULTI_GPU")

    def try_step(args, accelerator, model, size):
        if size > fitting[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def gather_object(own):
        return own + [micro_batch.largest_divisor(96, int(most)) for most in fitting[1:]]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(micro_batch, "try_step", try_step)
        patched.setattr(micro_batch, "gather_object", gather_object)
        line = micro_batch.choose_micro_batch(args, state, None)
    assert state.gradient_accumulation_steps == args.gradient_accumulation_steps
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
    monkeypatch.setattr(micro_batch, "MOST_TOKENS", 1000)
    assert batch_on_a_gpu([1000])[0] == "24 blocks of 32 tokens in a forward pass, 4 passes in a step of each process"


def test_a_trial_leaves_no_trace(monkeypatch):
    memory = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    model = seeded(TnnForCausalLM, tiny_config(norm_type="batchnorm", hidden_dropout_prob=0.1))
    before = copy.deepcopy(model.state_dict())
    micro_batch.try_step(PretrainArguments(block_size=16), Accelerator(cpu=True), model, 3)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_recipe_comes_before_options(tmp_path):
    text, recipe = write_text(tmp_path / "text.txt"), tmp_path / "recipe.yaml"
    recipe.write_text(f"# a comment\nconfig: {write_config(tmp_path / 'config')}\ntrain_file: {text}\n"
                      "max_steps: 99\nlearning_rate: 1.0e-3\ngradient_checkpointing: true\n")  # fmt: skip
    run_script("pretrain", "--max_steps", 2, "--recipe", recipe, "--output_dir", tmp_path / "out")
    args = json.loads((tmp_path / "out" / "training_args.json").read_text())
    assert (args["max_steps"], args["learning_rate"], args["gradient_checkpointing"]) == (2, 1e-3, True)


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "configuration" / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_recipes(recipe, monkeypatch):
    """Every option is known, every configuration is a model of the objective."""
    if recipe.stem.startswith("glue"):
        monkeypatch.setattr("sys.argv", ["x", "--recipe", str(recipe), "--model_name_or_path", "x"])
        args, training = parse_arguments([GlueArguments, training_options()], "")
        assert args.task_name and training.num_train_epochs > 0
    else:
        monkeypatch.setattr("sys.argv", ["x", "--recipe", str(recipe)])
        (args,) = parse_arguments([PretrainArguments], "")
        assert build_config(args).max_position_embeddings >= args.block_size


def test_length_of_the_model_follows_the_blocks(tmp_path):
    tnn = write_config(tmp_path / "tnn", tno_type="fd")
    assert build_config(PretrainArguments(config_name=str(tnn), block_size=100)).fd_resolution == 256
    for name in sorted(LENGTH_FIELDS - {"fd_resolution"}):
        config = build_config(PretrainArguments(config_name=str(tnn), block_size=100))
        assert getattr(config, name) == 100, name
    args = PretrainArguments(config_name=str(tnn), config_overrides="max_position_embeddings=48")
    assert build_config(args).max_position_embeddings == args.block_size == 48
    GPT2Config(n_positions=64).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(
        ValueError, match="--block_size must be at most max_position_embeddings=64 of the model, got 100"
    ):
        build_config(PretrainArguments(config_name=str(tmp_path / "gpt2"), block_size=100))


def test_preset_by_name():
    assert PretrainArguments(config_name="tnn-causal").config_name == str(ROOT / "configuration" / "tnn-causal")
    with pytest.raises(ValueError, match="--config_name must be a preset, .*, got tnn-nowhere"):
        PretrainArguments(config_name="tnn-nowhere")


@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_dry_run(objective, tmp_path, caplog):
    """It needs no text, and writes nothing."""
    config, output = write_config(tmp_path / "config", causal=objective == "clm"), tmp_path / "out"
    options = ["--objective", objective, "--config_name", config, "--output_dir", output, "--max_steps", 7]
    with caplog.at_level(logging.INFO, "pretrain"):
        run_script("pretrain", *options, "--gradient_accumulation_steps", 3, "--gradient_checkpointing", "--dry_run")
    assert "8 blocks of 32 tokens in a forward pass, 3 passes in a step of each process\n" in caplog.text
    assert "7 steps of 768 tokens: 5,376 tokens" in caplog.text  # 8 blocks of 32, three times
    assert re.search(r"about \d+ seconds on 1 x cpu: .* tokens/s\nabout \d+\.\d GiB of memory", caplog.text)
    assert not output.exists()


@pytest.mark.parametrize(
    "given, rate, schedule, source",
    [
        ({}, 8e-3, ("cosine", 0.1), "measured for tnn-tiny"),
        ({"config_name": "tnn-small", "max_steps": 240}, 4e-3, ("warmup_stable_decay", 20), "measured for tnn-small"),
        ({"config_name": "tnn-small", "lr_scheduler_type": "linear"}, 4e-3, ("linear", 83), "measured for tnn-small"),
        ({"config_name": "gpt2-tiny"}, 4e-3, ("cosine", 0.1), "measured for peers/gpt2-tiny"),
        ({"config_name": "tnn-causal", "max_steps": 500}, 5e-4, ("inverse_sqrt", 40), "after a paper; not measured"),
        ({"config_name": "tnn-causal-rtf"}, 2e-3, ("cosine", 0.1), "by the rule for a width of 512, not measured"),
        ({"config_overrides": "hidden_size=256"}, 4e-3, ("cosine", 0.1), "by the rule for a width of 256"),
        ({"objective": "mlm"}, 2e-3, ("warmup_stable_decay", 50), "measured for tnn-bidirectional-small"),
        ({"objective": "mlm", "config_name": "tnn-tiny", "config_overrides": "causal=false"}, 8e-3, ("cosine", 0.1),
         "by the rule for a width"),
        ({"learning_rate": 0.02, "config_name": "tnn-small"}, 0.02, ("cosine", 0.1), None),
    ],
)  # fmt: skip
def test_the_rate_of_a_run_that_names_none(given, rate, schedule, source):
    """The preset's, with its schedule as long as the run; what was given stays."""
    args = PretrainArguments(**given)
    line = choose_schedule(args, build_config(args))
    assert args.learning_rate == rate and (args.lr_scheduler_type, args.warmup_steps) == schedule
    assert line is None if source is None else line.startswith(f"learning rate {rate:g}, ") and source in line
    if schedule[0] == "warmup_stable_decay":
        assert json.loads(args.lr_scheduler_kwargs) == {"num_decay_steps": 200 if args.objective == "mlm" else 40}


def test_the_preset_of_an_objective():
    for objective, preset in {"clm": "tnn-tiny", "mlm": "tnn-bidirectional-small"}.items():
        assert PretrainArguments(objective=objective).config_name.endswith(f"configuration/{preset}")


@pytest.mark.parametrize(
    "kind, given, expected",
    [
        (PretrainArguments, ["--recipe", "wikitext2", "--train_file", "my.txt"],
         {"train_file": "my.txt", "dataset_name": [], "dataset_config_name": [], "vocab_size": 4096}),
        (PretrainArguments, ["--recipe=wikitext2", "--dataset=other"],
         {"dataset_name": ["other"], "dataset_config_name": []}),
        (PretrainArguments, ["--recipe", "wikitext2", "--validation_file", "my.txt"],
         {"dataset_config_name": ["wikitext-2-v1"], "validation_file": "my.txt"}),
        (PretrainArguments, ["--recipe", "wikitext2", "--recipe", "OWN"],
         {"train_file": "my.txt", "documents": "rows", "dataset_name": [], "learning_rate": 8e-3}),
        (PretrainArguments, ["--recipe", "OWN", "--dataset_name", "other"],
         {"train_file": None, "dataset_name": ["other"], "documents": None}),
        (GlueArguments, ["--recipe", "glue", "--train_file", "my.csv", "--validation_file", "my.csv"],
         {"task_name": None, "train_file": "my.csv", "max_seq_length": 512}),
    ],
)  # fmt: skip
def test_given_data_replace_those_of_a_recipe(kind, given, expected, tmp_path, monkeypatch):
    """With all that describes them; an option that only adds to them does not."""
    monkeypatch.chdir(tmp_path)
    for name in ("my.txt", "my.csv"):
        (tmp_path / name).write_text("text,label\na,b\n")
    (tmp_path / "other").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "own.yaml").write_text("train_file: my.txt\ndocuments: rows\n")
    model = [] if kind is PretrainArguments else ["--model_name_or_path", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["program", *(part.replace("OWN", "own.yaml") for part in given), *model])
    args, _ = parse_arguments([kind, training_options()] if kind is GlueArguments else [kind, Nothing], "A program.")
    assert {name: getattr(args, name) for name in expected} == expected
