"""Windows of a genome as examples of a language model: FASTA files, regions of a BED file, and both strands.

A window is what fills an example, S = `block_size` letters less the special tokens around a masked model's sentence.
Windows follow each other along each contig or region. The letters are kept in memory, a byte for each; a window is
tokenized when it is read. Nothing is to be predicted at letters other than A, C, G, T. Letters in lower case, by which
masked repeats are written, may have a weight w below one: each is predicted with probability w, drawn anew in every
epoch, so that the expectation of the loss has the weight, and the loss itself needs to know none. Windows most of
whose letters are never predicted are left out.

N windows, L = `block_size`.
"""

import logging
import zlib
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .blocks import VALIDATION_SHARE, BlockStream, as_example, random_generator
from .dna import NUCLEOTIDES, nucleotide_ids
from .files import DAMAGED, open_text, read_lines_of
from .text import enclosing_tokens

logger = logging.getLogger("data")
COMPLEMENT = np.frombuffer(bytes.maketrans(b"ACGTUacgtu", b"TGCAAtgcaa"), dtype=np.uint8)
# Of the fourth column of a BED file.
SPLITS = {"train": "train", "valid": "validation", "validation": "validation", "test": "test"}
IGNORED = -100
# Letters of each sequence by which a file of proteins is known.
SAMPLE = 10_000
# A contig, the first letter, the letter after the last one, and the split or None; a window has no end.
Region = tuple[str, int, int, str | None]
Window = tuple[str, int, str | None]


def read_fasta(file: str) -> dict[str, np.ndarray]:
    """Return the letters of each sequence of a FASTA file, also below .gz or .bgz, as bytes `(length,)` by its name.

    A ValueError if the file is damaged, has no sequences, two of one name, or proteins; ImportError without Biopython.
    """
    try:
        from Bio.SeqIO.FastaIO import SimpleFastaParser
    except ModuleNotFoundError as error:
        raise ImportError('FASTA is read by Biopython: pip install "modeling-tnn[dna]"') from error
    genome: dict[str, np.ndarray] = {}
    try:
        with open_text(file) as lines:
            first = next(filter(str.strip, lines), ">")
            if not first.startswith(">"):
                raise ValueError(f"it must begin with `>` and a name, got {first[:40]!r}")
            for title, letters in SimpleFastaParser(chain([first], lines)):
                name = (title.split() or [""])[0]
                if name in genome:
                    raise ValueError(f"it has two sequences with the name {name!r}")
                genome[name] = np.frombuffer(letters.encode("ascii"), dtype=np.uint8)
    except (ValueError, *DAMAGED) as error:
        raise ValueError(f"The file {file} cannot be read as FASTA: {error}") from error
    if empty := [name for name, letters in genome.items() if not len(letters)]:
        if len(empty) == len(genome):
            raise ValueError(f"The file {file} must have sequences in FASTA, got none")
        logger.info("%d sequences of %s have no letters: %s", len(empty), file, ", ".join(empty[:9]))
    some = np.concatenate([letters[:SAMPLE] for letters in genome.values()])
    if (share := np.isin(some, list(b"ACGTUNacgtun")).mean()) < 0.5:
        raise ValueError(f"Most letters of {file} must be A, C, G, T or N, got {share:.0%}: is it a file of proteins?")
    return genome


def read_regions(file: str, genome: dict[str, np.ndarray]) -> list[Region]:
    """Return the regions of a BED file. A fourth column of train, valid or test is their split, any other is a name.

    A ValueError if a line is no region of the genome, or has no split where others have one.
    """
    regions, names = [], {}
    for number, line in enumerate(read_lines_of(file), 1):
        contig, *rest = line.split("\t") if "\t" in line else line.split() or [""]
        if not line.strip() or line.startswith("#") or line.split()[0] in ("track", "browser"):
            continue
        try:
            start, end = map(int, rest[:2])
        except ValueError as error:
            raise ValueError(f"Line {number} of {file} must be `contig start end`, got {line!r}") from error
        if contig not in genome:
            raise ValueError(f"Line {number} of {file} must be in a contig of {some_of(genome)}, got {line!r}")
        length = len(genome[contig])
        if not 0 <= start < end <= length:
            raise ValueError(f"Line {number} of {file} must be in {contig} with {length} letters, got {line!r}")
        split = SPLITS.get(rest[2].strip().lower()) if len(rest) > 2 else None
        regions.append((contig, start, end, split))
        names.setdefault(split, (number, line))
    if len(names) > 1 and None in names:
        number, line = names[None]
        raise ValueError(f"Line {number} of {file} must be train, valid or test, as other lines are, got {line!r}")
    return regions


def some_of(genome: dict[str, np.ndarray]) -> str:
    """Return the names of the first contigs, for messages."""
    return "the genome, " + ", ".join(list(genome)[:3]) + (", ..." if len(genome) > 3 else "")


def window_starts(start: int, end: int, length: int, size: int) -> range:
    """Return where windows of a region begin: one after the other, or one around a region that is shorter.

    Empty if the whole contig, of `length` letters, is shorter than a window.
    """
    if end - start >= size:
        return range(start, end - size + 1, size)
    middle = min(max((start + end - size) // 2, 0), length - size)
    return range(middle, middle + 1) if length >= size else range(0)


def ids_of_letters(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the id of each byte, `(256,)`. Lower case is upper case, and what is no single token is unknown."""
    nucleotide_ids(tokenizer)
    found = np.full(256, tokenizer.unk_token_id or 0)
    pieces = tokenizer([chr(code).upper() for code in range(128)], add_special_tokens=False)["input_ids"]
    for code, ids in enumerate(pieces):
        if len(ids) == 1:
            found[code] = ids[0]
    return found


def windows_of(genome: dict[str, np.ndarray], regions: Sequence[Region], size: int) -> list[Window]:
    """Return the windows of `size` letters of regions, in their order."""
    return [
        (contig, first, split)
        for contig, start, end, split in regions
        for first in window_starts(start, end, len(genome[contig]), size)
    ]


def split_windows(windows: list[Window], contigs: Sequence[str] = ()) -> tuple[list[Window], list[Window]]:
    """Return the windows of training and of validation: by their split, by `contigs` of validation, or the last 5%."""
    if unknown := set(contigs) - {contig for contig, *_ in windows}:
        named = ", ".join(sorted(unknown))
        raise ValueError(f"Contigs of validation must have at least a window, got {named}")
    splits = [split for *_, split in windows]
    if contigs and any(splits):
        raise ValueError(f"Contigs of validation must be absent with regions of train, valid and test, got {contigs}")
    if contigs:
        splits = ["validation" if contig in contigs else "train" for contig, *_ in windows]
    elif not any(splits):
        held = min(len(windows), max(1, round(VALIDATION_SHARE * len(windows))))
        splits = ["train"] * (len(windows) - held) + ["validation"] * held
    pairs = list(zip(windows, splits, strict=True))
    train, validation = ([one for one, own in pairs if own == name] for name in ("train", "validation"))
    return train, validation


class GenomeStream(BlockStream):
    """A stream of windows with `input_ids` and `labels`, `(L,)` each. Labels are -100 where nothing is predicted.

    Args:
        genome: the letters of each contig, from `read_fasta`.
        windows: the contig and the first letter of each, from `windows_of` with S letters.
        block_size: L.
        reverse_complement: whether windows are read from the other strand every second time, at random.
        soft_masked_weight: w, the probability that a letter in lower case is predicted.
        masked, options: as for `BlockStream`.
    """

    def __init__(
        self,
        genome: dict[str, np.ndarray],
        windows: Sequence[Window],
        tokenizer: PreTrainedTokenizerBase,
        block_size: int,
        masked: bool,
        *,
        reverse_complement: bool = False,
        soft_masked_weight: float = 1.0,
        **options,
    ):
        self.genome, self.length, self.reverse_complement = genome, block_size, reverse_complement
        self.enclosing = enclosing_tokens(tokenizer) if masked else ([], [])
        self.size = block_size - sum(map(len, self.enclosing))  # S
        self.ids, self.weights = ids_of_letters(tokenizer), np.zeros(256)
        letters = "".join(NUCLEOTIDES) + "U"
        self.weights[list(letters.encode())], self.weights[list(letters.lower().encode())] = 1.0, soft_masked_weight
        kept = [window for window in windows if (self.weights[self.letters(window)] > 0).mean() >= 0.5]
        if left_out := len(windows) - len(kept):
            logger.info("%d of %d windows are left out: most letters are not to be predicted", left_out, len(windows))
        super().__init__(kept, tokenizer, masked, **options)

    def letters(self, window: Window) -> np.ndarray:
        """The letters of a window, `(S,)`."""
        contig, start, _ = window
        return self.genome[contig][start : start + self.size]

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        letters = self.letters(self.blocks[self.place(number)])
        if self.reverse_complement and torch.rand((), generator=random_generator(self.seed, 4, number)) < 0.5:
            letters = COMPLEMENT[letters[::-1]]
        before, after = self.enclosing
        example = as_example(torch.tensor([*before, *self.ids[letters], *after]), number, self.masking, self.seed)
        drawn = torch.rand(self.size, generator=random_generator(self.seed, 5, number), dtype=torch.float64).numpy()
        predicted = np.pad(drawn < self.weights[letters], (len(before), len(after)))  # (L,)
        return example | {"labels": example["labels"].masked_fill(~torch.from_numpy(predicted), IGNORED)}

    @property
    def block_size(self) -> int:
        return self.length

    def describe(self) -> dict:
        """The identity of the windows: their number, what is predicted, and a checksum of some."""
        places = sorted({0, len(self) // 2, len(self) - 1})
        some = b"".join(self.letters(self.blocks[place]).tobytes() for place in places)
        checksum = zlib.crc32(some + self.weights.tobytes() + repr(self.blocks).encode())
        options = {"block_size": self.length, "reverse_complement": self.reverse_complement}
        return {"blocks": len(self), "checksum": checksum} | options


def whole(genome: dict[str, np.ndarray]) -> list[Region]:
    """Return all contigs as regions."""
    return [(contig, 0, len(letters), None) for contig, letters in genome.items()]
