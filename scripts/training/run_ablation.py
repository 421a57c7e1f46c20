"""Train variants of a small language model and compare their validation perplexity."""

import math
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from modeling_tnn.data.text import pack, tokenize, train_tokenizer
from modeling_tnn.tno_rtf import RtfOperator
from modeling_tnn.tools.poles import PoleCallback, spectral_radius
from tnn_programs.cli.tables import markdown_table
from tnn_programs.data.corpus import load_corpus
from tnn_programs.training.grouping_trainer import GroupingTrainer
from tnn_programs.training.passes import token_losses
from tnn_programs.training.scoring import batches, score_tokens
from tnn_programs.training.trainer import compare, comparison

if TYPE_CHECKING:
    from tnn_programs.cli.task_arguments import ComparisonArguments

MASK_PROBABILITY = 0.15
IGNORED = -100


@dataclass(frozen=True)
class Text:
    """The text that all variants read."""

    tokenizer: PreTrainedTokenizerFast  # with a mask token
    blocks: Dataset  # to train on
    validation: torch.Tensor  # ids (T,)
    lengths: list[int]  # of the rows of the validation text, at most T


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
def score(
    model: PreTrainedModel, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, length: int, tokens_per_pass: int
) -> tuple[float, int]:
    """The mean loss in nats on ids `(T,)` in rows of `length` <= T, and the number of scored tokens."""
    if model.config.causal:
        nats = score_tokens(model, ids, length, None, tokens_per_pass)
        return nats.mean().item(), len(nats)
    total, count = 0.0, 0
    parts = (batches(part, length, length, tokens_per_pass) for part in mask(ids, tokenizer))
    for rows, labels in zip(*parts, strict=True):
        nats = token_losses(model(rows.to(model.device)).logits, labels.to(model.device), causal=False)  # (B, L)
        total, count = total + nats.double().sum().item(), count + (labels != IGNORED).sum().item()
    return total / count, count


def build_trainer(
    args: "ComparisonArguments", text: Text, training: TrainingArguments, variant: str, rate: float
) -> GroupingTrainer:
    """The Trainer of one variant, with its model."""
    config, name = args.variant_config(variant), variant.partition(":")[0]
    config.vocab_size = len(text.tokenizer)
    place = f"{name}-lr{rate:g}-seed-{training.seed}" if args.sweep_learning_rates else f"{name}-seed-{training.seed}"
    training.learning_rate, training.output_dir = rate, str(Path(training.output_dir) / place)
    auto_class = AutoModelForCausalLM if config.causal else AutoModelForMaskedLM
    collator = DataCollatorForLanguageModeling(text.tokenizer, mlm=not config.causal, mlm_probability=MASK_PROBABILITY)
    return GroupingTrainer(
        model=auto_class.from_config(config),
        args=training,
        train_dataset=text.blocks,
        data_collator=collator,
        callbacks=[PoleCallback(args.max_pole_radius)],
        groups=args.groups(),
    )


def score_variant(text: Text, trainer: GroupingTrainer, result, variant: str, rate: float) -> dict:
    """The perplexity of a trained variant at each length, the time of its training and the loss by step, in nats."""
    model, rows = trainer.model.eval(), trainer.args.per_device_eval_batch_size
    scores = {length: score(model, text.validation, text.tokenizer, length, rows * length) for length in text.lengths}
    return {
        "variant": variant.partition(":")[0],
        "changes": variant.partition(":")[2],
        "learning_rate": rate,
        "seed": trainer.args.seed,
        "perplexity": {str(length): math.exp(loss) for length, (loss, _) in scores.items()},
        "scored_tokens": scores[text.lengths[0]][1],
        "largest_pole": largest_pole(model),
        "parameters": model.num_parameters(),
        "steps": trainer.state.global_step,
        "train_seconds": result.metrics["train_runtime"],
        "training_loss": {str(entry["step"]): entry["loss"] for entry in trainer.state.log_history if "loss" in entry},
    }


@torch.no_grad()
def largest_pole(model: PreTrainedModel) -> float | None:
    """The largest magnitude of a pole in all RTF layers, or None without such layers. Below 1 generation is stable."""
    found = [spectral_radius(module.denominators()) for module in model.modules() if isinstance(module, RtfOperator)]
    return torch.cat(found).max().item() if found else None


def table(rows: list[dict]) -> str:
    """A Markdown table of the mean over the seeds at each length, at the learning rate that is best at the first."""
    lengths = list(rows[0]["perplexity"])
    lines = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        rates = {row["learning_rate"] for row in rows if row["variant"] == name}
        best = min((means_of(rows, name, rate) for rate in rates), key=lambda found: found["perplexity"][0])
        shown = (f"{mean:.2f}" for mean in best["perplexity"])
        lines.append([name, *shown, f"{best['learning_rate']:g}", f"{best['parameters']:,}", best["seeds"]])
    headers = ["variant", *(f"perplexity at {n}" for n in lengths), "learning rate", "parameters", "seeds"]
    return markdown_table(headers, lines)


def means_of(rows: list[dict], name: str, rate: float) -> dict:
    """The figures of a variant at a learning rate, over the seeds."""
    own = [row for row in rows if (row["variant"], row["learning_rate"]) == (name, rate)]
    means = [statistics.mean(row["perplexity"][length] for row in own) for length in own[0]["perplexity"]]
    return {"learning_rate": rate, "perplexity": means, "parameters": own[0]["parameters"], "seeds": len(own)}


def load_text(args: "ComparisonArguments") -> Text:
    """The text in blocks of the first variant's length, with a tokenizer trained on it."""
    config = args.variant_config(args.variants[0])
    corpus = load_corpus(args.dataset_name, args.dataset_config_name, documents=args.documents)
    tokenizer = tokenizer_for(corpus["train"], config.vocab_size)
    lengths = [config.max_position_embeddings, *args.longer]
    lines = tokenize(corpus["validation"]["text"], tokenizer, corpus["validation"]["ends"])
    ids = torch.tensor([token for line in lines for token in line])
    if len(ids) < max(lengths):
        count = f"{len(ids)}, the number of tokens of the validation text"
        raise ValueError(f"--longer must be at most {count}, got {max(lengths)}")
    validation = ids[: max(args.eval_tokens, *lengths)]
    return Text(tokenizer, pack(corpus["train"], tokenizer, lengths[0]), validation, lengths)


def run(args: "ComparisonArguments", training: TrainingArguments):
    """Train all variants by each learning rate and seed."""
    with comparison(args, training):
        text, rates = load_text(args), args.sweep_learning_rates or [training.learning_rate]
        build, score = partial(build_trainer, args, text), partial(score_variant, text)
        compare(args, training, build, score, table, args.variants, rates)
