"""What Trainer promises of every model: accumulated batches, resumed runs, the best model in the end, and NEFTune."""

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments, pipeline

from helpers.ecosystem import SENTENCES
from helpers.models import seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForImageClassification, TnnForMaskedLM, TnnForSequenceClassification
from modeling_tnn.data.text import train_tokenizer

IMAGE = {"spatial_dims": 2, "max_position_embeddings": 16, "image_size": 8, "patch_size": 2}
CASES = {
    "rpe": (TnnForCausalLM, {"tno_type": "rpe", "causal": True}),
    "fd": (TnnForMaskedLM, {"tno_type": "fd", "causal": False}),
    "ski": (TnnForSequenceClassification, {"tno_type": "ski", "causal": False}),
    "rtf": (TnnForSequenceClassification, {"tno_type": "rtf", "causal": True}),
    "s4d": (TnnForCausalLM, {"tno_type": "s4d", "causal": True}),
    "images": (TnnForImageClassification, {"causal": False} | IMAGE),
}


def build(case: str):
    """A model without dropout, so that two runs can be compared."""
    head, fields = CASES[case]
    return seeded(head, tiny_config(**fields, num_labels=3, hidden_dropout_prob=0.0))


def rows_for(model) -> list[dict]:
    """16 random rows with labels, every other row of texts with padding."""
    torch.manual_seed(1)
    if isinstance(model, TnnForImageClassification):
        return [{"pixel_values": torch.randn(3, 8, 8), "labels": index % 3} for index in range(16)]
    rows, words = [], isinstance(model, TnnForCausalLM | TnnForMaskedLM)
    for index in range(16):
        ids, mask = torch.randint(2, 99, (12,)), torch.arange(12) < 12 - index % 2
        rows.append({"input_ids": ids, "attention_mask": mask.long(), "labels": index % 3})
        if words:
            rows[-1]["labels"] = ids.masked_fill(~mask, -100)
    return rows


def trained(case: str, folder, checkpoint: str | None = None, **options) -> Trainer:
    """Eight steps in the order of the rows, without files unless asked otherwise."""
    defaults = {"max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 0.1, "optim": "sgd", "seed": 3}
    defaults |= {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    arguments = TrainingArguments(folder, **defaults | {"train_sampling_strategy": "sequential"} | options)
    model = build(case)
    rows = rows_for(model)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:5])
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def distance(one, other) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("case", CASES)
def test_every_way_of_training(case, tmp_path):
    usual = trained(case, tmp_path).model
    assert distance(usual, build(case)) > 1e-3
    parts = trained(case, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert distance(parts.model, usual) < 1e-5
    saving = {"optim": "adamw_torch", "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 4}
    whole = trained(case, tmp_path, **saving)
    resumed = trained(case, tmp_path, str(tmp_path / "checkpoint-4"), **saving)
    assert distance(resumed.model, whole.model) < 1e-6
    if case != "images":
        noisy = trained(case, tmp_path, neftune_noise_alpha=5.0).model
        assert distance(noisy, usual) > 1e-5 and not noisy.get_input_embeddings()._forward_hooks


def test_the_best_model_in_the_end(tmp_path):
    """With a rate that makes the last evaluation worse than the best."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "bf16": True}
    trainer = trained("rpe", tmp_path, load_best_model_at_end=True, learning_rate=3.0, **options)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 4 and trainer.state.best_metric == min(losses) < losses[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-3)


def test_zero_shot_classification():
    """A classifier of entailment scores labels of any words."""
    tokenizer = train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300)
    labels = {"contradiction": 0, "neutral": 1, "entailment": 2}
    names = {number: name for name, number in labels.items()}
    config = tiny_config("rpe", False, vocab_size=len(tokenizer), num_labels=3, label2id=labels, id2label=names)
    classify = pipeline("zero-shot-classification", seeded(TnnForSequenceClassification, config), tokenizer=tokenizer)
    found = classify(SENTENCES[0], ["politics", "a long walk"])
    assert sum(found["scores"]) == pytest.approx(1) and set(found["labels"]) == {"politics", "a long walk"}
    alone = classify(SENTENCES[0], ["politics"], multi_label=True)["scores"][0]
    text = tokenizer(SENTENCES[0], "This example is politics.", return_tensors="pt", truncation="only_first")
    logits = classify.model(**text).logits[0, [0, 2]]
    assert alone == pytest.approx(logits.softmax(-1)[1].item(), rel=1e-4)
