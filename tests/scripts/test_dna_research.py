"""The program that measures models of DNA (`docs/research/dna.py`): its chains, and its task of order."""

import math
import sys
from argparse import Namespace
from importlib import import_module

import numpy as np
import pytest

from helpers.scripts import ROOT

pytest.importorskip("Bio")
sys.path.append(str(ROOT / "docs" / "research"))
dna = import_module("dna")
DRAWN = "".join(np.random.default_rng(2).choice(list("ACGT"), 9600, p=[0.3, 0.2, 0.2, 0.3]))


def test_markov_chains(tmp_path):
    """By the definition, letter by letter: trained on 95% of the windows and their other strands."""
    (tmp_path / "a.fa").write_text(f">one\n{DRAWN[:2400]}\n")
    lines = dna.markov(Namespace(train_file=str(tmp_path / "a.fa"), block_size=20))
    windows = [DRAWN[i : i + 20] for i in range(0, 2400, 20)]
    other = str.maketrans("ACGT", "TGCA")
    train = [text for window in windows[:-6] for text in (window, window[::-1].translate(other))]
    for order in (0, 2):
        bits = []
        for window in windows[-6:]:
            for place in range(max(order, 1), 20):
                context = window[place - order : place]
                follows = [
                    text[i + order] for text in train for i in range(20 - order) if text[i : i + order] == context
                ]
                bits.append(-math.log2((follows.count(window[place]) + 1) / (len(follows) + 4)))
        assert lines[order] == f"order {order}: {sum(bits) / len(bits):.4f} bits per base"


def test_the_task_of_order(tmp_path):
    records = [f">{number}\n{DRAWN[start : start + 960]}\n" for number, start in enumerate(range(0, 9600, 960))]
    (tmp_path / "a.fa").write_text("".join([*records, records[0]]))
    train, labels, test, test_labels = dna.load(Namespace(train_file=str(tmp_path / "a.fa"), first="TA", second="CG"))
    assert len(train) == len(labels) > 10 and len(test) == len(test_labels) > 2 and not set(train) & set(test)
    for text, label in zip(train + test, [*labels, *test_labels], strict=True):
        assert len(text) == 24 and text.count("TA") == text.count("CG") == 1
        assert label == (text.find("TA") < text.find("CG"))
