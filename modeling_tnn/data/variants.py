"""Scores of variants: how much likelier the alternative letters are to a model than those of the reference genome.

    causal    log p(before, alternative, after) - log p(before, reference, after), of windows around the variant
    masked    sum of log p(alternative) - log p(reference) over the letters of the variant, which are all masked

B windows, L length, V vocabulary, N variants.
"""

import logging
import math
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .dna import nucleotide_ids
from .files import read_lines_of
from .genome import COMPLEMENT, some_of

logger = logging.getLogger("data")


class Variant(NamedTuple):
    """A variant as a row of a VCF file has it: `position` counts from 1."""

    contig: str
    position: int
    reference: str
    alternative: str


class Window(NamedTuple):
    """The letters around a variant."""

    before: str
    reference: str
    alternative: str
    after: str

    def other_strand(self) -> "Window":
        """Return the same variant on the other strand."""
        turned = [COMPLEMENT[np.frombuffer(part.encode()[::-1], dtype=np.uint8)].tobytes().decode() for part in self]
        return Window(turned[3], turned[1], turned[2], turned[0])


def read_variants(file: str) -> list[Variant]:
    """Return the variants of a VCF file, also below .gz; a row with several alternatives is several variants.

    Those without letters, such as `.`, `*`, `<DEL>` and breakends, are left out; a message says how many. A ValueError
    if a line is no row of VCF.
    """
    found = []
    for number, line in enumerate(read_lines_of(file), 1):
        if not line.strip() or line.startswith("#"):
            continue
        columns = line.split("\t")
        if len(columns) < 5 or not columns[1].isdecimal() or not all(columns[3:5]):
            raise ValueError(f"Line {number} of {file} must be CHROM POS ID REF ALT, got {line!r}")
        found += [Variant(columns[0], int(columns[1]), columns[3], one) for one in columns[4].split(",")]
    kept = [one for one in found if set(one.reference.upper() + one.alternative.upper()) <= set("ACGTUN")]
    if left_out := len(found) - len(kept):
        logger.info("%d of %d variants of %s are left out: they have no letters of DNA", left_out, len(found), file)
    return kept


def window_of(genome: dict[str, np.ndarray], variant: Variant, length: int) -> Window:
    """Return about `length` letters of the reference with the variant in the middle, fewer in a short contig.

    A ValueError if the genome has no such contig or position, or other letters there than the variant's reference, or
    the window has no room for it.
    """
    if variant.contig not in genome:
        raise ValueError(f"{variant} must be in a contig of {some_of(genome)}, got {variant.contig!r}")
    contig, reference = genome[variant.contig], variant.reference.upper()
    start, end = variant.position - 1, variant.position - 1 + len(reference)
    if not 0 <= start < end <= len(contig):
        raise ValueError(f"{variant} must be from 1 to {len(contig)}, the end of {variant.contig}, got {start + 1}")
    present = contig[start:end].tobytes().decode().upper()
    if present != reference or len(reference) >= length:
        raise ValueError(
            f"The reference of {variant} must be what the genome has there, and shorter than {length}, got {present!r}"
        )
    first = max(0, min(start - (length - len(reference)) // 2, len(contig) - length))
    before, after = (contig[i:j].tobytes().decode().upper() for i, j in ((first, start), (end, first + length)))
    return Window(before, reference, variant.alternative.upper(), after)


@torch.inference_mode()
def log_likelihoods(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sequences: Sequence[str], batch_size: int = 8
) -> torch.Tensor:
    """Return the log-probability of the letters of each sequence after its first one, by a causal model, `(N,)`.

    Sequences of one length share a forward pass, `batch_size` B at most; there is no padding.
    """
    found = torch.zeros(len(sequences), dtype=torch.float64)
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    for _, group in groupby(order, key=lambda index: len(sequences[index])):
        for places in torch.tensor(list(group)).split(batch_size):
            texts = [sequences[place] for place in places]
            ids = tokenizer(texts, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
            ids = ids.to(model.device)  # (B, L)
            logits = model(ids, use_cache=False).logits[:, :-1].float()  # (B, L-1, V)
            nats = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").double()
            found[places] = -nats.sum(1).cpu()
    return found


@torch.inference_mode()
def masked_ratio(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, window: Window) -> float:
    """Return the log-likelihood ratio of a variant by one pass of a masked model; ValueError if its length changes."""
    if len(window.alternative) != len(window.reference):
        given = f"{window.reference!r} to {window.alternative!r}"
        raise ValueError(f"A variant must keep the number of letters with a masked model, got {given}")
    read = partial(tokenizer, return_tensors="pt", verbose=False)
    hidden = tokenizer.mask_token * len(window.reference)
    ids = read(window.before + hidden + window.after).input_ids.to(model.device)  # (1, L)
    scores = model(ids).logits[ids == tokenizer.mask_token_id].double().log_softmax(-1)  # (letters, V)
    parts = (read(part, add_special_tokens=False).input_ids[0] for part in (window.reference, window.alternative))
    reference, alternative = (part.to(model.device) for part in parts)
    return (scores.gather(1, alternative[:, None]) - scores.gather(1, reference[:, None])).sum().item()


def longest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the number of letters that a model reads at once."""
    config, most = model.config, math.inf
    if config.model_type != "tnn":
        most = getattr(config, "max_position_embeddings", None) or math.inf
    elif "hyena" in config.tno_types:
        most = min(layer.hyena_filter_length for layer in config.layer_configs if layer.tno_type == "hyena")
    return most - (tokenizer.num_special_tokens_to_add() if "MaskedLM" in type(model).__name__ else 0)


@torch.inference_mode()
def score_variants(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    genome: dict[str, np.ndarray],
    variants: Sequence[Variant],
    length: int | None = None,
    batch_size: int = 8,
    both_strands: bool = False,
) -> torch.Tensor:
    """Return the log-likelihood ratio of each variant in nats, `(N,)`: below 0 where the reference is likelier.

    Args:
        model: a causal or masked language model, in evaluation mode.
        tokenizer: has one token for each nucleotide.
        genome: the letters of each contig, from `genome.read_fasta`.
        variants: their positions count from 1, as in VCF.
        length (*optional*): letters of a window, unless given 1,024, or as many as the model reads. A causal model
            sees half of them before the variant; the other half counts by how likely it is after each of both.
        batch_size (defaults to 8): windows in a forward pass of a causal model.
        both_strands: whether to return the mean of the ratios on both strands.

    Raises:
        ValueError: a variant does not fit the genome (`window_of`) or a masked model (`masked_ratio`), the
            tokenizer is another one, or `length` is more than the model reads.
    """
    nucleotide_ids(tokenizer)
    room, strict = longest(model, tokenizer), getattr(model.config, "hyena_filter_beyond", None) == "error"
    most = [room - max(len(one.alternative) - len(one.reference), 0) for one in variants]
    if length is not None and strict and length > min(most, default=length):
        raise ValueError(f"`length` must be at most {min(most)} for this model and these variants, got {length}")
    lengths = [min(1024, one) if length is None else length for one in most]
    windows = [window_of(genome, *one) for one in zip(variants, lengths, strict=True)]
    windows += [window.other_strand() for window in windows] if both_strands else []
    if "MaskedLM" in type(model).__name__:
        ratios = torch.tensor([masked_ratio(model, tokenizer, window) for window in windows], dtype=torch.float64)
    else:
        sequences = [window.before + letters + window.after for window in windows for letters in window[1:3]]
        reference, alternative = log_likelihoods(model, tokenizer, sequences, batch_size).view(-1, 2).unbind(1)
        ratios = alternative - reference
    return ratios.view(1 + both_strands, -1).mean(0)
