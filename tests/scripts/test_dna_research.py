"""The program that measures models of DNA (`docs/research/dna.py`): its chains, and its task of strands."""

import math
import sys
from argparse import Namespace
from importlib import import_module

import numpy as np
import pytest

from helpers.scripts import ROOT

SeqIO = pytest.importorskip("Bio.SeqIO")
from Bio.Seq import Seq  # noqa: E402
from Bio.SeqFeature import SeqFeature, SimpleLocation  # noqa: E402
from Bio.SeqRecord import SeqRecord  # noqa: E402

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


def write_genome(file):
    """Genes of 200 letters on both strands by turns, 50 letters apart; each tenth has no protein."""
    other = str.maketrans("ACGT", "TGCA")
    record = SeqRecord(Seq(DRAWN), id="one", annotations={"molecule_type": "DNA"})
    for number, start in enumerate(range(0, len(DRAWN) - 200, 250)):
        place = SimpleLocation(start, start + 200, strand=(1, -1)[number % 2])
        record.features.append(SeqFeature(place, type="CDS", qualifiers={"pseudo": [""]} if number % 10 == 3 else {}))
    SeqIO.write(record, file, "genbank")
    return {1: DRAWN, -1: DRAWN.translate(other)[::-1]}


def test_the_task_of_strands(tmp_path):
    """Each window is inside a gene, in the part of its split, and its label says if the gene is on its strand."""
    strands = write_genome(tmp_path / "a.gbk")
    splits = dna.load(Namespace(train_file=str(tmp_path / "a.gbk"), step=7, seed=0))
    shares, labels = {"train": (0, 0.7), "validation": (0.7, 0.8), "test": (0.8, 1)}, []
    for name, (first, last) in shares.items():
        starts = []
        for text, label in zip(*splits[name], strict=True):
            read = next(strand for strand, letters in strands.items() if text in letters)
            found = strands[read].index(text)
            start = found if read == 1 else len(DRAWN) - found - dna.LENGTH
            gene, inside = divmod(start, 250)
            assert len(text) == dna.LENGTH and inside + dna.LENGTH <= 200 and gene % 10 != 3
            assert first * len(DRAWN) <= start and start + dna.LENGTH <= last * len(DRAWN)
            assert label == (read == (1, -1)[gene % 2])
            starts.append(start)
            labels.append(label)
        steps = np.diff(starts)
        assert len(starts) > 0 and (steps % (7 if name == "train" else dna.LENGTH) == 0).all() and (steps > 0).all()
    assert 0.3 < np.mean(labels) < 0.7
