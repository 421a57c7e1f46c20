"""The trainers of TRL on causal models. They load a saved folder, and the base trainer is that of transformers."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from helpers.ecosystem import SENTENCES, Matrix, log_likelihood, save_head
from helpers.models import relative_error
from modeling_tnn import TnnForCausalLM

heads = Matrix()
STARTS, ENDS = [text[:9] for text in SENTENCES], [text[9:] for text in SENTENCES]


def settings(trainer: str, output_dir, **options):
    """The configuration of a trainer of TRL, for a few steps without files."""
    trl = pytest.importorskip("trl")
    common = {"learning_rate": 3e-3, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "seed": 0}
    common |= {"use_cpu": True, "bf16": False}  # as TRL takes bfloat16 unless told otherwise
    return getattr(trl, f"{trainer}Config")(str(output_dir / "run"), **common | options)


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@heads(TnnForCausalLM)
@pytest.mark.parametrize("packing", [True, False])
def test_trl_sft(head, folder, packing, tmp_path):
    """Packed texts do not see each other: the loss of a batch is that of its texts one by one. The loss falls."""
    args = settings("SFT", tmp_path, packing=packing, max_length=64, max_steps=8, per_device_train_batch_size=2)
    from trl import SFTTrainer

    trainer = SFTTrainer(str(folder), args, train_dataset=Dataset.from_dict({"text": SENTENCES * 8}))
    batch = next(iter(trainer.get_train_dataloader()))
    assert ("position_ids" in batch) == packing
    model = trainer.model.eval()
    with torch.no_grad():
        whole = model(**batch).loss
        parts = [model(text[None], labels=text[None]) for text in texts_of(batch)]
    counts = torch.tensor([part.logits.shape[1] - 1 for part in parts])
    alone = (torch.stack([part.loss for part in parts]) * counts).sum() / counts.sum()
    assert len(parts) > 1 and relative_error(whole, alone) < 1e-5
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[-1] < 0.8 * losses[0], losses


def texts_of(batch) -> list[torch.Tensor]:
    """The tokens of each text, packed in one row or padded."""
    if "position_ids" in batch:
        starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        return list(batch["input_ids"][0].tensor_split(starts[1:]))
    return [row[mask.bool()] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


@heads(TnnForCausalLM)
def test_trl_dpo(head, folder, tokenizer, tmp_path):
    """The first loss is log 2; then the chosen texts become likelier than the rejected ones."""
    args = settings("DPO", tmp_path, max_steps=8, per_device_train_batch_size=4)
    from trl import DPOTrainer

    rejected = [" of the", " jug", " daft"]
    data = Dataset.from_dict({"prompt": STARTS * 8, "chosen": ENDS * 8, "rejected": rejected * 8})
    trainer = DPOTrainer(str(folder), args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(0.6931, abs=1e-3)
    before, after = AutoModelForCausalLM.from_pretrained(folder).eval(), trainer.model.eval()
    for start, good, bad in zip(STARTS, ENDS, rejected, strict=True):
        margins = [
            log_likelihood(model, tokenizer, start, good) - log_likelihood(model, tokenizer, start, bad)
            for model in (before, after)
        ]
        assert margins[1] > margins[0] + 1, start


@heads(TnnForCausalLM)
def test_trl_grpo(head, tokenizer, tmp_path):
    """The reward, the number of even tokens, rises. The texts come from `generate` and its cache."""
    args = settings("GRPO", tmp_path, max_steps=16, learning_rate=2e-2, per_device_train_batch_size=16,
                    num_generations=8, max_completion_length=8)  # fmt: skip
    from trl import GRPOTrainer

    def reward(completion_ids: list[list[int]], **columns) -> list[float]:
        return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]

    # Untied: a random model with tied embeddings repeats its last token.
    folder = save_head(head, tokenizer, tmp_path / "model", tie_word_embeddings=False)
    data = Dataset.from_dict({"prompt": STARTS * 8})
    trainer = GRPOTrainer(str(folder), reward, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert rewards[0] < 5 and rewards[-1] > 6.5, rewards


def test_matrix_of_the_page():
    heads.check()
