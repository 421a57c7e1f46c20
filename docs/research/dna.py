"""Measure models of DNA beside what is simpler: Markov chains for a genome, logistic regressions for a classifier.

    markov      bits per base of chains of order 0, 1, ... on the windows that `tnn pretrain` evaluates on; counts of
                both strands, with one added to each: p(x | context) = (n(context, x) + 1) / (n(context) + 4)
    linear      accuracy of logistic regressions on one-hot letters and on counts of k-mers, with the penalty that is
                best for the validation windows
    folder      a folder in the form of HyenaDNA with random weights, 2 layers of 64, for `tnn convert`
    finetune    accuracy of a model of a folder, trained by transformers' Trainer, with the weights that are best for
                the validation windows, of ten points of the training

The task of linear and finetune is a part of finding genes: which strand codes? Windows of 108 letters inside genes of
one strand, from a genome in the form of GenBank, each read from a strand that is drawn. The label is whether that
strand codes; the reading frame is unknown. The first 70% of the genome are for training, the next 10% for validation
and the rest for test, whose windows do not overlap. Those of training begin every `--step` letters.

Example:
    python docs/research/dna.py markov --train_file lambda_virus.fa.gz --block_size 256
    python docs/research/dna.py linear --train_file NC_000913.gbk.gz
    python docs/research/dna.py folder --output_dir outputs/hub
    tnn convert outputs/hub outputs/hyenadna --architecture hyenadna
    python docs/research/dna.py finetune --train_file NC_000913.gbk.gz \\
        --model_name_or_path outputs/hyenadna --output_dir outputs/strand
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from Bio import SeqIO
from Bio.SeqRecord import SeqRecord
from datasets import Dataset
from safetensors.torch import save_file
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)

import modeling_tnn  # noqa: F401  the classes of TNNs
from modeling_tnn.data.files import open_text
from modeling_tnn.data.genome import COMPLEMENT, read_fasta, split_windows, whole, windows_of
from modeling_tnn.tno_hyena import decay_rates, exponential_features

ORDERS, KMERS, PENALTIES, LENGTH = range(9), (3, 6), (1e-5, 1e-4, 1e-3, 1e-2), 108
# The parts of the genome: where each begins.
SPLITS = {"train": 0.0, "validation": 0.7, "test": 0.8}
Split = tuple[list[str], np.ndarray]


def markov(args: argparse.Namespace) -> list[str]:
    """A line for each order."""
    genome, size = read_fasta(args.train_file), args.block_size
    train, held = split_windows(windows_of(genome, whole(genome), size))
    letters = [genome[contig][start : start + size] for contig, start, _ in train]
    strands = [part.tobytes().decode() for one in letters for part in (one, COMPLEMENT[one[::-1]])]
    tests = [genome[contig][start : start + size].tobytes().decode() for contig, start, _ in held]
    lines = []
    for order in ORDERS:
        counts = Counter(text[i : i + order + 1] for text in strands for i in range(len(text) - order))
        totals = Counter()
        for found, number in counts.items():
            totals[found[:-1]] += number
        # The model gives no probability to the first letter of a window.
        pairs = [(text[max(0, i - order) : i], text[i]) for text in tests for i in range(max(order, 1), len(text))]
        bits = [-np.log2((counts[context + one] + 1) / (totals[context] + 4)) for context, one in pairs]
        lines.append(f"order {order}: {np.mean(bits):.4f} bits per base")
    return lines


def coding_letters(record: SeqRecord) -> np.ndarray:
    """Whether each letter is in a gene of a protein, on its strand and on the other one, `(2, N)`."""
    found = np.zeros((2, len(record)), dtype=bool)
    for feature in record.features:
        if feature.type == "CDS" and "pseudo" not in feature.qualifiers:
            for part in feature.location.parts:
                found[int(part.strand < 0), int(part.start) : int(part.end)] = True
    return found


def load(args: argparse.Namespace) -> dict[str, Split]:
    """The sequences and labels of each split: 1 where the strand codes that is read, 0 where the other one does."""
    with open_text(args.train_file) as lines:
        record = SeqIO.read(lines, "genbank")
    letters, coding = np.frombuffer(bytes(record.seq), dtype=np.uint8), coding_letters(record)
    draw, splits = np.random.default_rng(args.seed), {}
    ends = [round(share * len(record)) for share in (*SPLITS.values(), 1.0)]
    for name, first, last in zip(SPLITS, ends[:-1], ends[1:], strict=True):
        texts, labels = [], []
        for start in range(first, last - LENGTH + 1, args.step if name == "train" else LENGTH):
            window = coding[:, start : start + LENGTH]
            if not (window.all(1) ^ window.any(1)).any() and window.any(1).sum() == 1:
                part, turned = letters[start : start + LENGTH], draw.random() < 0.5
                texts.append((COMPLEMENT[part[::-1]] if turned else part).tobytes().decode())
                labels.append(int(window[int(turned)].all()))
        splits[name] = texts, np.array(labels)
    return splits


def one_hot(texts: list[str]) -> np.ndarray:
    """Letters by positions, `(N, 4 L)`."""
    letters = np.array([list(text) for text in texts])
    return (letters[..., None] == np.array(list("ACGT"))).reshape(len(texts), -1).astype(np.float32)


def accuracies(classify: Callable[[list[str]], np.ndarray], texts: list[str], labels: np.ndarray) -> list[float]:
    """By the sequences as they are, and by both strands.

    Args:
        classify: gives log-odds that the strand codes that is read, `(N,)`; those of the other strand have their sign.
    """
    turned = [COMPLEMENT[np.frombuffer(text.encode()[::-1], dtype=np.uint8)].tobytes().decode() for text in texts]
    odds = classify(texts)
    return [float(np.mean((one > 0) == labels)) for one in (odds, odds - classify(turned))]


def linear(args: argparse.Namespace) -> list[str]:
    """A line for each kind of features."""
    splits = load(args)
    lines = [f"{name}: {len(texts)} windows, {labels.mean():.3f} positive" for name, (texts, labels) in splits.items()]

    def score(name: str, features: Callable):
        train, labels = features(splits["train"][0]), splits["train"][1]
        fits = [LogisticRegression(C=weight, max_iter=500).fit(train, labels) for weight in PENALTIES]
        validation, test = (
            [accuracies(lambda texts, fit=fit: fit.decision_function(features(texts)), *splits[split]) for fit in fits]
            for split in ("validation", "test")
        )
        one, both = test[np.argmax([first for first, _ in validation])]
        lines.append(f"{name}: {one:.4f}, by both strands {both:.4f}")

    score("one-hot", one_hot)
    for longest in KMERS:
        counts = CountVectorizer(analyzer="char", ngram_range=(1, longest), lowercase=False)
        features = make_pipeline(counts, StandardScaler(with_mean=False)).fit(splits["train"][0])
        score(f"{longest}-mers and shorter", features.transform)
    return lines


def finetune(args: argparse.Namespace) -> list[str]:
    """A line for the weights that are best for the validation windows."""
    tokenizer, splits = AutoTokenizer.from_pretrained(args.model_name_or_path), load(args)

    def rows(texts: list[str], labels: np.ndarray | None = None) -> Dataset:
        return Dataset.from_dict(dict(tokenizer(texts)) | ({} if labels is None else {"labels": labels}))

    model = AutoModelForSequenceClassification.from_pretrained(
        args.model_name_or_path, num_labels=2, classifier_pooling="mean"
    )
    options = TrainingArguments(
        args.output_dir, num_train_epochs=args.num_train_epochs, learning_rate=args.learning_rate,
        per_device_train_batch_size=64, per_device_eval_batch_size=128, lr_scheduler_type="cosine", warmup_steps=0.05,
        weight_decay=0.1, eval_strategy="steps", eval_steps=0.1, save_steps=0.1, save_total_limit=1,
        save_only_model=True, load_best_model_at_end=True, metric_for_best_model="accuracy", logging_steps=100,
        report_to="none", seed=args.seed,
    )  # fmt: skip

    def accuracy(found: EvalPrediction) -> dict[str, float]:
        return {"accuracy": np.mean(found.predictions.argmax(-1) == found.label_ids)}

    trainer = Trainer(
        model, options, train_dataset=rows(*splits["train"]), eval_dataset=rows(*splits["validation"]),
        processing_class=tokenizer, compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()

    def classify(texts: list[str]) -> np.ndarray:
        logits = trainer.predict(rows(texts)).predictions
        return logits[:, 1] - logits[:, 0]

    one, both = accuracies(classify, *splits["test"])
    return [f"{model.num_parameters():,} parameters: accuracy {one:.4f}, by both strands {both:.4f}"]


def random_weights() -> dict[str, torch.Tensor]:
    """Return HyenaDNA's initial weights by their names."""
    width, positions, features, units, hidden = 64, 128, 5, 64, 256
    times, turns = exponential_features(positions, features)
    found = {"embeddings.word_embeddings.weight": 0.02 * torch.randn(16, width)}
    norms = ["ln_f"]

    def put(name: str, outputs: int, inputs: int, std: float | None = None):
        layer = torch.nn.Linear(inputs, outputs)
        found[f"{name}.weight"] = layer.weight.detach() if std is None else std * torch.randn(outputs, inputs)
        found[f"{name}.bias"] = layer.bias.detach() if std is None else torch.zeros(outputs)

    for layer in ("layers.0", "layers.1"):
        mixer, filters = f"{layer}.mixer", f"{layer}.mixer.filter_fn"
        norms += [f"{layer}.norm1", f"{layer}.norm2"]
        put(f"{mixer}.in_proj", 3 * width, width, 0.02)
        put(f"{mixer}.out_proj", width, width, 0.01)
        put(f"{layer}.mlp.fc1", hidden, width, 0.02)
        put(f"{layer}.mlp.fc2", width, hidden, 0.01)
        short = torch.nn.Conv1d(3 * width, 3 * width, 3, groups=3 * width)
        found |= {f"{mixer}.short_filter.{name}": value.detach() for name, value in short.named_parameters()}
        found[f"{filters}.bias"] = torch.randn(width)
        for number, inputs in ((0, features), (2, units), (4, units)):
            put(f"{filters}.implicit_filter.{number}", units, inputs)
        found |= {
            f"{filters}.implicit_filter.1.freq": torch.full((1, units), 10.0),
            f"{filters}.implicit_filter.6.weight": torch.nn.Linear(units, width, bias=False).weight.detach(),
            f"{filters}.pos_emb.t": times.float().view(1, -1, 1),
            f"{filters}.pos_emb.z": turns.float()[None].contiguous(),
            f"{filters}.modulation.deltas": decay_rates(width).float().view(1, 1, -1),
        }
    found |= {f"{name}.weight": torch.ones(width) for name in norms}
    return found | {f"{name}.bias": torch.zeros(width) for name in norms}


def folder(args: argparse.Namespace) -> list[str]:
    """Write a folder in the form of LongSafari/hyenadna-*-hf."""
    torch.manual_seed(args.seed)
    found, place = random_weights(), Path(args.output_dir)
    place.mkdir(parents=True)
    save_file({f"hyena.backbone.{name}": value for name, value in found.items()}, place / "model.safetensors")
    options = {"model_type": "hyenadna", "vocab_size": 12, "hyena_order": 2, "use_bias": True, "activation_freq": 10}
    (place / "config.json").write_text(json.dumps(options))
    return [f"saved in {place}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT)
    for name in ("train_file", "model_name_or_path", "output_dir"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--block_size", type=int, default=1024)
    parser.add_argument("--step", type=int, default=50)
    parser.add_argument("--num_train_epochs", type=float, default=3)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.stdout.write("\n".join([*WHAT[args.what](args), ""]))


WHAT = {"markov": markov, "linear": linear, "folder": folder, "finetune": finetune}

if __name__ == "__main__":
    main()
