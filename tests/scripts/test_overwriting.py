"""A model that is there is not written over unless asked for, and never the one that a program reads."""

import os

import pytest
from transformers import AutoModelForCausalLM

from helpers.glue import glue_options
from helpers.models import seeded, tiny_config
from helpers.scripts import ROOT, run_script, save_model, tree, weights, write_config, write_text
from modeling_tnn import TnnForCausalLM

HOLDS = "holds a model. Give --overwrite_output_dir to replace it"
SOURCE = "must not hold the model that is read"
LISTOPS = ["--task", "listops", "--config_name", "tnn-listops", "--max_train_samples", 8, "--max_eval_samples", 4,
           "--max_length", 40,
           "--config_overrides", "hidden_size=16,num_hidden_layers=1,rpe_dim=8", "--max_steps", 1,
           "--per_device_train_batch_size", 2, "--report_to", "none", "--save_strategy", "no"]  # fmt: skip


@pytest.fixture
def finished(tmp_path):
    """The folder of a model that is finished."""
    seeded(TnnForCausalLM, tiny_config()).save_pretrained(tmp_path / "out")
    return tmp_path / "out"


def commands(folder) -> dict[str, list]:
    config, text = write_config(folder / "config"), write_text(folder / "text.txt")
    training = ["--config_name", config, "--output_dir", folder / "out", "--max_steps", 2]
    return {
        "demo": ["demo", *training, "--dataset_name", text, "--batch_size", 2, "--max_new_tokens", 2],
        "pretrain": ["pretrain", *training, "--train_file", text],
        "run_lra": ["run_lra", *LISTOPS, "--output_dir", folder / "out"],
        "to_recurrent": ["to_recurrent", "--model_name_or_path", folder / "model", "--output_dir", folder / "out",
                         "--order", 4,
                         "--dataset_name", text, "--length", 64, "--rows", 1],
    }  # fmt: skip


@pytest.mark.parametrize("program", ["demo", "pretrain", "run_lra", "to_recurrent"])
def test_a_model_stays(program, finished, tmp_path):
    save_model(tmp_path / "model", tno_type="rpe", decay=0.9)
    before, command = tree(finished), commands(tmp_path)[program]
    with pytest.raises(SystemExit, match=HOLDS):
        run_script(*command)
    assert tree(finished) == before
    run_script(*command, "--overwrite_output_dir")
    assert tree(finished) != before


def test_finetuning(encoder, glue, finished, tmp_path):
    """Predictions of the earlier model go with it."""
    given = ["--task_name", "sst2", "--dataset_path", glue, "--max_steps", 1]
    (finished / "predict_results_qqp.txt").touch()
    before = tree(finished)
    with pytest.raises(SystemExit, match=HOLDS):
        run_script("finetune_glue", *glue_options(encoder, finished, *given))
    with pytest.raises(SystemExit, match=HOLDS):
        run_script("finetune_glue", *glue_options(encoder, finished, *given, "--sweep"))
    assert tree(finished) == before
    run_script("finetune_glue", *glue_options(encoder, finished, *given, "--overwrite_output_dir"))
    assert tree(finished) != before and not list(finished.glob("predict_results_*"))
    with pytest.raises(SystemExit, match=SOURCE):
        run_script("finetune_glue", *glue_options(finished, finished, *given, "--overwrite_output_dir"))


def test_the_source_of_a_conversion(tmp_path):
    folder = save_model(tmp_path / "model", tno_type="rpe", decay=0.9)
    before = tree(folder)
    (tmp_path / "link").symlink_to(folder)
    for output in (folder, tmp_path / "link"):
        with pytest.raises(SystemExit, match=SOURCE):
            run_script(
                "to_recurrent", "--model_name_or_path", folder, "--output_dir", output, "--overwrite_output_dir"
            )
        with pytest.raises(SystemExit, match=SOURCE):
            run_script("convert_original", folder / "model.safetensors", output, "--architecture", "rtf",
                       "--overwrite_output_dir")  # fmt: skip
    (tmp_path / "weights.pt").write_bytes(b"not read")
    with pytest.raises(SystemExit, match=HOLDS):
        run_script("convert_original", tmp_path / "weights.pt", folder, "--architecture", "rtf")
    assert tree(folder) == before


@pytest.mark.parametrize("program", ["model_card", "push_to_hub"])
def test_a_card_over_its_model(program, finished):
    before = tree(finished)
    option = "--output_dir" if program == "model_card" else "--card_dir"
    with pytest.raises(SystemExit, match="folder of the card must not be that of a model"):
        run_script(program, finished, "--repo_id", "user/name", option, finished)
    assert tree(finished) == before


def test_a_run_that_is_not_finished(tmp_path):
    """Without the option it must be resumed; with it, it starts again without checkpoints. `best` is a model, too."""
    command = [*commands(tmp_path)["pretrain"], "--checkpointing_steps", 1]
    run_script(*command)
    run_script(*command, "--max_steps", 3, "--resume_from_checkpoint", "latest")
    with pytest.raises(SystemExit, match="holds checkpoints of a run. .*--overwrite_output_dir to replace it"):
        run_script(*command)
    run_script(*command, "--max_steps", 1, "--overwrite_output_dir", "--learning_rate", 0.1)
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-1"}
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "out" / "best").rename(other / "best")
    with pytest.raises(SystemExit, match=f"best {HOLDS}"):
        run_script(*command, "--output_dir", other)


def test_checkpoints_of_trainer(tmp_path):
    """One of another run is not what `latest` means."""
    command = [*commands(tmp_path)["run_lra"], "--save_strategy", "steps", "--save_steps", 1]
    run_script(*command, "--max_steps", 2)
    (tmp_path / "out" / "config.json").unlink()
    (tmp_path / "out" / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match="holds checkpoints of a run"):
        run_script(*command)
    run_script(*command, "--overwrite_output_dir")
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-1"}


def test_make_demo_may_be_repeated():
    """Into its own folder, but not over a model in another one."""
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "scripts/demo.py" in line)
    assert "$(if $(findstring --output_dir,$(DEMO_ARGS)),,--overwrite_output_dir) $(DEMO_ARGS)" in line
    assert os.path.isfile(ROOT / "scripts" / "demo.py")


def test_weights_alone_are_a_model(finished):
    (finished / "config.json").unlink()
    before = weights(finished)
    with pytest.raises(SystemExit, match=HOLDS):
        run_script(*commands(finished.parent)["pretrain"])
    assert weights(finished).keys() == before.keys()
    with pytest.raises(ValueError):
        AutoModelForCausalLM.from_pretrained(finished)
