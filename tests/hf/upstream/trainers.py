"""What transformers' tests of Trainer check over every class and variant, in our words: its archive lacks them.

Run by `make test-hf`: not part of the usual tests. Label smoothing is in `tests/unit/test_modeling.py`, LoRA and
the usual training of each class in `tests/hf/test_ecosystem.py`.
"""

import harness  # noqa: F401
import pytest
import torch
from transformers import Trainer, TrainingArguments

from helpers.models import VARIANTS, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForImageClassification, TnnForMaskedLM, TnnForSequenceClassification
from tnn_scripts.common.sequence_pairs import TnnForSequencePairClassification

IMAGE = {"spatial_dims": 2, "max_position_embeddings": 16, "image_size": 8, "patch_size": 2}
ROWS, LENGTH, LABELS = 16, 12, 3
CASES = [(TnnForCausalLM if causal else TnnForMaskedLM, {"tno_type": t, "causal": causal}) for t, causal in VARIANTS]
CASES += [(TnnForSequenceClassification, {"tno_type": t, "causal": causal}) for t, causal in VARIANTS]
CASES += [(TnnForSequencePairClassification, {"causal": False})]
CASES += [(TnnForImageClassification, {"causal": False} | IMAGE)]
NAMES = ["-".join([head.__name__, *map(str, fields.values())]) for head, fields in CASES]
EVERY_CASE = pytest.mark.parametrize("head, fields", CASES, ids=NAMES)


def build(head, fields):
    """A model without dropout, so that two runs can be compared."""
    return seeded(head, tiny_config(**fields, num_labels=LABELS, hidden_dropout_prob=0.0))


def rows_for(model) -> list[dict]:
    """Random inputs and labels, every other row of texts with padding."""
    torch.manual_seed(1)
    shape = (2, LENGTH) if isinstance(model, TnnForSequencePairClassification) else (LENGTH,)
    rows = []
    for index in range(ROWS):
        if isinstance(model, TnnForImageClassification):
            rows.append({"pixel_values": torch.randn(3, 8, 8), "labels": index % LABELS})
            continue
        ids, mask = torch.randint(2, 99, shape), torch.ones(shape, dtype=torch.long)
        mask[..., LENGTH - index % 2 :] = 0
        whole = isinstance(model, TnnForCausalLM | TnnForMaskedLM)
        labels = ids.masked_fill(mask == 0, -100) if whole else index % LABELS
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def trainer_for(model, folder, **options) -> Trainer:
    """Eight steps of plain gradient descent in the order of the rows, without files, unless asked otherwise."""
    defaults = {"max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 0.1, "optim": "sgd", "seed": 3}
    defaults |= {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    arguments = TrainingArguments(folder, **defaults | {"train_sampling_strategy": "sequential"} | options)
    rows = rows_for(model)
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:5])


def same_weights(one, other, tolerance=0.0) -> bool:
    """Whether no weight differs by more."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all((a - b).abs().max() <= tolerance for a, b in pairs)


@EVERY_CASE
def test_accumulated_gradients_are_those_of_the_batch(head, fields, tmp_path):
    whole, parts = build(head, fields), build(head, fields)
    trainer_for(whole, tmp_path).train()
    trainer_for(parts, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4).train()
    assert same_weights(parts, whole, 1e-5)
    assert not same_weights(whole, build(head, fields), 1e-3)


@EVERY_CASE
def test_resumed_run_is_the_uninterrupted_one(head, fields, tmp_path):
    options = {"optim": "adamw_torch", "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 4}
    whole, resumed = build(head, fields), build(head, fields)
    trainer_for(whole, tmp_path, **options).train()
    trainer_for(resumed, tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert same_weights(resumed, whole, 1e-6)


@EVERY_CASE
def test_checkpointed_activations_change_nothing(head, fields, tmp_path):
    usual, checkpointed = build(head, fields), build(head, fields)
    trainer_for(usual, tmp_path).train()
    trainer_for(checkpointed, tmp_path, activation_checkpointing=True).train()
    assert same_weights(checkpointed, usual, 1e-6)


@EVERY_CASE
def test_predictions(head, fields, tmp_path):
    """Logits of all rows and nothing else, no matter how they are cut into batches."""
    model = build(head, fields)
    predictions = [
        trainer_for(model, tmp_path, per_device_eval_batch_size=size).predict(rows_for(model)[:5]) for size in (2, 5)
    ]
    language = isinstance(model, TnnForCausalLM | TnnForMaskedLM)
    shape = (5, LENGTH, 99) if language else (5, LABELS)
    for prediction in predictions:
        assert prediction.predictions.shape == shape
    assert abs(predictions[0].predictions - predictions[1].predictions).max() < 1e-5
    metrics = trainer_for(model, tmp_path, prediction_loss_only=True).evaluate()
    assert metrics["eval_loss"] == pytest.approx(predictions[1].metrics["test_loss"], rel=1e-4)


@EVERY_CASE
def test_bfloat16_and_best_model(head, fields, tmp_path):
    """Autocast, evaluation at every other step, and the weights of the best of them in the end."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "bf16": True}
    trainer = trainer_for(build(head, fields), tmp_path, load_best_model_at_end=True, **options)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 4 and trainer.state.best_metric == min(losses)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-3)


@EVERY_CASE
def test_noisy_embeddings(head, fields, tmp_path):
    """NEFTune finds the embeddings of tokens, and is gone after training."""
    if head is TnnForImageClassification:
        pytest.skip("Noise is for the embeddings of tokens: an image has none.")
    usual, noisy = build(head, fields), build(head, fields)
    trainer_for(usual, tmp_path).train()
    trainer_for(noisy, tmp_path, neftune_noise_alpha=5.0).train()
    assert not same_weights(usual, noisy, 1e-5)
    assert not noisy.get_input_embeddings()._forward_hooks
