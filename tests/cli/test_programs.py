"""What each program promises: a class for every command of `tnn`; and one vocabulary over all programs."""

import json
import math
import os
import signal
import sys
import time
from collections import defaultdict
from unittest.mock import Mock

from tnn_programs.cli.errors import report_errors

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL.Image import fromarray
from transformers import AutoModelForImageClassification

from helpers.glue import rows, save_encoder
from helpers.programs import OF_TRAINER, ProgramTests, TrainingTests, options_of, parse, unlike
from helpers.scripts import ROOT, run, run_script, words, write_config, write_text
from tnn_programs.cli import threads
from tnn_programs.cli.commands import COMMANDS
from tnn_programs.cli.declared import training_options
from tnn_programs.cli.model_path import find_recipe
from tnn_programs.cli.parser import HELP, parse_overrides
from tnn_programs.cli.training_arguments import PretrainArguments
from tnn_programs.data.lra import TASKS
from tnn_programs.finetune_glue import GlueArguments
from tnn_programs.run_ablation import AblationArguments
from tnn_programs.run_image_classification import ImageArguments
from tnn_programs.run_lra import LraArguments
from tnn_programs.run_synthetic import SyntheticArguments
from tnn_programs.training import run_image_classification, run_lra
from tnn_programs.training.models import build_config

SMALL = "hidden_size=16,num_hidden_layers=1,intermediate_size=16,rpe_dim=4"
NOT_A_TNN = "--model_name_or_path must be a TNN, got gpt2 of gpt2"
UTF8 = "The file bad.txt is not text in UTF-8: 'utf-8' codec can't decode byte 0xff"
NOTHING_KEPT = {
    "--resume_from_checkpoint latest": "--resume_from_checkpoint must not be given for this program: it",
    "--push_to_hub": "--push_to_hub must not be given for this program: publish",
}


class TestDemo(TrainingTests):
    command = "demo"
    test_its_recipes_are_read = None
    refused = {
        "--config_name gpt2": "--config_name must be a TNN, got gpt2 of gpt2",
        "--config_overrides tno_type=ski": "`causal` must be False with tno_type='ski', got True",
        "--objective mlm": "--objective must be clm for a model that writes, got mlm",
    }

    def test_a_text_of_no_block(self, tmp_path):
        short = [write_text(tmp_path / "text.txt", copies=1), "--output_dir", tmp_path / "out", "--max_steps", 1]
        ended = run("demo", "--dataset_name", *short, check=False)
        assert "text is shorter than one block of 256 tokens. Give a longer text or" in ended.stderr

    def small(self, folder):
        preset, text = write_config(folder / "preset"), write_text(folder / "text.txt", copies=60)
        return words(f"--config_name {preset} --dataset_name {text} --max_steps 2",
                     "--per_device_train_batch_size 4 --max_new_tokens 2")  # fmt: skip


class TestPretrain(TrainingTests):
    command = "pretrain"
    needed = "--config_name config --train_file good.txt --output_dir ../out"
    recipes = "[!g]*.yaml"
    left = {".lock", "tokenizer"}
    arguments = [PretrainArguments]
    refused = {
        "--validation_file nowhere.txt": "nowhere.txt does not exist",
        "--block_size 1": "--block_size must be at least 2 for a token to predict, got 1",
        "--tokenizer_name tokenizer --vocab_size 290": "below vocab_size=290 .*--vocab_size 300",
        "--tokenizer_name tokenizer --objective mlm --config_overrides causal=false": "must have a mask token",
        "--objective mlm": "`causal` must be False for TnnForMaskedLM",
        "--text_column body": "--text_column must be a column of .*, got body",
        "--config_overrides tno_typ=fd": "must be fields of TnnConfig, got tno_typ; did you mean tno_type",
        "--mixed_precision fp16 --use_cpu": "must be no or bf16 on a CPU, got fp16",
        "--resume_from_checkpoint latest": "holds no complete checkpoint",
        "--lr_scheduler_type warmup_stable_decay": "--lr_scheduler_kwargs must be .* 'num_decay_steps'",
        """--lr_scheduler_kwargs '{"x": 1}'""": "must be a JSON object for cosine, got .* argument 'x'",
        "--max_pole_radius 1": r"--max_pole_radius must be in \(0, 1\), got 1.0",
        "--global_batch_tokens 64 --gradient_accumulation_steps 2": "absent with --global_batch_tokens, got",
        "--optim adamw_troch": "did you mean --optim adamw_torch[?] --optim must be one of",
        "--report_to mlflow": "one of none, tensorboard, wandb, trackio",
        "--dataset_name x": "--dataset_name must be absent with --train_file, got x",
        "--recipe wikitex2": "--recipe must be .*, got wikitex2; did you mean wikitext2[?]",
        "--recipe bad.yaml": "--recipe bad.yaml cannot be read: while pars",
        "--recipe wrong.yaml": "lerning_rate is not an option of this program; did you mean learning_rate[?]",
        "--recepi x": "--recepi is not an option of this program; did you mean --recipe[?]",
        "--train_file bad.txt": UTF8,
    }

    def small(self, folder):
        preset, text = write_config(folder / "preset"), write_text(folder / "text.txt", copies=60)
        return words(f"--config_name {preset} --train_file {text} --max_steps 2 --per_device_train_batch_size 4")

    def configure(self, recipe, args):
        assert build_config(args).max_position_embeddings >= args.block_size

    def test_where_the_text_comes_from(self):
        assert not unlike("pretrain", words("--config_name config --output_dir ../out"), {
            "--validation_file y": "given together with --train_file",
            "--dataset_name config/text": "be a folder or a Hub id, got 'config/text', which is not a folder here",
        })  # fmt: skip


class TestFinetuneGlue(TrainingTests):
    command = "finetune-glue"
    needed = "--model_name_or_path masked --task_name sst2 --output_dir ../out --report_to none"
    recipes = "glue*.yaml"
    beside = "--output_dir x --model_name_or_path masked"
    arguments = [GlueArguments, training_options()]
    refused = {
        "": "one of --do_train, --do_eval, --do_predict and --sweep must be given",
        "--do_train --push_to_hub": "--push_to_hub must not be given for this program: publish",
        "--sweep --learning_rate 1e-3": "--learning_rate must not be given with --sweep, .* got 0.001",
        "--sweep --seed 7": "--seed must not be given with --sweep, which reads --sweep_seeds, got 7",
        "--sweep --resume_from_checkpoint latest": "--sweep must be given without --resume_from_checkpoint",
        "--sweep --sentence1_key a": "--sentence1_key must be given with --train_file",
        "--max_eval_samples -1": "--max_eval_samples must be at least 1, got -1",
        "--task_name sst3": "--task_name must be all or one of cola, ",
        "--model_name_or_path config": "must be a folder with a tokenizer, got config without token",
    }

    def test_where_the_rows_come_from(self):
        assert not unlike("finetune_glue", words("--model_name_or_path masked --output_dir ../out"), {
            "": "--task_name, --dataset_name, or --train_file and --validation_file must be given",
            "--dataset_config_name a --task_name sst2": "--dataset_config_name must be given with --dataset_name",
            "--dataset_name a/b --metric_name mcc": "--metric_name must be .* one of accuracy, .*, got mcc",
            "--train_file good.csv --validation_file empty.csv": "empty.csv is empty",
            "--do_predict --train_file good.csv --validation_file good.csv": "must be given with --test_file",
        })  # fmt: skip

    def small(self, folder):
        Dataset.from_dict(rows(12)).to_csv(str(folder / "rows.csv"))
        return words(f"--model_name_or_path {save_encoder(folder / 'model')} --train_file {folder}/rows.csv",
                     f"--validation_file {folder}/rows.csv --do_train --max_steps 3 --per_device_train_batch_size 2",
                     "--report_to none --learning_rate 0.01")  # fmt: skip

    def configure(self, recipe, args, training):
        assert args.task_name and training.num_train_epochs > 0


class TestPlan(ProgramTests):
    command = "plan"
    needed = "--config_name tnn-tiny"
    refused = {
        "--config_name tnn-cuasal": "must be a preset, .*, got tnn-cuasal; did you mean tnn-causal[?]",
        "--processes 4 0": "--processes must be at least 1, got 0",
        "--lengths 1": "--lengths must be at least 2, got 1",
    }


class TestEvaluate(ProgramTests):
    command = "evaluate"
    needed = "--model_name_or_path tnn --output_dir ../out"
    refused = {
        "": "either --validation_file or --dataset_name must be given",
        "--model_name_or_path ./gtp2 --validation_file good.txt": "is not a folder here; did you mean ./gpt2[?]",
        "--validation_file nowhere.txt": "nowhere.txt does not exist",
        "--validation_file bad.jsonl": "The file bad.jsonl has no rows that can be read: JSON parse error",
        "--validation_file good.txt --max_tokens 1": "The text must have at least 2 tokens, got 1",
        "--validation_file good.txt --lengths 1": "--lengths must be at least 2",
        "--validation_file good.txt --stride 99 --lengths 64":
            "--stride must be at least 1 and below the smallest of --lengths, got 99",
        "--validation_file good.txt --lengths 99999": "--lengths must have one that fits",
    } | {
        f"--objective mlm --validation_file good.txt --lengths 16 --model_name_or_path {more}": message
        for more, message in {
            "masked --stride 8": "--stride must not be given with --objective mlm",
            "masked --mlm_probability 1.0": r"--mlm_probability must be in \(0, 1\), got 1.0",
            "masked --lengths 2": "--lengths must be at least 3 with --objective mlm, got 2",
            "masked --mlm_probability 1e-9 --max_tokens 50": "--mlm_probability must hide a token of the text",
            "unmasked": "The tokenizer must have a mask token.*unmasked$",
        }.items()
    }  # fmt: skip

    def test_a_failure_that_is_no_mistake_of_the_user_has_the_status_1(self):
        ended = run("evaluate_lm", self.needed, "--dataset_name user/none", check=False)
        *_, line = ended.stderr.splitlines()
        assert ended.returncode == 1 and line.startswith("error: ") and "'user/none'" in line


class TestGenerate(ProgramTests):
    command = "generate"
    needed = "--model_name_or_path tnn"
    unknown = ("--top_pp=0.5", "--top_p")
    refused = {
        "": "--prompt, --prompt_file or a line",
        "--model_name_or_path ./nowhere --prompt a":
            "must be a folder or a Hub id, got './nowhere', which is not a folder here",
        "--prompt_file bad.txt": UTF8,
        "--prompt_file good.txt --output_file good.txt": "must not be the file with the prompts, got good.txt",
        "--prompt ''": "--prompt must have at least one token, got ''",
        "--prompt a\udcff": r"--prompt must be text in UTF-8, got 'a\\udcff'",  # as Python reads a command line
    } | {
        f"--prompt x {options}": message
        for options, message in {
            "--device x": "--device must be a device of this machine, got x: ",
            "--batch_size 0": "--batch_size must be at least 1, got 0",
            "--chat": "--chat must be given without --prompt",
            "--temperature hot": "--temperature must be a number, or null, got hot",
            "--do_sample maybe": "--do_sample must be true or false, or null, got maybe",
            "--do_sample false --top_k 5": "--do_sample must be true with --top_k",
            "--do_sample true --temperature 0": "--temperature must be above 0 with",
            "--return_dict_in_generate true": "must not be given: this program writes text",
        }.items()
    }  # fmt: skip


class TestPlotKernels(ProgramTests):
    command = "plot-kernels"
    needed = "--model_name_or_path gpt2 --output_dir ../out"
    refused = {
        "": NOT_A_TNN,
        "--model_name_or_path .": "with a model, got . without config.json; did you mean config or",
    }


class TestToRecurrent(ProgramTests):
    command = "to-recurrent"
    needed = "--model_name_or_path gpt2 --dataset_name good.txt --output_dir ../out"
    refused = {
        "": NOT_A_TNN,
        "--model_name_or_path good.txt": "must be a folder or a Hub id, got the file good.txt",
        "--model_name_or_path tnn --output_dir tnn --overwrite_output_dir": "must not hold the model that is read",
        "--model_name_or_path tnn --output_dir gpt2": "holds a model. Give --overwrite_output_dir to replace it",
    }


class TestLra(TrainingTests):
    command = "lra"
    needed = "--task listops --config_name tnn-listops --output_dir ../out"
    recipes = "lra/*.yaml"
    arguments = [LraArguments, training_options()]
    refused = {
        "--task listop": r"invalid choice: 'listop' \(choose from",
        "--task image --max_length 500": "--max_length must be 1024, the pixels of image, got 500",
        "--task retrieval": "--dataset_path must be the folder of the LRA release",
        "--max_train_samples 50 --config_overrides width=3": "must be fields of TnnConfig, got width",
    }

    def small(self, folder):
        return words(f"--task listops --config_name tnn-listops --config_overrides {SMALL} --max_length 600",
                     "--max_train_samples 50 --max_eval_samples 4 --max_steps 1 --report_to none",
                     "--save_strategy no")  # fmt: skip

    def configure(self, recipe, args, training):
        assert args.task in recipe.stem
        with torch.device("meta"):
            run_lra.build_model(args, run_lra.build_config(args, TASKS[args.task]))

    def test_overrides_beside_those_of_the_recipe(self):
        """Each field of the command line goes before that of the recipe, and the others stay."""
        own = "--recipe lra/small-listops --config_overrides tno_type=rtf,hidden_size=32 --output_dir x"
        args, _ = parse(self.arguments, own)
        config = run_lra.build_config(args, TASKS[args.task])
        assert (config.tno_type, config.hidden_size, config.rtf_state_size) == ("rtf", 32, 16)


class TestImages(TrainingTests):
    command = "images"
    needed = "--config_name tnn-image-tiny --dataset_name gpt2 --output_dir ../out"
    recipes = "images/*.yaml"
    arguments = [ImageArguments, training_options(bf16=False)]
    refused = {
        "--config_name tnn-image-tny": "did you mean tnn-image-tiny",
        "--max_eval_samples -1": "--max_eval_samples must be at least 1, got -1",
    }

    def small(self, folder):
        pixels = np.random.default_rng(0).integers(256, size=(12, 8, 8, 3), dtype=np.uint8)
        features = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})
        pictures = [{"image": fromarray(picture), "label": i % 2} for i, picture in enumerate(pixels)]
        for split in ("train", "test"):
            Dataset.from_list(pictures, features=features).to_parquet(folder / "data" / f"{split}.parquet")
        fields = f"{SMALL},image_size=8,patch_size=4,max_position_embeddings=4"
        return words(f"--config_name tnn-image-tiny --config_overrides {fields} --dataset_name {folder}/data",
                     "--max_steps 2 --per_device_train_batch_size 4 --report_to none")  # fmt: skip

    def configure(self, recipe, args, training):
        with torch.device("meta"):
            AutoModelForImageClassification.from_config(run_image_classification.build_config(args, ["a", "b"]))


class TestSynthetic(TrainingTests):
    command = "synthetic"
    needed = "--task copying --state_sizes 8 --output_dir ../out"
    keeps, figure = False, "error"
    recipes = "synthetic/*.yaml"
    arguments = [SyntheticArguments, training_options()]
    refused = NOTHING_KEPT | {
        "--state_sizes 5 --config_overrides tno_type=s4d": "`s4d_state_size` must be an even number, got 5",
        "--longer 9": "--longer must be left out for copying, got 9",
    }

    def small(self, folder):
        return words("--task delay --state_sizes 2 --memory 4 --length 20 --hidden_size 2 --max_train_samples 20",
                     "--max_eval_samples 5 --max_steps 2 --save_strategy no --report_to none")  # fmt: skip

    def configure(self, recipe, args, training):
        assert args.name in recipe.stem or recipe.stem == "mixers"


class TestAblation(TrainingTests):
    command = "ablation"
    needed = "--variants rpe --output_dir ../out"
    keeps, figure = False, "perplexity"
    recipes = "ablations/*.yaml"
    arguments = [AblationArguments, training_options()]
    refused = NOTHING_KEPT | {
        "--variants a:decay=2": r"--variants a: `decay` must be in \(0, 1\] or None, got 2",
        "--variants decay=1": "--variants must be NAME or NAME:FIELD=VALUE,..., got decay=1",
    }

    def small(self, folder):
        text, fields = write_text(folder / "text.txt", copies=60), f"{SMALL},max_position_embeddings=16,vocab_size=300"
        return words(f"--dataset_name {text} --config_overrides {fields} --variants one --max_steps 2",
                     "--save_strategy no --report_to none")  # fmt: skip

    def configure(self, recipe, args, training):
        changes = [parse_overrides(variant.partition(":")[2]) for variant in args.variants]
        assert len({json.dumps(change, sort_keys=True) for change in changes}) == len(args.variants)


class TestServe(ProgramTests):
    command = "serve"
    needed = "--model_name_or_path outputs/a"
    refused = {"": "'outputs/a', which is not a folder here"}


class TestApi(TestServe):
    command = "api"
    refused = TestServe.refused | {"--port 99999": r"--port must be in \[0, 65535\], got 99999"}


class TestPush(ProgramTests):
    command = "push"
    needed = "tnn --repo_id user/name --card_dir tnn"
    refused = {"": "folder of the card must not be that of a model"}


class TestConvert(ProgramTests):
    command = "convert"
    needed = "tnn/model.safetensors tnn --architecture tnn_pytorch"
    refused = {"--overwrite_output_dir": "must not hold the model that is read"}

    def test_a_model_stays(self):
        ended = run(self.program, "gpt2/model.safetensors", "tnn", "--architecture tnn_pytorch", check=False)
        assert "holds a model. Give --overwrite_output_dir to replace it" in ended.stderr


class TestPresets(ProgramTests):
    command = "presets"
    refused = {"tnn-smal": "preset or a recipe, got tnn-smal; did you mean tnn-small[?]"}


def test_every_program_has_a_command_and_a_class():
    programs = {path.stem for path in (ROOT / "scripts").glob("*.py")} - {"__init__", "tnn"}
    assert sorted(module for module, _ in COMMANDS.values()) == sorted(programs)
    classes = [one for one in globals().values() if isinstance(one, type) and issubclass(one, ProgramTests)]
    assert sorted(one.command for one in classes if one.command) == sorted(COMMANDS)


def test_an_option_has_one_type_and_one_help():
    """One that several programs have is described in `common/parser.py`, or by transformers."""
    # A path is a text that is checked; a choice is one of some texts.
    same = {"Path": "str", "None": "str", "string_to_bool": "bool", "check_device": "str"}
    types, helps = defaultdict(set), defaultdict(set)
    for name, _ in COMMANDS.values():
        for option, action in options_of(name).items():
            kind = "bool" if action.nargs == 0 else getattr(action.type, "__name__", str(action.type))
            types[option].add(same.get(kind, kind))
            helps[option].add(action.help)
    assert not {option for option, kinds in types.items() if len(kinds) > 1 and option not in OF_TRAINER}
    assert not {option for option, texts in helps.items() if len(texts) > 1 and option not in OF_TRAINER}
    assert not {name for name in HELP if f"--{name}" not in helps}


def test_a_recipe_has_a_name_and_gives_way_to_the_command_line(tmp_path):
    assert find_recipe("wikitext2").name == "wikitext2.yaml" and find_recipe("lra/small-text").parent.name == "lra"
    file = tmp_path / "mine.yaml"
    for recipe, given, seeds in (("seed: 7", "", [7]), ("seed: 7", "--seeds 0 1", [0, 1]), ("seeds: [0, 1]",
                                 "--seed=7", [7])):  # fmt: skip
        file.write_text(f"{recipe}\nvariants: [rpe]\n")
        args, training = parse(TestAblation.arguments, f"--recipe {file} --output_dir {tmp_path} {given}")
        assert (args.seeds or [training.seed]) == seeds


def test_several_seeds_are_the_models_of_each(tmp_path):
    programs = TestSynthetic()
    both, alone = (programs.result(programs.small(tmp_path), tmp_path / seeds[-1], f"--seeds {seeds}")
                   for seeds in ("3 4", "3"))  # fmt: skip
    assert [seed for seed, _ in both] == [3, 4] and both[0] == alone[0] != both[1]


def test_mistakes_of_a_program_are_seen():
    with pytest.raises(KeyError):
        report_errors(Mock(side_effect=KeyError("a mistake"), __name__="main"))()
    panic = type("PanicException", (BaseException,), {})("called `unwrap()` on a `None` value")
    with pytest.raises(SystemExit, match="^error: A library failed with a file .* tokenizer.json: called") as left:
        report_errors(Mock(side_effect=panic, __name__="main"))()
    assert left.value.code == 2


def test_threads_keep_to_the_cpus_of_a_container(tmp_path, monkeypatch):
    """The least limit of the group of this process and those above it, unless the user has set the threads."""
    for folder, limit in (("a", "250000 100000"), ("a/b", "max 100000"), ("other", "50000 100000")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "cpu.max").write_text(f"{limit}\n")
    groups = tmp_path / "cgroup"
    for path, cpus in (("0::/a/b", 2.5), ("0::/", math.inf), ("9:name=systemd:/other", math.inf)):
        groups.write_text(f"{path}\n")
        assert threads.cpu_quota(tmp_path, groups) == cpus, path
    assert threads.cpu_quota(tmp_path, tmp_path / "none") == math.inf
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # and back to what it was at the end
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for quota, given, expected in ((2.5, None, "2"), (0.5, None, "1"), (math.inf, None, "8"), (2, "5", "5")):
        monkeypatch.setattr(threads, "cpu_quota", lambda quota=quota: quota)
        monkeypatch.setenv("OMP_NUM_THREADS", given) if given else monkeypatch.delenv("OMP_NUM_THREADS", False)
        threads.limit_threads()
        assert os.environ["OMP_NUM_THREADS"] == expected


def test_ctrl_c_in_a_destructor(monkeypatch):
    """Python loses what a `__del__` raises."""
    deaf = type("Deaf", (), {"__del__": lambda self: signal.raise_signal(signal.SIGINT)})

    @report_errors
    def main():
        deaf()
        for _ in range(600):
            time.sleep(0.1)

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    # A shell without job control starts what runs in the background with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.code == 130


def test_a_run_that_is_not_finished_is_resumed_or_replaced(tmp_path):
    """A run that is replaced starts without the checkpoints of the other. `best` is a model, too."""
    programs, out = TestPretrain(), tmp_path / "out"
    command = [*programs.small(tmp_path), f"--output_dir {out} --checkpointing_steps 1"]
    run_script("pretrain", *command)
    run_script("pretrain", *command, "--max_steps 3 --resume_from_checkpoint latest")
    with pytest.raises(SystemExit, match="holds checkpoints of a run. .*--overwrite_output_dir to replace it"):
        run_script("pretrain", *command)
    run_script("pretrain", *command, "--max_steps 1 --overwrite_output_dir --learning_rate 0.1")
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-1"}
    (tmp_path / "other").mkdir()
    (out / "best").rename(tmp_path / "other" / "best")
    (tmp_path / "other" / "best" / "config.json").unlink()  # weights alone are one
    with pytest.raises(SystemExit, match="best holds a model. Give --overwrite_output_dir to replace it"):
        run_script("pretrain", *command, f"--output_dir {tmp_path}/other")


def test_checkpoints_of_trainer_are_a_run_too(tmp_path):
    """One of another run is not what `latest` means."""
    out = tmp_path / "out"
    command = [*TestLra().small(tmp_path), f"--output_dir {out} --save_strategy steps --save_steps 1"]
    run_script("run_lra", *command, "--max_steps 2")
    (out / "config.json").unlink()
    (out / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match="holds checkpoints of a run"):
        run_script("run_lra", *command)
    run_script("run_lra", *command, "--overwrite_output_dir")
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-1"}
