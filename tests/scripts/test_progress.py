"""The progress bar of a training with Trainer."""

import pytest
import torch
from transformers import TrainingArguments
from transformers.trainer_callback import ProgressCallback

from helpers.models import seeded, tiny_config
from modeling_tnn import TnnForCausalLM
from tnn_scripts.common.grouping_trainer import GroupingTrainer, LossBar

ROWS = [{"input_ids": [1, 2, 3, 4, 5], "attention_mask": [1] * n + [0] * (5 - n), "labels": [1, 2, 3, 4, 5]}
        for n in (5, 3, 4, 2, 5, 5)]  # fmt: skip


def trainer_of(folder, **options):
    model = seeded(TnnForCausalLM, tiny_config())
    # Other tests set the verbosity of transformers, which the default of disable_tqdm follows.
    fixed = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "logging_steps": 1, "disable_tqdm": False}
    fixed |= {"report_to": "none", "save_strategy": "no", "use_cpu": True}
    args = TrainingArguments(str(folder), **(fixed | options))
    return GroupingTrainer(model, args, train_dataset=ROWS, eval_dataset=ROWS[:2])


@pytest.mark.parametrize("passes", [1, 3])
def test_figures_of_a_training(tmp_path, capsys, monkeypatch, passes):
    """The bar has the last ones; evaluations are lines."""
    monkeypatch.delenv("COLUMNS", raising=False)  # tqdm 4.66 cuts the line there, without a terminal too
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=passes, eval_strategy="steps", eval_steps=1)
    trainer.train()
    shown, history = capsys.readouterr(), trainer.state.log_history
    assert trainer.bar.count == 24, "tokens without padding"
    last = [entry for entry in history if "loss" in entry][-1]
    rate = f"{24 / trainer.bar.seconds:,.0f} tokens/s"
    assert f"loss {last['loss']:.3f}, lr {last['learning_rate']:.1e}, {rate}" in shown.err
    assert "{" not in shown.out + shown.err
    loss = next(entry["eval_loss"] for entry in history if "eval_loss" in entry)
    assert f"step 1: validation loss {loss:.4g}\n" in shown.out.replace("\r", "\n")


def test_inputs_without_a_mask():
    for inputs, counted in (({"input_ids": torch.zeros(3, 7)}, (21, "tokens")),
                            ({"pixel_values": torch.zeros(3, 1, 4, 4)}, (3, "examples"))):  # fmt: skip
        bar = LossBar()
        bar.add({"labels": torch.zeros(3)} | inputs)
        assert (bar.count, bar.unit) == counted


def test_a_resumed_training_begins_where_it_stopped(tmp_path, capsys):
    trainer_of(tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    capsys.readouterr()
    resumed = trainer_of(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    bars = capsys.readouterr().err.split("\r")
    assert "2/3" in next(bar for bar in bars if "/3" in bar)
    assert 0 < resumed.bar.count < 24, "of the last step alone"


def test_without_bars(tmp_path, capsys):
    trainer = trainer_of(tmp_path, disable_tqdm=True)
    assert trainer.bar is None
    trainer.train()
    assert "step/s" not in capsys.readouterr().err
    assert not any(isinstance(callback, ProgressCallback) for callback in trainer.callback_handler.callbacks)
