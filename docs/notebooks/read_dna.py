# %% [markdown]
# # Read DNA: pretrain on a genome, look at it, classify, score variants
#
# The genome is made here, so nothing is downloaded: genes on both strands, which prefer some codons to others. With
# `read_fasta` it would be yours. `tnn pretrain --train_file genome.fa.gz` does the first part for whole genomes.
# Install: `pip install ".[training]"` in a clone.

# %%
import math
import os
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from modeling_tnn import load_preset
from modeling_tnn.data.dna import dna_tokenizer
from modeling_tnn.data.genome import COMPLEMENT, GenomeStream, split_windows, whole, windows_of
from modeling_tnn.data.variants import Variant, score_variants

MAX_STEPS = int(os.environ.get("MAX_STEPS", 300))
folder = tempfile.mkdtemp()
set_seed(0)

# %% [markdown]
# ## A genome
#
# A gene is ATG, codons, and a stop codon. Between genes there are letters by chance, and every second gene or so is
# on the other strand.

# %%
draw = np.random.default_rng(0)
STOPS = ["TAA", "TAG", "TGA"]
CODONS = [codon for codon in (a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT") if codon not in STOPS]
USAGE = draw.dirichlet(np.full(len(CODONS), 0.3))


def letters_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


parts, genes, length = [], [], 0  # a gene: its first letter, the letter after the last one, whether it is turned
while length < 60_000:
    between = letters_of("".join(draw.choice(list("ACGT"), draw.integers(20, 60))))
    gene = letters_of("ATG" + "".join(draw.choice(CODONS, draw.integers(100, 200), p=USAGE)) + draw.choice(STOPS))
    turned = bool(draw.integers(2))
    parts += [between, COMPLEMENT[gene[::-1]] if turned else gene]
    genes.append((length + len(between), length + len(between) + len(gene), turned))
    length += len(between) + len(gene)
genome = {"made": np.concatenate(parts)}
print(f"{length:,} letters, {len(genes)} genes")

# %% [markdown]
# ## Pretraining
#
# Windows of 128 letters, read from both strands; the last twentieth is for validation. The logarithm of the
# perplexity to base 2 is the number of bits per base, and 2 is a guess.

# %%
tokenizer, size = dna_tokenizer(), 128
config = load_preset(
    "hyenadna-small-32k", hidden_size=64, num_hidden_layers=2, intermediate_size=128, max_position_embeddings=size,
    vocab_size=len(tokenizer),
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)
train, validation = split_windows(windows_of(genome, whole(genome), size))
data = [
    GenomeStream(genome, train, tokenizer, size, masked=False, reverse_complement=True),
    GenomeStream(genome, validation, tokenizer, size, masked=False, shuffle=False),
]


def arguments(rate: float) -> TrainingArguments:
    return TrainingArguments(
        folder, max_steps=MAX_STEPS, per_device_train_batch_size=16, learning_rate=rate, warmup_steps=0.1,
        lr_scheduler_type="cosine", logging_steps=100, save_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip


model.config.skip_logits = True  # the loss alone: less time and memory
trainer = Trainer(model, arguments(4e-3), train_dataset=data[0], eval_dataset=data[1], processing_class=tokenizer)
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]
print(f"{before / math.log(2):.3f} bits per base before, {after / math.log(2):.3f} after")
assert after < before
trainer.save_model(folder)

# %% [markdown]
# ## Look at it
#
# What the model expects of each letter of a gene, in the three places of a codon: the third one is chosen by usage.

# %%
model.eval()
forward = [(start, end) for start, end, turned in genes if not turned and end - start > size]
starts = [start + 3 * int(draw.integers((end - start - size) // 3)) for start, end in forward]
ids = torch.stack([torch.from_numpy(data[0].ids[genome["made"][start : start + size]]) for start in starts])
with torch.no_grad():
    chances = model(ids).logits.log_softmax(dim=-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]  # (B, L-1)
bits = (-chances / math.log(2)).mean(dim=0)
figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
for place in range(3):
    axis.plot(range(1, size)[(place - 1) % 3 :: 3], bits[(place - 1) % 3 :: 3], label=f"place {place + 1} of a codon")
axis.set(xlabel="letter", ylabel="bits per base")
axis.legend()

# %% [markdown]
# ## Classify
#
# Which strand codes? Windows inside genes, whose label is whether the gene is turned. The classifier starts from the
# pretrained weights; genes of the test are none of those of the training.


# %%
def windows_in(some: list) -> Dataset:
    found = [(first, turned) for start, end, turned in some for first in range(start, end - 100, 20)]
    texts = [genome["made"][first : first + 100].tobytes().decode() for first, _ in found]
    return Dataset.from_dict(dict(tokenizer(texts)) | {"labels": [int(turned) for _, turned in found]})


classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, classifier_pooling="mean")


def accuracy(predicted) -> dict[str, float]:
    return {"accuracy": float(np.mean(predicted.predictions.argmax(axis=1) == predicted.label_ids))}


cut = len(genes) * 3 // 4
trainer = Trainer(
    classifier, arguments(2e-3), train_dataset=windows_in(genes[:cut]), eval_dataset=windows_in(genes[cut:]),
    processing_class=tokenizer, compute_metrics=accuracy,
)  # fmt: skip
trainer.train()
metrics = trainer.evaluate()
print(f"accuracy {metrics['eval_accuracy']:.3f}")
assert metrics["eval_accuracy"] > 0.9 or MAX_STEPS < 300

# %% [markdown]
# ## Score variants
#
# A variant that makes a stop codon inside a gene should be less likely than the reference.

# %%
variants = []
for start, end in forward:
    for first in range(start + 60, end - 60, 3):
        codon = genome["made"][first : first + 3].tobytes().decode()
        stop = next((one for one in STOPS if sum(a != b for a, b in zip(codon, one, strict=True)) == 1), None)
        if stop is not None:
            place = next(i for i in range(3) if codon[i] != stop[i])
            variants.append(Variant("made", first + place + 1, codon[place], stop[place]))
ratios = score_variants(model, tokenizer, genome, variants[:64], length=size, both_strands=True)
print(f"{len(ratios)} variants, {(ratios < 0).float().mean():.0%} of them less likely than the reference")
assert ratios.mean() < 0 or MAX_STEPS < 300
