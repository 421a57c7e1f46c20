"""Measure models of DNA beside what is simpler: Markov chains for a genome, logistic regressions for a classifier.

    markov      bits per base of chains of order 0, 1, ... on the windows that `tnn pretrain` evaluates on; counts of
                both strands, with one added to each: p(x | context) = (n(context, x) + 1) / (n(context) + 4)
    linear      accuracy of logistic regressions on one-hot letters and on counts of k-mers, the best of five weights
                of the penalty for each, by the test set: an upper bound for them
    finetune    accuracy of a model of a folder, trained by transformers' Trainer, with the last weights

The task of the last two is of order: windows of a genome with exactly one `--first` and one `--second` motif. The
label is whether the first stands before the second, which neither letters by position nor counts of k-mers determine.
The last fifth of the records is the test set, without windows that are in training too.

Example:
    python docs/research/dna.py markov --train_file lambda_virus.fa.gz --block_size 256
    python docs/research/dna.py linear --train_file Arabidopsis_non_prom_big.fa
    python docs/research/dna.py finetune --train_file Arabidopsis_non_prom_big.fa \\
        --model_name_or_path outputs/hyenadna --output_dir outputs/order
"""

import argparse
import sys
from collections import Counter

import numpy as np
from Bio.SeqIO.FastaIO import SimpleFastaParser
from datasets import Dataset
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
from modeling_tnn.data.genome import COMPLEMENT, read_fasta, split_windows, whole, windows_of
from tnn_cli.model_path import open_text

LENGTH, ORDERS, KMERS, PENALTIES = 24, range(9), range(3, 7), (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


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


def load(args: argparse.Namespace) -> tuple[list[str], np.ndarray, list[str], np.ndarray]:
    """The sequences and labels of training and test."""
    with open_text(args.train_file) as lines:  # names may come twice
        records = [letters.upper() for _, letters in SimpleFastaParser(lines)]
    found = [
        (text, number < len(records) * 4 // 5)
        for number, letters in enumerate(records)
        for text in (letters[i : i + LENGTH] for i in range(0, len(letters) - LENGTH + 1, LENGTH))
        if set(text) <= set("ACGT") and text.count(args.first) == text.count(args.second) == 1
    ]
    train = [text for text, is_train in found if is_train]
    test = sorted({text for text, is_train in found if not is_train} - set(train))
    labels = [
        np.array([text.index(args.first) < text.index(args.second) for text in part], int) for part in (train, test)
    ]
    return train, labels[0], test, labels[1]


def one_hot(texts: list[str]) -> np.ndarray:
    """Letters by positions, `(N, 4 L)`."""
    letters = np.array([list(text) for text in texts])
    return (letters[..., None] == np.array(list("ACGT"))).reshape(len(texts), -1).astype(np.float32)


def linear(args: argparse.Namespace) -> list[str]:
    """A line for each kind of features."""
    texts, labels, test_texts, test_labels = load(args)
    lines = [f"{len(texts)} training and {len(test_texts)} test sequences, {test_labels.mean():.3f} positive"]

    def score(name: str, train, test):
        fits = [LogisticRegression(C=weight, max_iter=500).fit(train, labels) for weight in PENALTIES]
        lines.append(f"{name}: {max(fit.score(test, test_labels) for fit in fits):.4f}")

    score("one-hot", one_hot(texts), one_hot(test_texts))
    for longest in KMERS:
        counts = CountVectorizer(analyzer="char", ngram_range=(1, longest), lowercase=False)
        features = make_pipeline(counts, StandardScaler(with_mean=False)).fit(texts)
        score(f"{longest}-mers and shorter", features.transform(texts), features.transform(test_texts))
    return lines


def finetune(args: argparse.Namespace) -> list[str]:
    """A line for the last weights."""
    texts, labels, test_texts, test_labels = load(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model_name_or_path, num_labels=2, classifier_pooling="mean"
    )
    data = [
        Dataset.from_dict(dict(tokenizer(texts)) | {"labels": labels})
        for texts, labels in ((texts, labels), (test_texts, test_labels))
    ]
    options = TrainingArguments(
        args.output_dir, num_train_epochs=args.num_train_epochs, learning_rate=args.learning_rate,
        per_device_train_batch_size=64, per_device_eval_batch_size=128, lr_scheduler_type="cosine", warmup_steps=0.05,
        weight_decay=0.1, eval_strategy="epoch", save_strategy="no", report_to="none", seed=args.seed,
    )  # fmt: skip

    def accuracy(found: EvalPrediction) -> dict[str, float]:
        return {"accuracy": np.mean(found.predictions.argmax(-1) == found.label_ids)}

    trainer = Trainer(
        model, options, train_dataset=data[0], eval_dataset=data[1], processing_class=tokenizer,
        compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return [f"{model.num_parameters():,} parameters: accuracy {trainer.evaluate()['eval_accuracy']:.4f}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT)
    for name in ("train_file", "model_name_or_path", "output_dir"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--block_size", type=int, default=1024)
    parser.add_argument("--first", default="TA")
    parser.add_argument("--second", default="CG")
    parser.add_argument("--num_train_epochs", type=float, default=3)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.stdout.write("\n".join([*WHAT[args.what](args), ""]))


WHAT = {"markov": markov, "linear": linear, "finetune": finetune}

if __name__ == "__main__":
    main()
