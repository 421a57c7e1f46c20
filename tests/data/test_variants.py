"""Scores of variants against a computation letter by letter, and what is refused."""

import gzip

import numpy as np
import pytest
import torch

from helpers.models import seeded, slow, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.data.dna import dna_tokenizer
from modeling_tnn.data.variants import Variant, read_variants, score_variants, window_of

LETTERS = "".join(np.random.default_rng(1).choice(list("ACGTacgt"), 40)) + "GATTACA"
GENOME = {"one": np.frombuffer(LETTERS.encode(), dtype=np.uint8)}
OTHER = {"A": "C", "C": "G", "G": "T", "T": "A"}
# In the middle, at both ends, of several letters, an insertion and a deletion.
PLACES = [(20, 1, 1), (1, 1, 1), (47, 1, 1), (25, 3, 3), (30, 1, 4), (33, 3, 1)]


def variant(position: int, reference: int, alternative: int) -> Variant:
    old = LETTERS[position - 1 : position - 1 + reference].upper()
    return Variant("one", position, old, "".join(OTHER[letter] for letter in (old * 4)[:alternative]))


def windows(one: Variant, length: int) -> tuple[str, str, int]:
    """The windows with the reference and the alternative, and where in them the variant is."""
    start = one.position - 1
    first = min(max(start - (length - len(one.reference)) // 2, 0), max(len(LETTERS) - length, 0))
    whole, place = LETTERS[first : first + length].upper(), start - first
    return whole, whole[:place] + one.alternative + whole[place + len(one.reference) :], place


def turned(letters: str) -> str:
    return letters[::-1].translate(str.maketrans("ACGT", "TGCA"))


def naive_likelihood(model, letters: str) -> float:
    """The sum of what a model says of each letter, with a pass for each."""
    ids = dna_tokenizer()(letters, add_special_tokens=False).input_ids
    scores = [model(torch.tensor([ids[:end]])).logits[0, -1].log_softmax(-1)[ids[end]] for end in range(1, len(ids))]
    return sum(scores).item()


@pytest.mark.parametrize("length, both", [(17, True), *slow((500, False))])
def test_a_causal_model(length, both):
    model = seeded(TnnForCausalLM, tiny_config(vocab_size=12)).double().eval()
    variants = [variant(*place) for place in PLACES]
    found = score_variants(model, dna_tokenizer(), GENOME, variants, length, batch_size=3, both_strands=both)
    for one, score in zip(variants, found.tolist(), strict=True):
        old, new, _ = windows(one, length)
        strands = [(old, new), (turned(old), turned(new))][: 1 + both]
        expected = [naive_likelihood(model, new) - naive_likelihood(model, old) for old, new in strands]
        assert score == pytest.approx(np.mean(expected), abs=1e-5), one


@pytest.mark.parametrize("both", [False, True])
def test_a_masked_model(both):
    model, tokenizer = seeded(TnnForMaskedLM, tiny_config(vocab_size=12, causal=False)).eval(), dna_tokenizer()
    variants = [variant(*place) for place in PLACES[:4]]
    found = score_variants(model, tokenizer, GENOME, variants, 17, both_strands=both)
    for one, score in zip(variants, found.tolist(), strict=True):
        old, new, place = windows(one, 17)
        expected, count = [], len(one.reference)
        for before, after, start in [(old, new, place), (turned(old), turned(new), 17 - place - count)][: 1 + both]:
            ids = torch.tensor([tokenizer(before).input_ids])
            places = range(1 + start, 1 + start + count)
            ids[0, places] = tokenizer.mask_token_id
            logs, new_ids, old_ids = model(ids).logits[0].log_softmax(-1), *map(tokenizer, (after, before))
            expected.append(sum(logs[i, new_ids.input_ids[i]] - logs[i, old_ids.input_ids[i]] for i in places).item())
        assert score == pytest.approx(np.mean(expected), abs=1e-5), one
    with pytest.raises(ValueError, match="must keep the number of letters with a masked model, got '.' to '....'"):
        score_variants(model, tokenizer, GENOME, [variant(*PLACES[4])], 17)


def test_files_and_what_is_refused(tmp_path, caplog):
    header = "##x\n#CHROM\tPOS\tID\tREF\tALT\n"
    others = "".join(f"one\t40\t.\tA\t{one}\n" for one in (".", "*", "<DEL>", "<NON_REF>", "A[six:9[", ".C"))
    rows = f"one\t40\t.\tA\tC,GG\t.\none\t40\t.\tA\t*,<X>,c\n{others}six\t1\trs1\tt\tA\none\t9\t.\tR\tA\n"
    expected = [Variant("one", 40, "A", "C"), Variant("one", 40, "A", "GG"), Variant("one", 40, "A", "c")]
    for name, opened in (("a.vcf", open), ("a.vcf.gz", gzip.open), ("a.vcf.bgz", gzip.open)):
        with opened(tmp_path / name, "wt") as lines:
            lines.write(header + rows)
        with caplog.at_level("INFO"):
            assert read_variants(str(tmp_path / name)) == [*expected, Variant("six", 1, "t", "A")]
        assert f"9 of 13 variants of {tmp_path / name} are left out: they have no letters of DNA" in caplog.text
    (tmp_path / "bad.vcf").write_text(header)
    assert read_variants(str(tmp_path / "bad.vcf")) == []
    for line in ("one 40 . A C", "one\tx\t.\tA\tC", "one\t40\t.\tA"):
        (tmp_path / "bad.vcf").write_text(f"{line}\n")
        with pytest.raises(ValueError, match="Line 1 of .*bad.vcf must be CHROM POS ID REF ALT"):
            read_variants(str(tmp_path / "bad.vcf"))
    there = "must be what the genome has there, and shorter than 7, got"
    for wrong, message in (
        (Variant("1", 1, "A", "C"), "must be in a contig of the genome, one, got '1'"),
        (Variant("one", 0, "A", "C"), "must be from 1 to 47, the end of one, got 0"),
        (Variant("one", 47, "AC", "C"), "must be from 1 to 47, the end of one, got 47"),
        (Variant("one", 900, "A", "C"), "must be from 1 to 47, the end of one, got 900"),
        (Variant("one", 41, "T", "C"), there),
        (Variant("one", 41, "GATTACA", "C"), there),
    ):
        with pytest.raises(ValueError, match=message):
            window_of(GENOME, wrong, 7)


@pytest.mark.parametrize("causal, beyond, most", [(True, "error", 29), (False, "error", 30), (True, "zeros", 29)])
def test_the_window_that_a_model_reads(causal, beyond, most):
    """A filter of 32 with an insertion of three letters, or two tokens around; no variants have no scores."""
    config = tiny_config(
        vocab_size=12, causal=causal, tno_type="hyena", hyena_filter_length=32, hyena_filter_beyond=beyond
    )
    model = seeded(TnnForCausalLM if causal else TnnForMaskedLM, config).eval()
    variants = [variant(*place) for place in (PLACES if causal else PLACES[:4])]
    given = model, dna_tokenizer(), GENOME
    for one, score in zip(variants, score_variants(*given, variants), strict=True):
        length = 32 - 2 * (not causal) - max(len(one.alternative) - len(one.reference), 0)
        assert score == pytest.approx(score_variants(*given, [one], length).item(), abs=1e-5)
    assert score_variants(*given, []).shape == (0,)
    if beyond == "zeros":
        assert score_variants(*given, variants, 40).isfinite().all()
    else:
        with pytest.raises(
            ValueError, match=f"`length` must be at most {most} for this model and these variants, got 40"
        ):
            score_variants(*given, variants, 40)
