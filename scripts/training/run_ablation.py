"""Train variants of a small language model and compare their validation perplexity."""

import math

import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from modeling_tnn.data.text import pack, tokenize, train_tokenizer
from modeling_tnn.tools.comparing import rows_of, score_tokens
from tnn_programs.cli.task_arguments import ComparisonArguments
from tnn_programs.data.corpus import load_corpus
from tnn_programs.training.comparing import Task, compare
from tnn_programs.training.grouping_trainer import GroupingTrainer
from tnn_programs.training.passes import token_losses

MASK_PROBABILITY = 0.15
IGNORED = -100


def tokenizer_for(texts: Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """One tokenizer for all variants, with a mask for the bidirectional ones."""
    tokenizer = train_tokenizer(texts, vocab_size - 1)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    return tokenizer


def mask(ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """The masked inputs and the labels for ids `(T,)`, `(T,)` each. They are the same for every variant and length."""
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASK_PROBABILITY)
    collator.generator = torch.Generator().manual_seed(0)  # transformers 5.17 ignores seed=0
    masked = collator([{"input_ids": ids}])
    return masked["input_ids"][0], masked["labels"][0]


@torch.inference_mode()
def text_loss(
    model: PreTrainedModel, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, length: int, tokens_per_pass: int
) -> tuple[float, int]:
    """The mean loss in nats on ids `(T,)` in rows of `length` <= T, and the number of scored tokens."""
    if getattr(model.config, "causal", True):  # others than TNNs are
        nats = score_tokens(model, ids, length, None, tokens_per_pass)
        return nats.mean().item(), len(nats)
    total, count = 0.0, 0
    parts = (rows_of(part, length, length, tokens_per_pass) for part in mask(ids, tokenizer))
    for rows, labels in zip(*parts, strict=True):
        nats = token_losses(model(rows.to(model.device)).logits, labels.to(model.device), causal=False)  # (B, L)
        total, count = total + nats.double().sum().item(), count + (labels != IGNORED).sum().item()
    return total / count, count


class TextTask(Task):
    """The text that all variants read, in blocks of the trained length, with a tokenizer trained on it."""

    metric = "perplexity"

    def __init__(self, args: ComparisonArguments, training: TrainingArguments):
        config = args.base_config()
        corpus = load_corpus(args.dataset_name, args.dataset_config_name, documents=args.documents)
        self.tokenizer = tokenizer_for(corpus["train"], config.vocab_size)
        lengths = [config.max_position_embeddings, *args.longer]
        lines = tokenize(corpus["validation"]["text"], self.tokenizer, corpus["validation"]["ends"])
        ids = torch.tensor([token for line in lines for token in line])
        if len(ids) < max(lengths):
            count = f"{len(ids)}, the number of tokens of the validation text"
            raise ValueError(f"--longer must be at most {count}, got {max(lengths)}")
        self.validation = ids[: max(args.eval_tokens, *lengths)]  # (T,)
        self.blocks = pack(corpus["train"], self.tokenizer, lengths[0])
        super().__init__(args, training, lengths)

    def model(self, config: PreTrainedConfig) -> nn.Module:
        config.vocab_size = len(self.tokenizer)
        return (AutoModelForCausalLM if getattr(config, "causal", True) else AutoModelForMaskedLM).from_config(config)

    def options(self, config: PreTrainedConfig, seed: int) -> dict:
        mlm = not getattr(config, "causal", True)
        collator = DataCollatorForLanguageModeling(self.tokenizer, mlm=mlm, mlm_probability=MASK_PROBABILITY)
        return {"train_dataset": self.blocks, "data_collator": collator}

    def score(self, trainer: GroupingTrainer, length: int) -> float:
        rows = trainer.args.per_device_eval_batch_size
        return math.exp(text_loss(trainer.model, self.validation, self.tokenizer, length, rows * length)[0])


class ByteTask(TextTask):
    """The same text, scored by the bits that a byte of it takes."""

    metric = "bits per byte"

    def score(self, trainer: GroupingTrainer, length: int) -> float:
        size = len(self.tokenizer.decode(self.validation, skip_special_tokens=True).encode())
        return math.log2(super().score(trainer, length)) * len(self.validation) / size


def run(args: ComparisonArguments, training: TrainingArguments):
    """Train all variants by each learning rate and seed."""
    compare(args, training, TextTask)
